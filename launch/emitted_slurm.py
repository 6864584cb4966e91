"""`phalanx run --emit slurm`: a batch script that saves, requeues itself and goes on."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from phalanx.launch import values as checked
from phalanx.launch.emit import Emission, option_words
from phalanx.launch.sbatch_words import given_by, options_of, seconds_of
from phalanx.launch.values import Values
from phalanx.tools.usage import UsageMistake

#: Time before the limit at which Slurm's signal comes, where a quarter of the job's time is not less.
_WARNING_S = 300
#: Becomes a line of #SBATCH, or has no meaning in a script.
_NOT_PASSED = frozenset({"emit", "sbatch", "nnodes", "log_dir", "gpus", "dry_run", "module", "no_python"})
#: srun's step says where the nodes are.
_REFUSED = (
    "hosts", "hostfile", "local_nodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port",
    "standalone", "local_addr",
)  # fmt: skip

_END = """\
step=$!
code=0
wait "$step" || code=$?
# A signal ends bash's wait, not the step.
while kill -0 "$step" 2>/dev/null; do
    code=0
    wait "$step" || code=$?
done
# 75: the ranks have saved. After Slurm's warning the job goes on from there in a new allocation; after scancel it does not.
if [ "$code" -eq 75 ] && [ -n "$warned" ]; then
    echo "saved; job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script
fi
exit "$code"
"""


def batch_script(job: Emission) -> str:
    """The script, as sbatch takes it.

    Raises:
        UsageMistake: A word for sbatch is none, or contradicts the job; an option says where nodes are.
    """
    for key in _REFUSED:
        if key in job.given:
            raise UsageMistake(
                f"{job.given[key]} with --emit slurm: the job's nodes are Slurm's choice, and they meet at the first.",
                fix=f"leave {job.given[key].source} out; --nnodes says how many",
            )
    return "\n".join(["#!/bin/bash", *_headers(job), "", *_body(job), _END])


def _headers(job: Emission) -> Iterator[str]:
    """The #SBATCH lines: ours where the user's words say nothing, and the user's."""
    words = options_of(job.given.get("sbatch"))
    theirs = given_by(words)
    for name, value in _ours(job, theirs):
        if name not in theirs:
            yield f"#SBATCH --{name}" + (f"={_quoted(value)}" if value else "")
    for option, given in words:
        joint = "" if given is None else " " if len(option) == 2 else "="
        yield f"#SBATCH {option}{joint}{'' if given is None else _quoted(given)}"


def _quoted(value: str) -> str:
    """As a word of an #SBATCH line, which sbatch reads without a shell: only quotes count, and % is its own."""
    return value if re.fullmatch(r"[\w@%+=:,./\[\]-]+", value, re.ASCII) else shlex.quote(value)


def _ours(job: Emission, theirs: dict[str, str]) -> Iterator[tuple[str, str]]:
    low, high = checked.nnodes(job.given)
    nodes = str(high) if low == high else f"{low}-{high}"
    if "nodes" in theirs and "nnodes" in job.given and theirs["nodes"] != nodes:
        raise UsageMistake(
            f"{job.given['nnodes']}, but --sbatch asks for {theirs['nodes']} nodes.",
            fix="leave the nodes out of --sbatch",
        )
    ranks = checked.whole_number(job.given, "nproc_per_node", low=1) if _is_number(job.given) else None
    yield "job-name", _name(job)
    yield "nodes", nodes
    yield "ntasks-per-node", "1"
    if not {"cpus-per-gpu", "exclusive"} & set(theirs) and ranks:
        yield "cpus-per-task", str(ranks)
    gpus = _gpus_per_node(job.given)
    if gpus and not {"gres", "gpus", "gpus-per-task"} & set(theirs):
        yield "gpus-per-node", str(gpus)
    yield "chdir", os.getcwd()
    yield "output", "%x-%j.out"
    yield "open-mode", "append"
    yield "requeue", ""
    limit_s = seconds_of(theirs["time"]) if "time" in theirs else None
    yield "signal", f"B:USR1@{min(_WARNING_S, limit_s // 4) if limit_s else _WARNING_S}"


def _is_number(given: Values) -> bool:
    return "nproc_per_node" in given and given["nproc_per_node"].text.strip().isdecimal()


def _gpus_per_node(given: Values) -> int | None:
    """How many GPUs the job asks for on each node; None where nothing says."""
    if "gpus" not in given:
        return None
    text = given["gpus"].text.strip().lower()
    if text in ("none", "cpu"):
        return 0
    if text.startswith("auto:") and text[5:].isdecimal() and int(text[5:]) > 0:
        return int(text[5:])
    raise UsageMistake(
        f"{given['gpus']} with --emit slurm: which GPUs there are is known once Slurm has given them.",
        fix="--gpus auto:4 for 4 GPUs on each node, or --gpus none",
    )


def _body(job: Emission) -> Iterator[str]:
    python = Path(sys.executable)
    if sys.prefix != sys.base_prefix:
        yield f"export VIRTUAL_ENV={shlex.quote(sys.prefix)}"
    yield f'export PATH={shlex.quote(str(python.parent))}:"$PATH"'
    if os.environ.get("PYTHONPATH"):
        yield f"export PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])}"
    # srun does not take it from the job since Slurm 22.05, and each agent would have one core.
    yield '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
    yield ""
    own = f'"phalanx-logs/slurm-$SLURM_JOB_ID-{_name(job)}"'
    log_dir = shlex.quote(checked.text(job.given, "log_dir")) if "log_dir" in job.given else own
    yield "warned="
    yield "step="
    yield """trap 'warned=1; [ -z "$step" ] || kill -USR1 "$step"' USR1"""
    yield "# One agent per node starts that node's ranks; exit code 75 of one must not end the others in their save."
    yield "srun --kill-on-bad-exit=0 --wait=120 \\"
    yield f"    {shlex.quote(str(python))} -m phalanx run --log-dir {log_dir} {_run_words(job)} &"


def _name(job: Emission) -> str:
    return re.sub(r"[^\w.-]", "_", job.target.display, flags=re.ASCII) or "phalanx"


def _run_words(job: Emission) -> str:
    words: list[str] = []
    for key, given in job.given.items():
        if key not in _NOT_PASSED:
            words += option_words(key, given)
    if "gpus" in job.given and _gpus_per_node(job.given) == 0:
        words += ["--gpus", "none"]
    words += ["-m"] * ("module" in job.given) + ["--no-python"] * ("no_python" in job.given)
    return shlex.join([*words, job.typed, *job.args])

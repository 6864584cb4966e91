"""`phalanx bench`: how fast ranks talk to each other, and how fast a loader is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from phalanx.tools.bench.options import bench_options
from phalanx.tools.bench.settings import check_kind, checked_settings
from phalanx.tools.usage import CannotFinish, UsageMistake

SHOWN_LINES = 20  # of ranks that failed
DEFAULT_RANKS = "2"  # without GPUs

_HELP = """Measure collectives between ranks, with the bandwidths that nccl-tests defines, and check their results.

\b
phalanx bench all-reduce                       also all-gather, reduce-scatter, broadcast, all-to-all, send-recv
phalanx bench all-reduce --nproc-per-node 4 --min-bytes 1K --max-bytes 256M
phalanx bench latency                          small messages, each timed alone
phalanx bench loader train.py:make_loader      samples/s of a DataLoader or ShardLoader, by number of workers

It starts its own ranks on this node. On several nodes, start it as ranks are started:
phalanx run --nnodes 2 ... -m phalanx.tools.bench all-reduce (or torchrun, or srun).

Exit code: 0 fine, 1 a result was wrong, 2 usage, 3 it could not be measured.
"""


@click.command("bench", help=_HELP, short_help="Measure collectives between ranks, or a loader.")
@click.argument("kind")
@click.argument("target", required=False)
@click.option(
    "--nproc-per-node",
    envvar="PHALANX_BENCH_NPROC_PER_NODE",
    metavar="N",
    help="Ranks to start.  [default: one per idle GPU, 2 without]",
)
@click.option(
    "--gpus", envvar="PHALANX_BENCH_GPUS", metavar="WHICH", help="As for `phalanx run`: auto, none, 0,1, ..."
)
@bench_options
def bench_command(
    kind: str, target: str | None, nproc_per_node: str | None, gpus: str | None, as_json: bool, **given: Any
) -> int:
    """What `_HELP` says."""
    kind = check_kind(kind)
    if find_spec("torch") is None:
        raise CannotFinish(
            f"torch is not installed for {sys.executable}, and it is what is measured.",
            fix=f"{sys.executable} -m pip install torch, or start phalanx with the Python that has it",
        )
    if kind == "loader":
        from phalanx.tools.bench.__main__ import checked_loader

        checked_loader(target, given)
        words = ["loader", target or ""]
        for name in ("workers", "iterations", "warmup"):
            words += [f"--{name}", given[name]] if given[name] else []
        start = [sys.executable, "-m"]
    else:
        if target is not None:
            raise UsageMistake(f"{target!r}: {kind} takes no target.", fix=f"phalanx bench {kind}")
        words = checked_settings(kind, given).words()
        start = _run_words(nproc_per_node, gpus, given["backend"])
    return _measure(start, words, as_json)


def _run_words(nproc_per_node: str | None, gpus: str | None, backend: str | None) -> list[str]:
    """The beginning of the command that starts the ranks."""
    words = [sys.executable, "-m", "phalanx", "run", "--show", "rank0"]
    if gpus is not None:
        words += ["--gpus", gpus]
    elif backend == "gloo":
        words += ["--gpus", "none"]
    if nproc_per_node is not None:
        words += ["--nproc-per-node", nproc_per_node]
    elif backend == "gloo" or gpus in ("none", "cpu") or not _has_gpus():
        words += ["--nproc-per-node", DEFAULT_RANKS]
    return words


def _has_gpus() -> bool:
    from phalanx.dist.gpus import nvml_inventory

    return bool(nvml_inventory())


def _measure(start: list[str], words: list[str], as_json: bool) -> int:
    """Start the ranks, let rank 0 print, and read what they leave."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name:
        folder = Path(name)
        result = folder / "result.json"
        if "run" in start:
            start = [*start, "--log-dir", str(folder / "logs"), "-m"]
        command = [*start, "phalanx.tools.bench", *words, *["--json"] * as_json, "--result", str(result)]
        with (folder / "output.txt").open("w+b") as output:
            code = _ended(command, output if as_json else None, output)
            report = json.loads(result.read_text()) if result.is_file() else None
            if report is None:
                raise _failed(code, output)
    if "error" in report:
        problem, _, fix = report["error"].partition("\nFix: ")
        raise UsageMistake(problem, fix=fix) if report["usage"] else CannotFinish(problem, fix=fix)
    if as_json:
        click.echo(json.dumps(report))
    return 0 if report["correct"] else 1


def _ended(command: list[str], out: Any, err: Any) -> int:
    """Exit code of the ranks. Ctrl-C reaches them by themselves: they end first, then we do."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=os.environ)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _failed(code: int, output: Any) -> Exception:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    text = "\n".join(lines[-SHOWN_LINES:])
    if code == 2:  # what `phalanx run` says of its options holds for ours
        problem, _, fix = text.replace("phalanx run: ", "").partition("\nFix: ")
        return UsageMistake(problem, fix=fix or "phalanx bench --help")
    shown = "".join(f"\n  {line}" for line in lines[-SHOWN_LINES:])
    return CannotFinish(
        f"the ranks ended with exit code {code} and left no result.{shown}",
        fix="phalanx doctor checks this machine",
    )

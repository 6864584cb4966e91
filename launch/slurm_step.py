"""`srun phalanx run`: what one task of a Slurm step is, its node's agent or a rank itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.dist.environments import slurm
from phalanx.dist.environments.rank_environment import InvalidRankEnvironment, RankEnvironment
from phalanx.launch.options import Given
from phalanx.launch.spec import Target
from phalanx.launch.values import Values
from phalanx.tools.usage import UsageMistake

#: Whoever says where the nodes meet, or that there is one, does not want it from Slurm.
_OWN_MEETING = (
    "node_rank", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "standalone", "hosts", "hostfile",
    "local_nodes",
)  # fmt: skip
#: Options that need an agent.
_AGENTS_OWN = ("max_restarts", "no_preload", "local_ranks_filter", "virtual_local_rank")


def task(given: Values, environ: Mapping[str, str]) -> RankEnvironment | None:
    """This task's place in its step; None outside a step, and where the user says where the nodes meet.

    Inside torchrun's or phalanx's own ranks Slurm's variables are still there, and say nothing of them.

    Raises:
        UsageMistake: Slurm's variables are incomplete or contradict each other.
    """
    if any(key in given for key in _OWN_MEETING) or environ.get("TORCHELASTIC_RUN_ID"):
        return None
    try:
        return slurm.from_environ(environ)
    except InvalidRankEnvironment as error:
        problem, _, fix = str(error).partition("\nFix: ")
        raise UsageMistake(problem, fix=fix) from None


def num_nodes(found: RankEnvironment, environ: Mapping[str, str]) -> int:
    """Nodes of the step."""
    text = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or ""
    return int(text) if text.isdecimal() else found.world_size


def is_agent(found: RankEnvironment, environ: Mapping[str, str]) -> bool:
    """Whether the step has one task per node: each starts its node's ranks. Else each task is one rank."""
    return found.world_size == num_nodes(found, environ)


def as_agent(
    found: RankEnvironment, given: Values, environ: Mapping[str, str], name: str
) -> dict[str, Given]:
    """The options of this node's agent: those given, and the meeting as the step has it.

    Args:
        found: This task's place.
        given: Options as typed.
        environ: Slurm's variables.
        name: Short name of the target, for the log folder.

    Raises:
        UsageMistake: ``--nnodes`` names another number of nodes than the step has.
    """
    count = num_nodes(found, environ)
    if "nnodes" in given and given["nnodes"].text.rpartition(":")[2].strip() != str(count):
        raise UsageMistake(
            f"{given['nnodes']}, but this Slurm step has {count} node{'s' * (count > 1)}: its agents would wait for "
            "nodes that nobody starts, or leave some out.",
            fix="leave --nnodes out, and give srun --nodes",
        )
    if count == 1:
        return dict(given)
    job = environ.get("SLURM_JOB_ID", "0")
    step = environ.get("SLURM_STEP_ID", "0")
    folder = Path(given["log_dir"].text if "log_dir" in given else f"phalanx-logs/slurm-{job}.{step}-{name}")
    where = given["log_dir"].source if "log_dir" in given else "--log-dir"
    made = {
        "nnodes": str(count),
        "node_rank": str(found.node_rank),
        "rdzv_backend": "static",
        "master_addr": found.master_addr,
        "master_port": str(found.master_port),
        "rdzv_id": f"slurm-{job}.{step}",
    }
    return {
        **given,
        **{key: Given(value, f"--{key.replace('_', '-')}") for key, value in made.items()},
        "log_dir": Given(str(folder / f"node-{found.node_rank}"), where),
    }


def rank_variables(found: RankEnvironment, environ: Mapping[str, str]) -> dict[str, str]:
    """What a task that is a rank itself finds in its environment, as torchrun sets it."""
    here = found.local_world_size if found.local_world_size is not None else found.world_size
    return {
        "RANK": str(found.rank),
        "WORLD_SIZE": str(found.world_size),
        "LOCAL_RANK": str(found.local_rank),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(found.node_rank if found.node_rank is not None else 0),
        "GROUP_WORLD_SIZE": str(num_nodes(found, environ)),
        "MASTER_ADDR": found.master_addr,
        "MASTER_PORT": str(found.master_port),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or _threads(environ, here),
    }


def _threads(environ: Mapping[str, str], here: int) -> str:
    given = environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdecimal() and int(given) > 0:
        return given
    # Without --cpus-per-task a task may be bound to its own cores, or see all of the node's.
    cores = len(os.sched_getaffinity(0))
    return str(max(1, cores // here if cores >= here else cores))


def refuse_agents_options(found: RankEnvironment, given: Values) -> None:
    """Complain of what the ranks of a step with several tasks per node cannot have.

    Raises:
        UsageMistake: An option needs an agent that starts the ranks.
    """
    ranks = given.get("nproc_per_node")
    if ranks is not None and ranks.text.strip() != "1":
        raise UsageMistake(
            f"{ranks}, but srun started {found.world_size} tasks, several on a node, and each is one rank: ranks would "
            "start ranks, and share GPUs.",
            fix=f"leave {ranks.source} out, or start one task per node with srun --ntasks-per-node=1",
        )
    for key in _AGENTS_OWN:
        if key in given and given[key].text != "0":
            raise UsageMistake(
                f"{given[key]}: srun started several tasks per node, each of which is one rank, and nobody starts "
                "it or reads its output but srun.",
                fix=f"leave {given[key].source} out, or start one task per node with srun --ntasks-per-node=1",
            )


def become_rank(target: Target, args: Sequence[str], variables: Mapping[str, str]) -> None:
    """Go on as the rank: this process is replaced."""
    os.environ.update(variables)
    words = [target.name, *args]
    if target.kind != "command":
        words = [sys.executable, "-u", *(["-m"] if target.kind == "module" else []), *words]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(words[0], words)

"""MPI launchers: Open MPI, MVAPICH, and those that speak PMI (MPICH, Intel MPI, Cray)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.dist.environments import slurm
from phalanx.dist.environments.rank_environment import (
    InvalidRankEnvironment,
    RankEnvironment,
    is_loopback,
    read_int,
    refuse_contradictions,
)
from phalanx.dist.environments.slurm import FIRST_PORT, NUM_PORTS, expand_hostlist, is_step
from phalanx.dist.environments.torchrun import is_set


@dataclass(frozen=True)
class _Launcher:
    """One MPI's names; of several, the first that is set counts."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "PMI",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    ),
)
# What all ranks of one job see alike, and other jobs do not.
_JOB_IDS = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "MPIRUN_ID",
    "PMI_JOBID",
    "PALS_APID",
    "PBS_JOBID",
    "LSB_JOBID",
    "SLURM_JOB_ID",
)


def from_environ(environ: Mapping[str, str]) -> RankEnvironment | None:
    """The rank that an MPI launcher gave this process, None when none did.

    Rank, size, local rank and local size are the launcher's own variables: ``rank % GPUs`` is wrong as soon as nodes
    differ, so a local rank that no variable tells is an error on several nodes.

    ``MASTER_ADDR`` is 127.0.0.1 on one node. On several it must be set, unless the first host of the job's list
    (``PBS_NODEFILE``, ``LSB_MCPU_HOSTS``, ``SLURM_JOB_NODELIST``), where MPI puts rank 0, tells it. ``MASTER_PORT``, unless set, follows
    from the job's id.

    >>> found = from_environ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "12", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    ...     "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    >>> found.rank, found.local_rank, found.local_world_size
    (5, 1, 8)

    Raises:
        InvalidRankEnvironment: A variable is missing, is no number, or contradicts another.
    """
    launcher = next((each for each in _LAUNCHERS if is_set(environ, each.rank)), None)
    if launcher is None:
        _refuse_size_alone(environ)
        _refuse_pmix_alone(environ)
        return None
    world_size = read_int(environ, launcher.size, minimum=1)
    rank = read_int(environ, launcher.rank)
    assert rank is not None
    if world_size is None:
        raise InvalidRankEnvironment(
            f"{launcher.rank}={rank}, but {launcher.size} is missing.\n"
            "This process cannot tell how many ranks there are.\n"
            f"Fix: pass {launcher.name}'s variables on, or start the ranks with `phalanx run`"
        )
    local_rank, ranks_here = _first(environ, launcher.local_rank), _first(environ, launcher.local_size)
    task = _same_task(environ, rank, world_size)
    if local_rank is None and task is not None:
        return None  # srun --mpi=pmi2: Slurm tells the same rank, and the local one as well
    if ranks_here is None and task is not None:
        ranks_here = task.local_world_size
    if ranks_here is None and world_size == 1:
        ranks_here = 1
    if local_rank is None:
        if world_size != 1 and ranks_here != world_size:
            raise InvalidRankEnvironment(
                f"{launcher.rank}={rank} {launcher.size}={world_size}: none of {', '.join(launcher.local_rank)} is set.\n"
                "This process cannot tell which of its node's devices is its own; rank modulo devices is wrong where nodes differ.\n"
                f"Fix: export {launcher.local_rank[0]}=<position among this node's ranks> and "
                f"{launcher.local_size[0]}=<ranks of this node>"
            )
        local_rank = rank  # all ranks are on this node
    found = RankEnvironment(
        rank=rank,
        local_rank=local_rank,
        node_rank=0 if ranks_here == world_size else None if task is None else task.node_rank,
        world_size=world_size,
        local_world_size=ranks_here,
        master_addr=_master_addr(environ, ranks_here, world_size) if task is None else task.master_addr,
        master_port=read_int(environ, "MASTER_PORT", minimum=1, maximum=65535) or master_port(environ),
        source="mpi",
    )
    refuse_contradictions(environ, found, f"this {launcher.name} process's")
    return found


def _same_task(environ: Mapping[str, str], rank: int, world_size: int) -> RankEnvironment | None:
    """The Slurm task that this process is, where ``srun`` itself started the ranks (``--mpi=pmi2``, Cray's PMI).

    An mpirun inside an allocation may start its daemons by srun: those tasks are other ones, one for each node.
    """
    if not is_step(environ):
        return None
    tasks = read_int(environ, "SLURM_STEP_NUM_TASKS") or read_int(environ, "SLURM_NTASKS")
    if (read_int(environ, "SLURM_PROCID"), tasks) != (rank, world_size) or not is_set(
        environ, "SLURM_LOCALID"
    ):
        return None
    return slurm.from_environ(environ)


def master_port(environ: Mapping[str, str]) -> int:
    """A port that all ranks of a job agree on, and that other jobs on the node rarely share.

    Without any id of the job it is the first of the range: two such jobs on one node need MASTER_PORT.
    """
    for name in _JOB_IDS:
        if is_set(environ, name):
            # Open MPI's id of the process ends in the rank's own number.
            job = environ[name].split(";")[0]
            return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
    return FIRST_PORT


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    values = (read_int(environ, name) for name in names)
    return next((value for value in values if value is not None), None)


def _master_addr(environ: Mapping[str, str], ranks_here: int | None, world_size: int) -> str:
    given = environ.get("MASTER_ADDR", "").strip()
    if given and is_loopback(given) and ranks_here is not None and ranks_here < world_size:
        raise InvalidRankEnvironment(
            f"MASTER_ADDR={given}, but MPI started {ranks_here} of {world_size} ranks on this node: the others would look "
            "for rank 0 on their own node.\nThe ranks would wait for each other until the timeout.\n"
            "Fix: mpirun -x MASTER_ADDR=<host of rank 0> ..."
        )
    if given:
        return given
    if ranks_here == world_size:
        return "127.0.0.1"
    host = _first_host(environ)
    if host is None:
        raise InvalidRankEnvironment(
            "MPI started ranks on several nodes, and MASTER_ADDR is not set.\n"
            "The ranks would not know where to meet: MPI does not tell where rank 0 is.\n"
            "Fix: mpirun -x MASTER_ADDR=<host of rank 0> ... (MPICH and Intel MPI: -genv MASTER_ADDR <host>)"
        )
    return host


def _first_host(environ: Mapping[str, str]) -> str | None:
    """The first host of the batch system's list; None without a list."""
    path = environ.get("PBS_NODEFILE", "").strip()
    if path:
        try:
            lines = Path(path).read_text().split()
        except OSError:
            lines = []
        if lines:
            return lines[0]
    hosts = environ.get("LSB_MCPU_HOSTS", "").split()  # host slots host slots ...
    if hosts:
        return hosts[0]
    if is_set(environ, "SLURM_JOB_NODELIST"):
        try:
            return expand_hostlist(environ["SLURM_JOB_NODELIST"])[0]
        except ValueError as error:
            raise InvalidRankEnvironment(f"SLURM_JOB_NODELIST: {error}") from None
    return None


def _refuse_pmix_alone(environ: Mapping[str, str]) -> None:
    """PMIx tells a process its rank by a variable, and the number of ranks only to those that speak PMIx."""
    rank = environ.get("PMIX_RANK", "").strip()
    if re.fullmatch(r"\d+", rank) and int(rank) > 0 and not is_step(environ):
        raise InvalidRankEnvironment(
            f"PMIX_RANK={rank}, but nothing tells how many ranks there are.\n"
            "This process would train alone, beside the others.\n"
            "Fix: start the ranks with mpirun or srun, whose variables tell it, or with `phalanx run`"
        )


def _refuse_size_alone(environ: Mapping[str, str]) -> None:
    for launcher in _LAUNCHERS:
        size = environ.get(launcher.size, "").strip()
        if re.fullmatch(r"\d+", size) and int(size) > 1:
            raise InvalidRankEnvironment(
                f"{launcher.size}={size}, but {launcher.rank} is not set.\n"
                f"Each of {size} processes would take itself for the only one.\n"
                f"Fix: pass {launcher.name}'s variables on, or start the ranks with `phalanx run`"
            )

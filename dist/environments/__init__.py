"""Where this process stands among the ranks: one file per launcher, no torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from phalanx.dist.environments import accelerate_launch, mpi, single, slurm, torchrun
from phalanx.dist.environments.rank_environment import InvalidRankEnvironment, RankEnvironment

__all__ = ["InvalidRankEnvironment", "RankEnvironment", "detect"]


def detect(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """This process's place among the ranks, from the first launcher that speaks up.

    In order: torchrun's ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` when all three are set; the process of an MPI job
    (Open MPI, MVAPICH, PMI); the task of a Slurm step; torchrun's again, which then must name a place on their own; one process. So a torchrun inside
    ``srun`` is torchrun's, and ``WORLD_SIZE`` alone in a Slurm script is completed from the step, if it agrees.

    >>> detect({}).source
    'single'
    >>> detect({"RANK": "1", "WORLD_SIZE": "2"})
    Traceback (most recent call last):
        ...
    phalanx.dist.environments.rank_environment.InvalidRankEnvironment: RANK=1 WORLD_SIZE=2: LOCAL_RANK, MASTER_ADDR, MASTER_PORT are missing.
    This process cannot tell its place among the ranks, and the others would wait for it.
    Fix: start the ranks with `phalanx run` or torchrun, which set all of them; for one process: unset RANK WORLD_SIZE

    Args:
        environ: The variables to read, by default this process's.

    Raises:
        InvalidRankEnvironment: Variables are partly set, are no numbers, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    found = None
    if all(torchrun.is_set(environ, name) for name in torchrun.IDENTITY):
        found = torchrun.from_environ(environ)
    found = (
        found or mpi.from_environ(environ) or slurm.from_environ(environ) or torchrun.from_environ(environ)
    )
    if found is None:
        accelerate_launch.refuse_lone_process(environ)
        single.warn_of_meeting_place(environ)
        found = single.single()
    elif found.source == "torchrun":
        _warn_of_lone_copies(environ, found)
    return found


def _warn_of_lone_copies(environ: Mapping[str, str], found: RankEnvironment) -> None:
    """RANK and WORLD_SIZE of some earlier run in the environment that mpirun or srun passes on to every process."""
    if torchrun.is_set(environ, "TORCHELASTIC_RUN_ID") or found.world_size > 1:
        return  # a launcher inside each task
    sizes = ["OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"]
    sizes += ["SLURM_STEP_NUM_TASKS"] * slurm.is_step(environ)
    for name in sizes:
        text = environ.get(name, "").strip()
        if text.isdecimal() and int(text) > 1:
            warnings.warn(
                f"RANK={found.rank} WORLD_SIZE=1 are set, and count, but {name}={text}: {text} processes were started, and "
                "each trains alone. Fix: unset RANK WORLD_SIZE LOCAL_RANK, if they are to be one run",
                stacklevel=3,
            )
            return

"""`phalanx run --emit`: the job as a script for a scheduler, in place of running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.launch import values as checked
from phalanx.launch.spec import Target
from phalanx.launch.values import Values
from phalanx.tools.usage import UsageMistake

KINDS = ("slurm",)


@dataclass(frozen=True, kw_only=True)
class Emission:
    """What is to be run."""

    target: Target
    typed: str  # TARGET as typed
    args: Sequence[str]
    given: Values


def emit(job: Emission) -> str:
    """The text for ``--emit KIND``; nothing is started or written.

    Raises:
        UsageMistake: The kind is unknown, or an option does not fit it.
    """
    if "emit" not in job.given:
        raise UsageMistake(
            f"{job.given['sbatch']}: without --emit slurm nothing is written for sbatch.",
            fix="phalanx run --emit slurm --sbatch '-p gpu -t 1:00:00' train.py > job.sh",
        )
    checked.choice(job.given, "emit", KINDS)
    from phalanx.launch.emitted_slurm import batch_script

    return batch_script(job)

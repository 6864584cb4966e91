"""`phalanx run --emit`: the job as a script for a scheduler, in place of running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.launch import values as checked
from phalanx.launch.options import BY_KEY, Given
from phalanx.launch.spec import Target
from phalanx.launch.values import Values
from phalanx.tools.usage import UsageMistake

KINDS = ("slurm", "kubernetes")


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
    kind = checked.choice(job.given, "emit", KINDS)
    for option, its_kind in (("sbatch", "slurm"), ("kubernetes", "kubernetes")):
        if option in job.given and kind != its_kind:
            raise UsageMistake(
                f"{job.given[option]}: nothing reads it without --emit {its_kind}.",
                fix=f"--emit {its_kind}, or leave it out",
            )
    if kind == "kubernetes":
        from phalanx.launch.emitted_kubernetes import manifest

        return manifest(job)
    from phalanx.launch.emitted_slurm import batch_script

    return batch_script(job)


def option_words(key: str, given: Given) -> list[str]:
    """An option as it is typed."""
    option = BY_KEY[key]
    return [f"--{option.name}"] if option.metavar is None else [f"--{option.name}", given.text]

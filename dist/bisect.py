"""One training step on 1 and on N ranks: the first tensor that differs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.dist.arguments import require_flag, require_int, require_path, require_real, short
from phalanx.dist.divergence import Comparison, Divergence, Run
from phalanx.dist.step_recorder import FOLDER_VARIABLE, NO_DROPOUT_VARIABLE, STEPS_VARIABLE

#: Starts the script on so many ranks with these variables besides its own environment, waits, and returns the exit code.
Starter = Callable[[int, Mapping[str, str]], int]


class NothingRecorded(RuntimeError):
    """The script failed, or took no training step."""


@dataclass(frozen=True)
class Bisection:
    """What came of comparing a script's first steps.

    Args:
        world_sizes: The numbers of ranks, the first being what the others are compared with.
        steps: Optimizer steps that were compared.
        compared: Tensors that were compared.
        skipped: What could not be, in words.
        divergence: The first tensor that differs; None when none does.
    """

    world_sizes: tuple[int, ...]
    steps: int
    compared: int
    skipped: tuple[str, ...]
    divergence: Divergence | None

    def __str__(self) -> str:
        several = f"{self.steps} step{'s' * (self.steps > 1)}"
        first, *others = self.world_sizes
        on = f"{', '.join(map(str, others))} rank{'s' * (others != [1])} and on {first}"
        found = self.divergence
        if found is None:
            more = f" Not compared: {', '.join(self.skipped)}." if self.skipped else ""
            return f"The same on {on}: {self.compared} tensors of {several}.{more}"
        amount = f"{found.max_difference:.3g}, {found.relative:.1e} of its largest element"
        if found.max_difference == float("inf"):
            amount = "altogether"
        return (
            f"Step {found.step} differs on {found.world_size} rank{'s' * (found.world_size > 1)} from {first}, first in the "
            f"{found.kind} {found.name!r} on rank {found.rank} (by {amount}).\n"
            f"Likely reason: {found.reason}.\nFix: {found.fix}"
        )


def bisect_divergence(
    start_ranks: Starter,
    world_sizes: Sequence[int] = (1, 2),
    *,
    steps: int = 1,
    tolerance: float | None = None,
    dropout: bool = True,
    folder: Path | str | None = None,
) -> Bisection:
    """Run a script's first step on 1 and on N ranks, and name the first tensor that differs.

    Weights, samples, the outputs of modules in the order of forward, gradients, weights and buffers after the step are
    compared, sample by sample whatever rank had it. The script is any that trains modules with an optimizer of
    ``torch.optim``, unchanged: hooks write down what it computes, and end it after ``steps`` steps. They are installed
    by `init_world` and by ``phalanx run``, where the variables given to ``start_ranks`` are set::

        def start_ranks(world_size, variables):
            command = ["torchrun", "--nproc-per-node", str(world_size), "train.py"]
            return subprocess.run(command, env={**os.environ, **variables}).returncode

        print(bisect_divergence(start_ranks, [1, 2]))
        # Step 0 differs on 2 ranks from 1, first in the output 'bn1' on rank 0 (by 0.58, 2.1e-01 of its largest element).
        # Likely reason: batch norm normalises by the statistics of each rank's own samples (25, 25), ...

    What differs is run a second time on as many ranks as the first, to tell "depends on the number of ranks" from "is
    drawn anew in every run". On the command line: ``phalanx bisect train.py --world-sizes 1,2``.

    Args:
        start_ranks: Called with a number of ranks and variables; returns when they have ended, with the exit code.
        world_sizes: Two or more different numbers of ranks, 1 or more each; the first is compared with each other one.
        steps: How many optimizer steps, 1 or more.
        tolerance: Largest relative difference that counts as the same, 0 or more; None takes 1e-4 for fp32, 1e-9 for fp64.
        dropout: False switches it off, to see what else differs.
        folder: Where the records stay; None for a temporary one.

    Raises:
        ValueError: An argument is out of its range.
        NothingRecorded: The script failed, or took no step.
    """
    sizes = _check(start_ranks, world_sizes, steps, tolerance)
    dropout = require_flag("dropout", dropout)
    with tempfile.TemporaryDirectory(prefix="phalanx-bisect-") as temporary:
        base = Path(temporary if folder is None else require_path("folder", folder)).absolute()
        variables = {STEPS_VARIABLE: str(steps), NO_DROPOUT_VARIABLE: "" if dropout else "1"}

        def record(world_size: int, name: str) -> Path:
            target = base / name
            for old in target.glob("rank-*.pt"):
                old.unlink()
            # Compiled code calls no hooks, and other threads add in another order.
            more = {FOLDER_VARIABLE: str(target), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
            code = start_ranks(world_size, {**variables, **more})
            if code != 0 or not any(target.glob("rank-*-step-0.pt")):
                raise NothingRecorded(_nothing(world_size, code))
            return target

        first = record(sizes[0], f"world-{sizes[0]}")
        compared, skipped, done = 0, [], 0
        for size in sizes[1:]:
            other = record(size, f"world-{size}")
            found, count, left_out, done = _compare(first, other, sizes[0], size, tolerance)
            compared += count
            skipped += left_out
            if found is not None:
                again = record(sizes[0], f"world-{sizes[0]}-again")
                return Bisection(
                    sizes, done, compared, tuple(skipped), _explain(found, first, again, sizes[0], tolerance)
                )
        return Bisection(sizes, done, compared, tuple(dict.fromkeys(skipped)), None)


def _check(
    start_ranks: Starter, world_sizes: Sequence[int], steps: int, tolerance: float | None
) -> tuple[int, ...]:
    if not callable(start_ranks):
        raise ValueError(
            f"start_ranks={start_ranks!r}: a function of (world_size, variables) that returns an exit code was expected.\n"
            "Fix: see bisect_divergence's example, or use `phalanx bisect train.py`"
        )
    given: object = world_sizes
    single = isinstance(given, str) or getattr(given, "ndim", 1) == 0
    sizes = tuple(given) if isinstance(given, Iterable) and not single else ()
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    if len(sizes) < 2 or not whole or len(set(sizes)) < len(sizes):
        raise ValueError(
            f"world_sizes={world_sizes!r}: two or more different numbers of ranks, 1 or more each.\nFix: (1, 2)"
        )
    try:
        require_int("steps", steps, at_least=1)
    except ValueError:
        raise ValueError(f"steps={short(steps)}: a number of steps is 1 or more.\nFix: steps=1") from None
    if tolerance is not None:
        try:
            require_real("tolerance", tolerance, at_least=0)
        except ValueError:
            raise ValueError(
                f"tolerance={short(tolerance)}: a relative difference is 0 or more.\nFix: 1e-4, or None for one by dtype"
            ) from None
    return sizes


def _nothing(world_size: int, code: int) -> str:
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    if code != 0:
        return f"The script failed on {ranks} (exit code {code}), so there is no step to compare.\nFix: see its output; it has to run on {ranks} first"
    return (
        f"The script ended on {ranks} without a training step: no forward of a module in training mode was seen.\n"
        "Fix: let it take one step of a torch.optim optimizer; it is watched by init_world() or under `phalanx run`"
    )


def _load(folder: Path, world_size: int, step: int) -> Run | None:
    paths = [folder / f"rank-{rank}-step-{step}.pt" for rank in range(world_size)]
    if not all(path.is_file() for path in paths):
        return None
    return Run([torch.load(path, weights_only=True) for path in paths])


def _compare(
    first: Path, other: Path, base_size: int, size: int, tolerance: float | None
) -> tuple[Divergence | None, int, list[str], int]:
    compared, step = 0, 0
    skipped: list[str] = []
    while True:
        base, now = _load(first, base_size, step), _load(other, size, step)
        if base is None or now is None:
            if step == 0:
                missing = size if now is None else base_size
                raise NothingRecorded(
                    f"Not every one of the {missing} ranks took a training step.\nFix: see that the ranks form one group of {missing}, and that each trains"
                )
            return None, compared, skipped, step
        comparison = Comparison(base, now, step, tolerance)
        found = comparison.first_difference()
        compared += comparison.compared
        skipped += comparison.skipped
        step += 1
        if found is not None:
            return found, compared, skipped, step


def _explain(
    found: Divergence, first: Path, again: Path, base_size: int, tolerance: float | None
) -> Divergence:
    """Whether the first run does not even repeat itself there: then it is not the number of ranks."""
    repeated = _compare(first, again, base_size, base_size, tolerance)[0]
    if repeated is None or (repeated.step, repeated.kind, repeated.name) != (
        found.step,
        found.kind,
        found.name,
    ):
        return found
    seeded = "seed_everything(0) at the start, before anything is drawn"
    if found.kind == "input":
        seeded += ", and a generator or ShardLoader for the order"
    return replace(
        found,
        reason=f"it differs between two runs on {base_size} rank{'s' * (base_size > 1)} as well: random numbers that nobody seeds",
        fix=seeded,
    )

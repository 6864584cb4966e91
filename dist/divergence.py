"""Where two runs of the same step part: the first tensor that differs, and why it may."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Record = dict[str, Any]  # of one rank and step, see StepRecorder

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_SMALL = 0.01  # gradients are compared on no finer scale than this part of the largest in the model


@dataclass(frozen=True)
class Divergence:
    """The first tensor that differs.

    Args:
        kind: ``initial weight``, ``input``, ``output``, ``gradient``, ``weight`` or ``buffer``.
        name: Of the module, parameter or buffer.
        step: 0 is the first.
        world_size: Of the run that differs from the first one.
        rank: In that run.
        max_difference: The largest absolute difference of its elements; inf where shapes or samples differ.
        relative: That, to the largest element.
        reason: What is likely behind it.
        fix: What to do about it.
    """

    kind: str
    name: str
    step: int
    world_size: int
    rank: int
    max_difference: float
    relative: float
    reason: str
    fix: str


class Run:
    """One step's records of all ranks of a run, with the samples as one batch."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.world_size = len(records)
        self.rows = [sum(record["rows"]) for record in records]
        self.first_rows = [sum(self.rows[:rank]) for rank in range(len(records))]

    def sample_hashes(self, rank: int) -> list[bytes] | None:
        """What tells this rank's samples apart; None where the model's inputs have no batch dimension."""
        hashes: list[bytes] = []
        record = self.records[rank]
        for rows, inputs in zip(record["rows"], record["inputs"], strict=True):
            parts = [tensor for tensor in inputs if tensor.dim() and tensor.shape[0] == rows]
            if not rows or not parts:
                return None
            for row in range(rows):
                digest = hashlib.blake2b(digest_size=12)
                for tensor in parts:
                    digest.update(tensor[row].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
                hashes.append(digest.digest())
        return hashes

    def batched(self, name: str, rank: int) -> Tensor | None:
        """An output of this rank's forwards in the step, one row a sample; None where it has no batch dimension."""
        record = self.records[rank]
        parts = []
        for forward, tensor in record["outputs"].get(name, []):
            rows = record["rows"][forward] if forward < len(record["rows"]) else 0
            part = _by_row(tensor, rows)
            if part is None:
                return None
            parts.append(part)
        if not parts or sum(len(part) for part in parts) != self.rows[rank]:
            return None
        if len({part.shape[1:] for part in parts}) > 1:
            return None
        return torch.cat(parts)

    def scalars(self, name: str) -> list[tuple[int, Tensor]] | None:
        """Rows and value of each 0-dimensional output, over all ranks."""
        found = []
        for record in self.records:
            for forward, tensor in record["outputs"].get(name, []):
                if tensor.dim():
                    return None
                found.append(
                    (record["rows"][forward] if forward < len(record["rows"]) else 0, tensor.double())
                )
        return found


def _by_row(tensor: Tensor, rows: int) -> Tensor | None:
    if not rows or not tensor.dim():
        return None
    if tensor.shape[0] == rows:
        return tensor
    if tensor.dim() > 1 and tensor.shape[1] == rows:
        return tensor.transpose(0, 1)
    if tensor.shape[0] % rows == 0:  # samples and time in one dimension
        return tensor.reshape(rows, tensor.shape[0] // rows, *tensor.shape[1:])
    return None


class Comparison:
    """The same step in two runs.

    Args:
        base: The run that is taken for right, usually of one rank.
        other: The one that is compared.
        step: Its number.
        tolerance: Relative; None takes one by dtype.
    """

    def __init__(self, base: Run, other: Run, step: int, tolerance: float | None = None) -> None:
        self.base, self.other, self.step = base, other, step
        self._tolerance = tolerance
        self._kinds: dict[str, str] = base.records[0]["kinds"]
        self.compared = 0
        self.skipped: list[str] = []
        outputs = base.records[0]["outputs"].values()
        dtypes = {tensor.dtype for parts in outputs for _, tensor in parts if tensor.is_floating_point()}
        # Half precision anywhere shows in everything after it.
        self._coarsest = max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
        self._same_order = self._places()

    def first_difference(self) -> Divergence | None:
        """In the order of a step: weights, samples, outputs, gradients, weights after."""
        for found in self._differences():
            return found
        return None

    def _differences(self) -> Iterator[Divergence]:
        yield from self._initial_weights()
        yield from self._inputs()
        yield from self._outputs()
        yield from self._gradients()
        yield from self._weights_after()

    # ---- how to compare

    def _tolerance_of(self, tensor: Tensor) -> float:
        if self._tolerance is not None:
            return self._tolerance
        return max(TOLERANCES.get(tensor.dtype, 0.0), self._coarsest) if tensor.is_floating_point() else 0.0

    def _differ(self, want: Tensor, have: Tensor, scale: float | None = None) -> tuple[float, float] | None:
        """Largest difference, absolute and relative; None within the tolerance."""
        self.compared += 1
        if want.shape != have.shape:
            return float("inf"), float("inf")
        if want.numel() == 0 or torch.equal(want, have):
            return None
        one, other = _numbers(want), _numbers(have)
        difference = (one - other).abs()
        same = (one == other) | (one.isnan() & other.isnan())
        largest = float(difference.masked_fill(same, 0).nan_to_num(float("inf"), float("inf")).max())
        finite = one[one.isfinite()].abs()
        own = float(finite.max()) if finite.numel() else 0.0
        relative = largest / max(own, scale or 0.0, 1e-30)
        return (largest, relative) if relative > self._tolerance_of(want) else None

    def _found(
        self, kind: str, name: str, rank: int, size: tuple[float, float], reason: str, fix: str
    ) -> Divergence:
        return Divergence(kind, name, self.step, self.other.world_size, rank, size[0], size[1], reason, fix)

    # ---- weights before the step

    def _initial_weights(self) -> Iterator[Divergence]:
        base = self.base.records[0]["weights"]
        for name, want in base.items():
            for rank, record in enumerate(self.other.records):
                have = record["weights"].get(name)
                size = (float("inf"), float("inf")) if have is None else self._differ(want, have)
                if size is None:
                    continue
                if self.step > 0:
                    yield self._found(
                        "weight", name, rank, size, "changed outside of the steps recorded", "look there"
                    )
                    continue
                own = self.other.records[0]["weights"].get(name)
                if rank and have is not None and own is not None and not torch.equal(own, have):
                    yield self._found(
                        "initial weight", name, rank, size,
                        "this rank started from other weights than rank 0: no DDP or parallelize has sent rank 0's",
                        "parallelize(model, ...), or seed_everything(seed) with the same seed on every rank",
                    )  # fmt: skip
                else:
                    yield self._found(
                        "initial weight", name, rank, size,
                        "the runs start from different weights: they are drawn without a seed, or with one that depends on the rank",
                        "seed_everything(0) before the model is built",
                    )  # fmt: skip

    # ---- samples

    def _places(self) -> list[list[int] | None]:
        """For each rank of the other run, where each of its samples is in the first run's batch; None where unknown."""
        hashes = [self.base.sample_hashes(rank) for rank in range(self.base.world_size)]
        if any(each is None for each in hashes):
            return [None] * self.other.world_size
        free: dict[bytes, list[int]] = {}
        everything = [digest for each in hashes for digest in each or []]
        for place, digest in reversed(list(enumerate(everything))):
            free.setdefault(digest, []).append(place)
        places: list[list[int] | None] = []
        for rank in range(self.other.world_size):
            mine = self.other.sample_hashes(rank)
            places.append(
                None if mine is None else [free[digest].pop() if free.get(digest) else -1 for digest in mine]
            )
        return places

    def _inputs(self) -> Iterator[Divergence]:
        places = self._same_order
        if any(each is None for each in places):
            self.skipped.append("inputs (they have no batch dimension)")
            return
        self.compared += 1
        total, together = sum(self.base.rows), sum(self.other.rows)
        for rank, each in enumerate(places):
            strange = [place for place in each or [] if place < 0]
            if not strange:
                continue
            count = f"{len(strange)} of its {self.other.rows[rank]} samples are not in the first run's step of {total}"
            if together != total and len(strange) < sum(self.other.rows):
                reason = f"{count}, and the ranks have {together} together: the global batch size depends on the number of ranks"
                fix = f"ShardLoader(global_batch_size={total}), or divide the DataLoader's batch_size by the world size"
            elif together != total:
                reason = f"{count}, and the ranks have {together} together: another batch size, and other samples or augmentation"
                fix = "ShardLoader(global_batch_size=...), whose samples and keys depend on seed, epoch and step alone"
            else:
                reason = (
                    f"{count}: another order, or augmentation whose random numbers depend on rank or worker"
                )
                fix = "ShardLoader, whose samples and keys depend on seed, epoch and step alone; or seed what draws them"
            yield self._found("input", "samples", rank, (float("inf"), float("inf")), reason, fix)
        if together != total:
            reason = f"the ranks have {together} samples together, the first run {total}: some are left out or repeated"
            yield self._found(
                "input", "samples", 0, (float("inf"), float("inf")), reason,
                'ShardLoader(tail="uneven"), which leaves out and repeats none',
            )  # fmt: skip

    # ---- forward

    def _outputs(self) -> Iterator[Divergence]:
        for name in self.base.records[0]["outputs"]:
            yield from self._output(name)

    def _output(self, name: str) -> Iterator[Divergence]:
        whole = [self.base.batched(name, rank) for rank in range(self.base.world_size)]
        if any(each is None for each in whole):
            yield from self._scalar(name)
            return
        want = torch.cat([each for each in whole if each is not None])
        for rank in range(self.other.world_size):
            have, places = self.other.batched(name, rank), self._same_order[rank]
            if have is None and self.other.rows[rank] == 0:
                continue
            if have is None or places is None or min(places, default=0) < 0:
                self.skipped.append(f"{name} on rank {rank}")
                continue
            size = self._differ(want[places], have, float(want.double().abs().max()) if want.numel() else 0.0)
            if size is not None:
                yield self._found("output", name, rank, size, *self._why_output(name))

    def _scalar(self, name: str) -> Iterator[Divergence]:
        base, other = self.base.scalars(name), self.other.scalars(name)
        if not base or not other:
            self.skipped.append(name)
            return
        want = [_mean(base), sum((value for _, value in base), torch.zeros((), dtype=torch.float64))]
        have = [_mean(other), sum((value for _, value in other), torch.zeros((), dtype=torch.float64))]
        # A mean over the samples, or a sum over them: either is the same for any number of ranks.
        sizes = [self._differ(one.float(), two.float()) for one, two in zip(want, have, strict=True)]
        if sizes[0] is not None and sizes[1] is not None:
            yield self._found("output", name, 0, sizes[0], *_MEANS)

    def _why_output(self, name: str) -> tuple[str, str]:
        module = name.partition(" call ")[0].partition("[")[0]
        kind = self._kinds.get(module)
        if kind == "batch norm":
            rows = ", ".join(map(str, self.other.rows))
            return (
                f"batch norm normalises by the statistics of each rank's own samples ({rows}), the first run by those of "
                f"{sum(self.base.rows)}",
                "parallelize(virtual_ranks=V), SyncBatchNorm on GPUs, or accept it: bit-equal runs need it, training rarely does",
            )
        if kind == "dropout":
            return (
                "dropout draws its random numbers on each rank by itself, for that rank's samples",
                "parallelize(virtual_ranks=V), which keeps them; or compare the rest with --no-dropout",
            )
        if " input " in name:
            return (
                "the targets of these samples differ",
                "let inputs and targets come from the same indices",
            )
        return (
            "its inputs agree: it depends on the rest of the batch, draws random numbers, or depends on the rank",
            "look at its forward: statistics over the batch, torch.rand, F.dropout, a mask by rank",
        )

    # ---- backward and update

    def _gradients(self) -> Iterator[Divergence]:
        base = self.base.records[0]["gradients"]
        largest = max((float(grad.abs().max()) for grad in base.values() if grad.numel()), default=0.0)
        for name, want in reversed(list(base.items())):
            for rank, record in enumerate(self.other.records):
                have = record["gradients"].get(name)
                if have is None:
                    missing = (float("inf"), float("inf"))
                    yield self._found(
                        "gradient", name, rank, missing, "this rank has no gradient for it", "see its forward"
                    )
                    continue
                size = self._differ(want, have, _SMALL * largest)
                if size is not None:
                    yield self._found(
                        "gradient", name, rank, size, *self._why_gradient(name, rank, want, have)
                    )

    def _why_gradient(self, name: str, rank: int, want: Tensor, have: Tensor) -> tuple[str, str]:
        own = [record["gradients"].get(name) for record in self.other.records]
        world_size = self.other.world_size
        if any(grad is None or self._differ(have, grad) for grad in own):
            return (
                "ranks hold different gradients: they were not reduced",
                "call the model that DDP or parallelize returned (not model.module), and the last backward outside of no_sync()",
            )
        factor = _factor(want, have)
        if factor is not None and abs(factor - 1) > 1e-3:
            close = {
                1 / world_size: "a sum over samples, and DDP averages over ranks",
                world_size: "added up over ranks rather than averaged",
            }
            for known, words in close.items():
                if abs(factor / known - 1) < 0.02:
                    return (
                        f"it is {factor:.4g} times the first run's: the loss is {words}",
                        "let the loss be the mean over this rank's samples, or engine.backward(loss_sum, loader.global_count)",
                    )
        if len(set(self.other.rows)) > 1:
            rows = ", ".join(map(str, self.other.rows))
            return (
                f"a mean of means: ranks had {rows} samples, and each rank's mean counts alike",
                "parallelize(model, optimizer, loader=loader), which weights by samples; or engine.backward(loss_sum, count)",
            )
        return _MEANS

    def _weights_after(self) -> Iterator[Divergence]:
        base, gradients = self.base.records[0]["weights_after"], self.base.records[0]["gradients"]
        before = self.base.records[0]["weights"]
        largest = max((float(grad.abs().max()) for grad in gradients.values() if grad.numel()), default=0.0)
        for name, want in base.items():
            for rank, record in enumerate(self.other.records):
                have = record["weights_after"].get(name)
                if have is None or have.shape != want.shape:
                    yield self._found(
                        "weight", name, rank, (float("inf"),) * 2, "it has another shape", "see the script"
                    )
                    continue
                grad = gradients.get(name)
                if grad is not None and grad.shape == want.shape:
                    # Adam divides by a gradient's size, so that where it is all rounding the step is too.
                    sure = grad.abs() > 10 * self._tolerance_of(grad) * max(
                        float(grad.abs().max()), _SMALL * largest
                    )
                    want_there, have_there = want[sure], have[sure]
                else:
                    want_there, have_there = want, have
                size = self._differ(want_there, have_there)
                if size is not None:
                    kind = "weight" if grad is not None else "buffer"
                    yield self._found(
                        kind, name, rank, size, *self._why_after(kind, name, before, want, have)
                    )

    def _why_after(
        self, kind: str, name: str, before: dict[str, Tensor], want: Tensor, have: Tensor
    ) -> tuple[str, str]:
        if kind == "buffer":
            if self._kinds.get(name.rpartition(".")[0]) == "batch norm":
                return (
                    "running statistics are of one rank's samples",
                    "parallelize(virtual_ranks=V), or SyncBatchNorm on GPUs",
                )
            return ("a buffer that each rank changes by itself", "see the forward that changes it")
        if name in before:
            factor = _factor(want.double() - before[name].double(), have.double() - before[name].double())
            if factor is not None and abs(factor - 1) > 1e-3:
                return (
                    f"the gradients agree, and the update is {factor:.4g} times the first run's: a learning rate or clipping "
                    "that depends on the number of ranks",
                    "let them depend on the global batch size alone",
                )
        return (
            "the gradients agree, the update does not: optimizer settings, clipping or a scheduler that depend on the ranks",
            "the same optimizer on every number of ranks",
        )


_MEANS = (
    "a mean of means: the loss is a mean over something that ranks have different numbers of (tokens, masked elements, class "
    "weights), and each rank's mean counts alike",
    "engine.backward(loss_sum, count), with the count added up over all ranks by all_reduce_sum",
)


def _numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def _mean(values: Sequence[tuple[int, Tensor]]) -> Tensor:
    total = sum(rows for rows, _ in values)
    summed = sum((rows * value for rows, value in values), torch.zeros((), dtype=torch.float64))
    return summed / total if total else torch.stack([value for _, value in values]).mean()


def _factor(want: Tensor, have: Tensor) -> float | None:
    """c where ``have`` is c times ``want``; None where it is no multiple."""
    if want.shape != have.shape:
        return None
    one, other = _numbers(want).reshape(-1), _numbers(have).reshape(-1)
    square = float(one @ one)
    if square == 0 or not bool(other.isfinite().all()):
        return None
    factor = float(one @ other) / square
    residual = float((other - factor * one).norm())
    return factor if residual <= 1e-3 * float(other.norm()) else None

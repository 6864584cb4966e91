"""What `phalanx fit` prints for people."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.tools.fit.estimates import Estimate
from phalanx.tools.fit.fitting import Fit
from phalanx.tools.fit.gpu_memory import GB, GIB, MIB, SLACK

_COLUMNS = ("weights", "gradients", "optimizer", "activations", "buckets", "peak", "total")


def fit_text(found: Fit) -> Iterator[str]:
    """Lines for a terminal."""
    question, traced = found.question, found.traced
    shared = sum(1 for _ in traced.shared)
    ties = f" ({shared} name{'s' * (shared != 1)} of shared tensors counted once)" if shared else ""
    yield (
        f"{question.target}: {traced.parameters:,} parameters{ties}, micro batch {found.micro_batch_size}, "
        f"{question.optimizer}, {question.precision}{', activation checkpointing' if question.activation_checkpointing else ''}"
    )
    yield f"{_gpu(found)}. Per rank, in GiB (2^30 bytes):"
    yield ""
    yield f"{'':14}" + "".join(f"{name:>12}" for name in _COLUMNS) + f"{'largest':>12}"
    for estimate in found.estimates:
        yield _row(estimate, found)
    yield ""
    yield from _explained(found)
    yield f"Take: {found.advice.text}"
    if found.advice.tight:
        yield "That is tight: less than a tenth of the GPU is left."


def _gpu(found: Fit) -> str:
    gpu = found.gpu
    if gpu.memory_bytes is None:
        return f"For {gpu.name}" + (" of any size" if gpu.context_bytes else "")
    note = f"; {gpu.note}" if gpu.note else ""
    certain = "" if gpu.certain else ", to the best of our knowledge"
    return f"For {gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB ({gpu.memory_bytes / GB:.1f} GB{certain}{note})"


def _row(estimate: Estimate, found: Fit) -> str:
    label = estimate.name if estimate.name == "single" else f"{estimate.name} x {estimate.world_size}"
    numbers = (
        estimate.parameters_bytes,
        estimate.gradients_bytes,
        estimate.optimizer_bytes,
        estimate.activations_bytes,
        estimate.buckets_bytes,
        estimate.peak_bytes,
        estimate.total_bytes,
    )
    largest = "" if estimate.largest_micro_batch is None else str(estimate.largest_micro_batch)
    mark = "  does not fit" if estimate.fits(found.gpu) is False else ""
    return f"{label:14}" + "".join(f"{number / GIB:12.2f}" for number in numbers) + f"{largest:>12}{mark}"


def _explained(found: Fit) -> Iterator[str]:
    first = found.estimates[0]
    several = max(found.estimates, key=lambda estimate: estimate.world_size)
    if found.gpu.context_bytes:
        nccl = several.context_bytes - first.context_bytes
        ranks = f", and {nccl // MIB} MiB for NCCL with several ranks" if nccl else ""
        yield (
            f"total = peak + context ({first.context_bytes // MIB} MiB{ranks}) + {SLACK:.0%} for the allocator: assumptions; the rest "
            "was traced."
        )
    yield "peak = the most that tensors take at one moment: gradients are not all there when activations are."
    yield from _formulas(found)
    notes = {note: None for estimate in found.estimates for note in estimate.notes}
    for note in list(notes)[:6]:
        names = [e.name for e in found.estimates if note in e.notes]
        yield f"{', '.join(dict.fromkeys(names))}: {note}."


def _formulas(found: Fit) -> Iterator[str]:
    """The largest run's sharded states in decimal units, as the formulas of the papers give them."""
    zero = [estimate for estimate in found.estimates if estimate.name == "zero2"]
    if not zero:
        return
    estimate = zero[-1]
    parts = (estimate.parameters_bytes, estimate.gradients_bytes, estimate.optimizer_bytes)
    width = 2 if found.question.precision != "fp32" else 4
    count = max(found.traced.trainable, 1)
    each = round(estimate.optimizer_bytes * estimate.world_size / count)
    master = "master + " if width == 2 else ""
    sums = width + 4 * (found.question.fp32_gradients and width == 2)
    yield (
        f"zero2 x {estimate.world_size}, P parameters, N ranks: weights {width}P = {parts[0] / GB:.2f} GB, gradients {sums}P/N = "
        f"{parts[1] / GB:.2f} GB, {master}{found.question.optimizer} {each}P/N = {parts[2] / GB:.2f} GB: {sum(parts) / GB:.2f} GB "
        f"({sum(parts) / GIB:.2f} GiB), without activations and buckets."
    )

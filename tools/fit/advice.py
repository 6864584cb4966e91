"""Which strategy to take, with the numbers that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.tools.fit.estimates import Estimate
from phalanx.tools.fit.gpu_memory import COMMON_GB, GB, GIB, GpuMemory

# From the least communication to the most.
_ORDER = ("single", "ddp", "zero1", "zero2", "fsdp", "zero3")
_COMFORT = 0.9  # of the GPU: beyond that, a longer sequence or a fragmented allocator ends the run


@dataclass(frozen=True)
class Advice:
    """A strategy, and why.

    Attributes:
        strategy: Its name; None when nothing fits.
        world_size: Ranks.
        text: In words, with numbers.
        tight: It fits, with less than a tenth of the GPU to spare.
    """

    strategy: str | None
    world_size: int
    text: str
    tight: bool = False


def advise(
    estimates: Sequence[Estimate], gpu: GpuMemory, micro_batch_size: int, checkpointing: bool
) -> Advice:
    """The strategy that communicates least among those that fit, on as many ranks as were asked for."""
    ranks = max(found.world_size for found in estimates)
    some = sorted(
        (found for found in estimates if found.world_size == ranks), key=lambda e: _ORDER.index(e.name)
    )
    if gpu.memory_bytes is None:
        return _by_size(some, ranks)
    fitting = [found for found in some if found.total_bytes <= gpu.memory_bytes]
    roomy = [found for found in fitting if found.total_bytes <= _COMFORT * gpu.memory_bytes]
    if not fitting:
        return _nothing_fits(estimates, some, gpu, checkpointing)
    best = (roomy or fitting)[0]
    words = [
        f"{best.name} on {ranks} rank{'s' * (ranks != 1)}: {_gib(best.total_bytes)} of {_gib(gpu.memory_bytes)} per GPU at a micro "
        f"batch of {micro_batch_size}"
    ]
    if best.largest_micro_batch is not None:
        words.append(f"up to {best.largest_micro_batch} samples fit")
    passed = [found for found in some if _ORDER.index(found.name) < _ORDER.index(best.name)]
    words += [f"{found.name} would take {_gib(found.total_bytes)}" for found in passed]
    return Advice(best.name, ranks, "; ".join(words) + ".", tight=best not in roomy)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


def _by_size(some: Sequence[Estimate], ranks: int) -> Advice:
    """Without a GPU: the smallest common one that each would fit."""
    parts = []
    for found in some:
        size = next((size for size in COMMON_GB if found.total_bytes <= _COMFORT * size * GB), None)
        parts.append(f"{found.name} {f'{size} GB' if size else 'more than any'}")
    text = f"GPU memory needed on {ranks} rank{'s' * (ranks != 1)}, with a tenth to spare: {', '.join(parts)}. --gpu NAME tells what fits."
    return Advice(some[0].name, ranks, text)


def _nothing_fits(
    estimates: Sequence[Estimate], some: Sequence[Estimate], gpu: GpuMemory, checkpointing: bool
) -> Advice:
    least = min(some, key=lambda found: found.total_bytes)
    assert gpu.memory_bytes is not None
    words = [
        f"Nothing fits: {least.name} on {least.world_size} takes least, {_gib(least.total_bytes)} of {_gib(gpu.memory_bytes)}"
    ]
    smaller = max(estimates, key=lambda found: found.largest_micro_batch or 0)
    if smaller.largest_micro_batch:
        words.append(
            f"a micro batch of {smaller.largest_micro_batch} fits with {smaller.name} on {smaller.world_size}"
        )
    if not checkpointing and least.activations_bytes > least.total_bytes // 3:
        words.append("--activation-checkpointing shows what recomputing activations would save")
    elif not smaller.largest_micro_batch:
        words.append("more ranks share weights and optimizer with fsdp and zero3: --world-size")
    return Advice(None, least.world_size, "; ".join(words) + ".")

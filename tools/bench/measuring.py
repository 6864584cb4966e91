"""Timing collectives on this rank, and putting the ranks' figures together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.dist.collectives import gather_objects
from phalanx.dist.membership import World
from phalanx.tools.bench.bandwidth import bandwidth
from phalanx.tools.bench.operations import Operation, operation
from phalanx.tools.bench.settings import BenchSettings

LATENCY_OPERATIONS = ("all-reduce", "all-gather", "broadcast", "send-recv")
LATENCY_SIZES = (8, 64, 512)  # bytes of each rank
LATENCY_ITERATIONS = 10  # times the iterations of a size: one operation alone is short


def wait_for_device(world: World) -> None:
    """On a GPU a call only queues its work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def meet(world: World) -> None:
    """All ranks leave here together, more or less."""
    if world.world_size > 1:
        dist.barrier()
    wait_for_device(world)


def seconds_each(run: Callable[[], object], iterations: int, world: World) -> float:
    """Seconds of one call, timed over ``iterations`` back to back, as a training loop has them."""
    meet(world)
    begun = time.perf_counter()
    for _ in range(iterations):
        run()
    wait_for_device(world)
    return (time.perf_counter() - begun) / iterations


def measure_sizes(settings: BenchSettings, world: World) -> Iterator[dict[str, Any]]:
    """One result a size; the same on every rank. Collective."""
    dtype = getattr(torch, settings.dtype)
    for size in settings.sizes(world.world_size):
        yield _measure(settings, size, operation(settings.kind, size, dtype, world), world)


def _measure(settings: BenchSettings, size: int, what: Operation, world: World) -> dict[str, Any]:
    what.prepare()
    for _ in range(settings.warmup):
        what.run()
    seconds = seconds_each(what.run, settings.iterations, world)
    what.prepare()
    meet(world)
    what.run()
    wait_for_device(world)
    ranks = gather_objects((seconds, what.is_right()))
    times = [each for each, _ in ranks]
    mean = sum(times) / len(times)
    speed = bandwidth(settings.kind, size, mean, world.world_size)
    wrong = [rank for rank, (_, right) in enumerate(ranks) if not right]
    return {
        "size_bytes": size,
        "time_us": mean * 1e6,
        "algbw_gb_s": speed.algorithm,
        "busbw_gb_s": speed.bus,
        "correct": not wrong,
        "wrong_ranks": wrong,
        "slowest_rank": max(range(len(times)), key=times.__getitem__),
        "slowest_us": max(times) * 1e6,
    }


def measure_latency(settings: BenchSettings, world: World) -> Iterator[dict[str, Any]]:
    """Small messages, each timed alone: the time until the slowest rank has its result. Collective."""
    dtype = getattr(torch, settings.dtype)
    element = torch.empty(0, dtype=dtype).element_size()
    for kind in LATENCY_OPERATIONS:
        for small in LATENCY_SIZES:
            size = max(small, element)
            whole = size * (world.world_size if kind == "all-gather" else 1)
            yield _latency(kind, size, operation(kind, whole, dtype, world), settings, world)


def _latency(kind: str, size: int, what: Operation, settings: BenchSettings, world: World) -> dict[str, Any]:
    what.prepare()
    for _ in range(settings.warmup):
        what.run()
    times = []
    for _ in range(settings.iterations * LATENCY_ITERATIONS):
        meet(world)
        begun = time.perf_counter()
        what.run()
        wait_for_device(world)
        times.append(time.perf_counter() - begun)
    what.prepare()
    meet(world)
    what.run()
    wait_for_device(world)
    ranks = gather_objects((times, what.is_right()))
    slowest = sorted(max(each) * 1e6 for each in zip(*(own for own, _ in ranks), strict=True))
    return {
        "operation": kind,
        "size_bytes": size,
        "min_us": slowest[0],
        "median_us": quantile(slowest, 0.5),
        "p99_us": quantile(slowest, 0.99),
        "max_us": slowest[-1],
        "correct": all(right for _, right in ranks),
        "wrong_ranks": [rank for rank, (_, right) in enumerate(ranks) if not right],
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the ordered values lie.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5), quantile([7.0], 0.99)
    (3.0, 7.0)
    """
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

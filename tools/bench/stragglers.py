"""Which rank works slowest by itself, and which two talk slowest with each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.dist.collectives import gather_objects
from phalanx.dist.membership import World
from phalanx.tools.bench.bandwidth import GB
from phalanx.tools.bench.measuring import meet, seconds_each, wait_for_device

WORK_BYTES = 8 << 20
WORK_ROUNDS = 4
TRIES = 5
PAIR_BYTES = 1 << 18
PAIR_ROUNDS = 10
MOST_RANKS_FOR_ALL_PAIRS = 16  # 120 pairs; beyond, neighbours alone
STANDS_OUT = 1.2  # times the median


def slowest_rank(world: World) -> dict[str, Any]:
    """The rank that takes longest for work of its own (copying its device's memory). Collective."""
    source = torch.ones(WORK_BYTES, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    target.copy_(source)
    # The best of several: what a busy machine adds now and then says nothing about the rank.
    tries = [seconds_each(lambda: target.copy_(source), WORK_ROUNDS, world) for _ in range(TRIES)]
    return judge_ranks(gather_objects(min(tries)))


def judge_ranks(seconds: Sequence[float]) -> dict[str, Any]:
    """The slowest rank and how far it is from the median.

    >>> judge_ranks([1.0, 1.1, 3.0])["rank"], judge_ranks([1.0, 1.1, 3.0])["stands_out"]
    (2, True)
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    ratio = seconds[slowest] / statistics.median(seconds)
    return {
        "rank": slowest,
        "work_us": seconds[slowest] * 1e6,
        "times_median": ratio,
        "stands_out": ratio > STANDS_OUT,
    }


def pairs_of(world_size: int) -> list[tuple[int, int]]:
    """The pairs that are tried, in one order for all ranks."""
    if world_size <= MOST_RANKS_FOR_ALL_PAIRS:
        return [(i, j) for i in range(world_size) for j in range(i + 1, world_size)]
    return [(rank, rank + 1) for rank in range(world_size - 1)] + [(0, world_size - 1)]


def slowest_pair(world: World) -> dict[str, Any] | None:
    """The pair with the lowest bandwidth, one pair after another; None with one rank. Collective."""
    if world.world_size == 1:
        return None
    buffer = torch.zeros(PAIR_BYTES, dtype=torch.uint8, device=world.device)
    mine: dict[tuple[int, int], float] = {}
    for pair in pairs_of(world.world_size):
        meet(world)
        if world.rank in pair:
            seconds = _round_trip(pair, buffer, world)
            if world.rank == pair[0]:
                mine[pair] = seconds
    return judge_pairs({pair: each for part in gather_objects(mine) for pair, each in part.items()})


def _round_trip(pair: tuple[int, int], buffer: torch.Tensor, world: World) -> float:
    """Seconds for there and back: the best of several, of which the first opens the connection."""
    first, second = pair
    best = float("inf")
    for _ in range(PAIR_ROUNDS):
        begun = time.perf_counter()
        if world.rank == first:
            dist.send(buffer, second)
            dist.recv(buffer, second)
        else:
            dist.recv(buffer, first)
            dist.send(buffer, first)
        wait_for_device(world)
        best = min(best, time.perf_counter() - begun)
    return best


def judge_pairs(seconds: Mapping[tuple[int, int], float]) -> dict[str, Any]:
    """The slowest pair and how far it is from the median."""
    pair = max(seconds, key=seconds.__getitem__)
    median = statistics.median(seconds.values())
    return {
        "ranks": list(pair),
        "gb_s": 2 * PAIR_BYTES / seconds[pair] / GB,
        "median_gb_s": 2 * PAIR_BYTES / median / GB,
        "times_median": seconds[pair] / median,
        "stands_out": len(seconds) > 1 and seconds[pair] / median > STANDS_OUT,
        "pairs": len(seconds),
    }

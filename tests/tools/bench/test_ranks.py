"""Benchmarks on real ranks: results checked, wrong ones found, who is slow named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.dist.world import init_world
from phalanx.tools.bench.bandwidth import CONVENTIONS, bandwidth
from phalanx.tools.bench.measuring import LATENCY_OPERATIONS
from phalanx.tools.bench.ranks import run_rank
from phalanx.tools.bench.settings import BenchSettings
from phalanx.tools.bench.stragglers import judge_pairs, judge_ranks, pairs_of
from tests.ranks import RankRunner

SMALL = {"min_bytes": 1 << 10, "max_bytes": 1 << 14, "iterations": 2, "warmup": 1, "backend": "gloo"}


def _every_kind(rank: int, world_size: int, dtypes: list[str]) -> list[dict[str, Any]]:
    return [
        run_rank(BenchSettings(kind=kind, dtype=dtype, **SMALL), lambda line: None)  # type: ignore[arg-type]
        for kind in CONVENTIONS
        for dtype in dtypes
    ]


def test_every_collective_is_right_and_its_figures_fit_together(run_ranks: RankRunner) -> None:
    world_size, dtypes = 3, ["float32", "bfloat16", "int64"]
    first, *others = run_ranks(_every_kind, dtypes, world_size=world_size)
    assert len(first) == len(CONVENTIONS) * len(dtypes)
    for report in first:
        assert report["world_size"] == world_size
        assert report["correct"]
        assert len(report["results"]) == 3
        for result in report["results"]:
            found = bandwidth(report["benchmark"], result["size_bytes"], result["time_us"] / 1e6, world_size)
            assert (result["algbw_gb_s"], result["busbw_gb_s"]) == pytest.approx((found.algorithm, found.bus))
            assert result["slowest_us"] >= result["time_us"] * (1 - 1e-9)
            assert result["slowest_rank"] in range(world_size)
        assert report["slowest_rank"]["rank"] in range(world_size)
        assert report["slowest_pair"]["pairs"] == world_size * (world_size - 1) // 2
    for other in others:  # what one rank prints, all agree upon
        assert [report["results"] for report in other] == [report["results"] for report in first]


def _latency(rank: int, world_size: int) -> dict[str, Any]:
    return run_rank(BenchSettings(kind="latency", iterations=1, warmup=1, backend="gloo"), lambda line: None)


def test_latency_of_small_messages(run_ranks: RankRunner) -> None:
    report = run_ranks(_latency, world_size=2)[0]
    assert {result["operation"] for result in report["results"]} == set(LATENCY_OPERATIONS)
    for result in report["results"]:
        assert 0 < result["min_us"] <= result["median_us"] <= result["p99_us"] <= result["max_us"]
    assert report["correct"]


def _broken_on_rank_one(rank: int, world_size: int) -> dict[str, Any]:
    init_world(device="cpu")
    original = dist.all_reduce

    def damaged(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        original(tensor, *args, **kwargs)
        if rank == 1 and tensor.numel() == 1024:
            tensor[-1] += 1  # one bit of one size on one rank

    from phalanx.tools.bench import operations

    operations.dist.all_reduce = damaged  # type: ignore[assignment]
    said: list[str] = []
    report = run_rank(BenchSettings(kind="all-reduce", **SMALL), said.append)  # type: ignore[arg-type]
    return {**report, "said": said}


def test_a_wrong_result_is_found_and_its_rank_named(run_ranks: RankRunner) -> None:
    report = run_ranks(_broken_on_rank_one, world_size=2)[0]
    assert [(result["size_bytes"], result["correct"]) for result in report["results"]] == [
        (1024, True),
        (4096, False),
        (16384, True),
    ]
    assert report["results"][1]["wrong_ranks"] == [1]
    assert not report["correct"]
    assert sum("NO: wrong on rank 1" in line for line in report["said"]) == 1


def _slow_link(rank: int, world_size: int) -> dict[str, Any]:
    init_world(device="cpu")
    from phalanx.tools.bench import stragglers

    original = dist.recv

    def delayed(tensor: torch.Tensor, source: int) -> None:
        original(tensor, source)
        if {rank, source} == {1, 2}:
            waste = torch.ones(200_000)
            for _ in range(30):
                waste = waste.mul_(1.0001)

    stragglers.dist.recv = delayed  # type: ignore[assignment]
    found = stragglers.slowest_pair(init_world(device="cpu"))
    assert found is not None
    return found


def test_the_pair_whose_link_is_slow_is_named(run_ranks: RankRunner) -> None:
    for found in run_ranks(_slow_link, world_size=3):
        assert found["ranks"] == [1, 2]
        assert found["stands_out"]


def test_who_stands_out() -> None:
    assert judge_ranks([1.0, 1.0, 1.1, 1.0]) == {
        "rank": 2,
        "work_us": 1.1e6,
        "times_median": pytest.approx(1.1),
        "stands_out": False,
    }
    pairs = judge_pairs({(0, 1): 1e-3, (0, 2): 1e-3, (1, 2): 4e-3})
    assert (pairs["ranks"], pairs["stands_out"], pairs["times_median"]) == ([1, 2], True, 4.0)
    assert not judge_pairs({(0, 1): 1.0})["stands_out"]


def test_every_pair_up_to_sixteen_ranks_and_neighbours_beyond() -> None:
    assert len(pairs_of(16)) == 120
    assert len(pairs_of(64)) == 64
    assert pairs_of(1) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", [*CONVENTIONS, "latency"])
def test_every_collective_with_nccl(run_ranks: RankRunner, kind: str) -> None:
    for report in run_ranks(_with_nccl, kind, world_size=2, backend=None, environ=_torchrun):
        assert report["correct"]
        assert report["backend"] == "nccl"


def _torchrun(rank: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29871}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def _with_nccl(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    settings = BenchSettings(kind=kind, iterations=2, warmup=1, max_bytes=1 << 20, backend="nccl")
    return run_rank(settings, lambda line: None)

"""The harness itself: values come back in rank order, failures and hangs are named."""

from __future__ import annotations

import time

import pytest

from tests.ranks import RankError, RankRunner


def _sum(rank: int, world_size: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return rank, total.item()


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("one is unhappy")
    time.sleep(30)


def _hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(30)


def test_values_come_in_rank_order(run_ranks: RankRunner) -> None:
    assert run_ranks(_sum, world_size=3) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_a_rank_that_raises_fails_the_test_with_its_own_traceback(run_ranks: RankRunner) -> None:
    with pytest.raises(RankError, match=r"rank 1 raised:[\s\S]*one is unhappy"):
        run_ranks(_fail_on_one, world_size=2)


def test_a_hang_names_the_ranks_still_running(run_ranks: RankRunner) -> None:
    with pytest.raises(RankError, match=r"still running after 2\.0 s: ranks \[1\]"):
        run_ranks(_hang_on_one, world_size=2, timeout_s=2.0)

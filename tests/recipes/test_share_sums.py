"""Sums with the same last digit, however a step's shares are spread over ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from phalanx.dist import ShardLoader, init_world
from phalanx.recipes.share_sums import ShareSums
from tests.ranks import RankRunner


def _totals(rank: int, world_size: int, virtual_ranks: int | None) -> list[float]:
    init_world()
    values = torch.randn(97, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-6, 6, 97)
    loader = ShardLoader(
        TensorDataset(values), global_batch_size=20, micro_batch_size=3, virtual_ranks=virtual_ranks
    )
    sums = ShareSums(loader, 2)
    sums.add(1e9, 1)
    sums.reset()
    for (batch,) in loader:
        sums.add(batch.sum(), len(batch))
    return sums.totals()


def test_virtual_ranks_sum_to_the_same_bits_on_any_number_of_ranks(run_ranks: RankRunner) -> None:
    (alone,) = run_ranks(_totals, 4, world_size=1)
    assert alone[1] == 97
    for world_size in (2, 4):
        assert run_ranks(_totals, 4, world_size=world_size) == [alone] * world_size
    (plain,) = run_ranks(_totals, None, world_size=1)
    assert plain == [pytest.approx(alone[0], rel=1e-5), 97]


def test_ranks_without_virtual_ones_count_every_sample_once(run_ranks: RankRunner) -> None:
    totals = run_ranks(_totals, None, world_size=3)
    assert totals[0] == totals[1] == totals[2]
    assert totals[0][1] == 97

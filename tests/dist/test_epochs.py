"""set_epoch: whatever a loader is made of is told, once."""

from __future__ import annotations

import doctest
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

from phalanx.dist import epochs
from phalanx.dist.batch_samplers import ShardBatchSampler
from phalanx.dist.epochs import set_epoch, sharded_part
from phalanx.dist.iterable import shard_iterable
from phalanx.dist.length_buckets import LengthBucketSampler
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.samplers import ShardSampler
from phalanx.dist.weighted_sampler import WeightedShardSampler
from tests.dist.loading import numbers, taken, world


class Batches(Sampler[list[int]]):
    """A user's batch sampler around another sampler."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        return iter([indices[start : start + 2] for start in range(0, len(indices), 2)])


class Told(Dataset[int]):
    def __init__(self, inner: Any = None) -> None:
        self.dataset = inner
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def distributed(num_items: int = 16) -> DistributedSampler[int]:
    return DistributedSampler(range(num_items), num_replicas=2, rank=0)  # type: ignore[arg-type]


def test_the_examples_of_the_docstrings() -> None:
    found = doctest.testmod(epochs)
    assert found.attempted >= 4
    assert found.failed == 0


def test_a_sampler_inside_a_batch_sampler_is_told_and_the_order_changes() -> None:
    loader = DataLoader(numbers(16), batch_sampler=Batches(distributed()))
    orders = []
    for epoch in range(2):
        assert set_epoch(loader, epoch) == 1
        orders.append([batch[0].tolist() for batch in loader])
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: DataLoader(numbers(16), batch_size=2, sampler=distributed()), 1),
        (lambda: DataLoader(numbers(16), batch_sampler=BatchSampler(distributed(), 2, False)), 1),
        (lambda: DataLoader(numbers(16), batch_sampler=Batches(Batches(distributed()))), 1),
        (lambda: DataLoader(numbers(16), batch_size=2, shuffle=True), 0),
        (lambda: DataLoader(Told()), 1),
        (lambda: DataLoader(Subset(Told(), [1, 2]), sampler=ShardSampler(2, 0, 1)), 2),
        (lambda: DataLoader(Told(Told())), 2),
        (lambda: DataLoader(ConcatDataset([Told(), Told(), numbers(3)])), 2),
        (lambda: DataLoader(shard_iterable(range(4), 0, 1)), 1),
        (lambda: DataLoader(numbers(9), batch_sampler=LengthBucketSampler([1] * 9, 3, 0, 1)), 1),
        (
            lambda: DataLoader(
                numbers(9),
                batch_sampler=ShardBatchSampler(Batches(WeightedShardSampler([1] * 9, 4, 0, 1)), 0, 1),
            ),
            2,
        ),
        (lambda: ShardLoader(numbers(8), global_batch_size=4, shuffle=True, world=world()), 1),
        (lambda: distributed(), 1),
        (lambda: None, 0),
    ],
)
def test_everything_that_knows_of_epochs_is_told_once(make: Any, told: int) -> None:
    assert set_epoch(make(), 3) == told


def test_a_shared_part_is_told_once_and_circles_end() -> None:
    inner = Told()
    outer = Told(inner)
    inner.dataset = outer
    assert set_epoch(DataLoader(ConcatDataset([outer, inner, outer])), 4) == 2
    assert inner.epochs == outer.epochs == [4]


def test_a_shard_loader_goes_to_the_epoch() -> None:
    told, other = (
        ShardLoader(numbers(8), global_batch_size=4, shuffle=True, world=world()) for _ in range(2)
    )
    taken(other)
    set_epoch(told, 1)
    assert taken(told) == taken(other)


def test_workers_that_are_not_reached_are_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Told(), num_workers=1, persistent_workers=True)
    with caplog.at_level(logging.WARNING):
        set_epoch(loader, 0)
    assert caplog.text == ""  # no worker lives yet
    list(loader)
    with caplog.at_level(logging.WARNING):
        set_epoch(loader, 1)
    assert "Told.set_epoch was called here" in caplog.text
    caplog.clear()
    reached = DataLoader(shard_iterable(range(4), 0, 1), num_workers=1, persistent_workers=True)
    list(reached)
    with caplog.at_level(logging.WARNING):
        set_epoch(reached, 1)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("sampler", "is_share"),
    [
        (distributed(), True),
        (BatchSampler(distributed(), 2, False), True),
        (ShardSampler(8, 0, 2), True),
        (Batches(Batches(ShardSampler(8, 0, 2))), True),
        (DistributedSampler(range(8), num_replicas=1, rank=0), False),  # type: ignore[arg-type]
        (ShardSampler(8, 0, 1), False),
        (RandomSampler(range(8)), False),
        (torch.arange(3), False),
    ],
)
def test_one_ranks_share_is_recognised_at_any_depth(sampler: Any, is_share: bool) -> None:
    assert (sharded_part(sampler) is not None) is is_share


@given(st.one_of(st.integers(max_value=-1), st.floats(), st.booleans(), st.text(), st.none()))
def test_what_is_no_epoch_is_named(epoch: Any) -> None:
    told = Told()
    with pytest.raises(ValueError) as caught:
        set_epoch(DataLoader(told), epoch)
    assert f"epoch={epoch!r}" in str(caught.value)
    assert told.epochs == []


def test_a_property_that_cannot_be_read_is_no_part() -> None:
    class Odd(TensorDataset):
        @property
        def dataset(self) -> Any:
            raise RuntimeError("not now")

    assert set_epoch(DataLoader(Odd(torch.arange(3)), sampler=ShardSampler(3, 0, 1)), 1) == 1

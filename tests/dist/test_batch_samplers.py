"""ShardBatchSampler: any sampler, one draw, equally many batches on every rank."""

from __future__ import annotations

import doctest
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from phalanx.dist import batch_samplers, orders
from phalanx.dist.batch_samplers import ShardBatchSampler
from phalanx.dist.plan import Tail
from phalanx.dist.samplers import ShardSampler
from tests.dist.loading import flat, numbers

TAILS: list[Tail] = ["uneven", "drop", "pad"]


class FromGenerators(Sampler[int]):
    """Draws from all global generators and from some of its own, as user code does."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.torch_generator = torch.Generator()
        self.rng = np.random.default_rng()
        self.old_rng = np.random.RandomState()
        self.random = random.Random()

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.num_items).numpy()
        np.random.shuffle(order)
        order = order[torch.randperm(self.num_items, generator=self.torch_generator).numpy()]
        self.rng.shuffle(order)
        self.old_rng.shuffle(order)
        mixed = order.tolist()
        self.random.shuffle(mixed)
        random.shuffle(mixed)
        return iter(mixed)


class Varying(Sampler[list[int]]):
    """Another number of batches each time, and a length that is an upper bound."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.calls = 0

    def __len__(self) -> int:
        return self.num_items

    def __iter__(self) -> Iterator[list[int]]:
        self.calls += 1
        order = torch.randperm(self.num_items).tolist()
        while order:
            size = random.randint(1, 4)
            yield order[:size]
            order = order[size:]


def of_ranks(make: Any, world_size: int, **options: Any) -> list[ShardBatchSampler]:
    return [ShardBatchSampler(make(), rank, world_size, **options) for rank in range(world_size)]


def batches(num_items: int, batch_size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(range(num_items), batch_size, drop_last)


def test_the_examples_of_the_docstrings() -> None:
    for module in (batch_samplers, orders):
        found = doctest.testmod(module)
        assert found.attempted >= 2
        assert found.failed == 0


def test_every_item_comes_once_whatever_each_ranks_generators_hold() -> None:
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        sampler = ShardBatchSampler(FromGenerators(8), rank, 2)
        parts.append([list(sampler) for _ in range(2)])
    (alone,) = of_ranks(lambda: FromGenerators(8), 1)
    for epoch in range(2):
        assert sorted(parts[0][epoch] + parts[1][epoch]) == list(range(8))
        dealt = [index for pair in zip(parts[0][epoch], parts[1][epoch], strict=True) for index in pair]
        assert dealt == list(alone)
    assert parts[0][0] != parts[0][1]


def test_every_generator_is_put_back() -> None:
    inner = FromGenerators(8)

    def states() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # type: ignore[index]
            inner.torch_generator.get_state().tolist(),
            inner.rng.bit_generator.state,
            inner.old_rng.get_state()[1].tolist(),  # type: ignore[index]
            inner.random.getstate(),
        ]

    before = states()
    list(ShardBatchSampler(inner, 0, 1))
    assert states() == before


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("num_items", [100, 103, 95, 9, 1])
def test_the_length_of_a_loader_is_the_number_of_its_batches(
    num_items: int, tail: Tail, drop_last: bool, split_batches: bool
) -> None:
    samplers = of_ranks(lambda: batches(num_items, 10, drop_last), 2, split_batches=split_batches, tail=tail)
    loaders = [DataLoader(numbers(num_items), batch_sampler=sampler) for sampler in samplers]
    lengths = [len(loader) for loader in loaders]
    assert lengths == [len(list(loader)) for loader in loaders]
    assert lengths[0] == lengths[1]
    if num_items == 100:
        assert lengths == ([10, 10] if split_batches else [5, 5])


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 5), max_size=20),
    st.integers(1, 6),
    st.sampled_from(TAILS),
    st.booleans(),
)
def test_ranks_have_equally_many_batches_none_empty_and_items_are_kept(
    sizes: list[int], world_size: int, tail: Tail, split_batches: bool
) -> None:
    ends = list(itertools.accumulate(sizes))
    inner = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    total = sum(sizes)
    samplers = of_ranks(lambda: inner, world_size, tail=tail, split_batches=split_batches)
    parts = [list(sampler) for sampler in samplers]
    assert len({len(part) for part in parts}) == 1
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    assert all(batch for part in parts for batch in part)
    seen = np.bincount([index for part in parts for batch in part for index in batch], minlength=total)
    assert len(seen) == total
    if tail == "drop":
        assert seen.max(initial=0) <= 1
        if not split_batches:
            assert {len(part) for part in parts} == {sum(size > 0 for size in sizes) // world_size}
    else:
        assert seen.min(initial=1) >= 1
        if tail == "uneven" and not split_batches and total >= world_size:
            assert (seen == 1).all()
        if tail == "uneven" and split_batches and all(size >= world_size for size in sizes if size):
            assert (seen == 1).all()
    if tail == "pad" and split_batches:
        for step in zip(*parts, strict=True):
            assert len({len(batch) for batch in step}) == 1


def test_batches_left_over_are_shared_rather_than_lost_or_waited_for() -> None:
    parts = [list(sampler) for sampler in of_ranks(lambda: batches(22, 5), 4)]
    assert parts == [
        [[0, 1, 2, 3, 4, 20]],
        [[5, 6, 7, 8, 9, 21]],
        [[10, 11, 12, 13, 14]],
        [[15, 16, 17, 18, 19]],
    ]
    assert list(of_ranks(lambda: batches(22, 5), 4, tail="drop")[0]) == [[0, 1, 2, 3, 4]]
    assert list(of_ranks(lambda: batches(22, 5), 4, tail="pad")[1]) == [
        [5, 6, 7, 8, 9],
        [0, 1, 2, 3, 4],
    ]


@pytest.mark.parametrize("tail", TAILS)
def test_a_batch_sampler_of_varying_length_gives_every_rank_as_many(tail: Tail) -> None:
    counts = set()
    samplers = of_ranks(lambda: Varying(50), 3, tail=tail)
    for epoch in range(4):
        lengths, parts = [], []
        for rank, sampler in enumerate(samplers):
            random.seed(rank)
            torch.manual_seed(rank)
            sampler.set_epoch(epoch)
            lengths.append(len(sampler))
            parts.append(list(sampler))
        assert lengths == [len(part) for part in parts]
        assert len(set(lengths)) == 1
        counts.add(lengths[0])
        if tail == "uneven":
            assert sorted(flat([flat(part) for part in parts])) == list(range(50))
    assert len(counts) > 1
    assert samplers[0].sampler.calls == 4  # type: ignore[attr-defined]


def test_samples_without_replacement_are_padded_with_draws_there_are() -> None:
    def make() -> WeightedRandomSampler:
        return WeightedRandomSampler([1.0] * 100, 100, replacement=False)

    parts = [list(sampler) for sampler in of_ranks(make, 8, tail="pad")]
    assert [len(part) for part in parts] == [13] * 8
    drawn = [index for row in zip(*parts, strict=True) for index in row]
    assert drawn[100:] == drawn[:4]
    assert sorted(drawn[:100]) == list(range(100))


def test_an_inner_sampler_that_counts_epochs_is_told_of_each() -> None:
    def make() -> BatchSampler:
        return BatchSampler(
            DistributedSampler(range(16), num_replicas=1, rank=0),  # type: ignore[arg-type]
            2,
            drop_last=False,
        )

    sampler = ShardBatchSampler(make(), 0, 2)
    orders_seen = {str(list(sampler)) for _ in range(3)}
    assert len(orders_seen) == 3
    assert sampler.sampler.sampler.epoch == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DistributedSampler(range(64), num_replicas=4, rank=1),  # type: ignore[arg-type]
        lambda: ShardSampler(64, 1, 4),
        lambda: BatchSampler(ShardSampler(64, 1, 4), 4, False),
        lambda: ShardBatchSampler(SequentialSampler(range(64)), 1, 4),
    ],
    ids=["torch's", "ours", "wrapped", "twice"],
)
def test_what_is_shared_already_is_not_shared_again(make: Any) -> None:
    with pytest.raises(ValueError, match="one rank's share already"):
        ShardBatchSampler(make(), 1, 4)


@settings(max_examples=60)
@given(
    st.integers(1, 60),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 8),
    st.booleans(),
)
def test_a_state_resumes_on_another_number_of_ranks(
    num_items: int, batch_size: int, then: int, now: int, rounds: int, split_batches: bool
) -> None:
    def make() -> BatchSampler:
        return BatchSampler(RandomSampler(range(num_items)), batch_size, drop_last=False)

    options: dict[str, Any] = {"split_batches": split_batches, "seed": 2}
    samplers = of_ranks(make, then, **options)
    seen, states = [], []
    for sampler in samplers:
        list(sampler)  # epoch 0
        seen.append(flat(list(itertools.islice(sampler, rounds))))
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    resumed = of_ranks(make, now, **options)
    rest = []
    for sampler in resumed:
        sampler.load_state_dict(states[0])
        if states[0]["epoch"] == 1:
            rest.append(flat(list(sampler)))
    both = flat(seen) + flat(rest)
    assert set(both) == set(range(num_items))
    if not split_batches and num_items >= max(then, now):
        left = num_items - len(flat(seen))
        assert len(both) == num_items or left < now
    after = [list(sampler) for sampler in resumed]
    whole = of_ranks(make, now, **options)
    for sampler, expected in zip(whole, after, strict=True):
        sampler.set_epoch(2)
        assert list(sampler) == expected


def test_a_place_within_a_batch_is_refused_and_the_sampler_stays_usable() -> None:
    sampler = ShardBatchSampler(batches(20, 5), 0, 2)
    for consumed, named in ((7, "the nearest are 5 and 10"), (25, "an epoch here has 20")):
        with pytest.raises(ValueError, match=named):
            sampler.load_state_dict({"seed": 9, "epoch": 0, "consumed": consumed})
    assert sampler.state_dict() == {"seed": 0, "epoch": 0, "consumed": 0}


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_samplers_without_an_end_need_an_epochs_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_samplers, "_ENDLESS", 1000)
    with pytest.raises(ValueError, match="epoch_length="):
        list(ShardBatchSampler(Endless(), 0, 2))
    assert list(ShardBatchSampler(Endless(), 1, 2, epoch_length=6)) == [1, 3, 5]


def test_arrays_and_tuples_are_batches_too() -> None:
    inner = [np.array([1, 2]), (3, 4), torch.tensor([5, 6])]
    assert list(ShardBatchSampler(inner, 0, 1)) == [[1, 2], [3, 4], [5, 6]]


def test_rank_and_world_size_come_from_the_world(run_ranks: Any) -> None:
    parts = run_ranks(_batches_of_the_world, world_size=2)
    assert sorted(flat(flat(parts))) == list(range(22))  # type: ignore[arg-type]
    assert len(parts[0]) == len(parts[1]) == 3


def _batches_of_the_world(rank: int, world_size: int) -> list[list[int]]:
    inner = BatchSampler(RandomSampler(range(22)), 5, drop_last=False)
    loader = DataLoader(numbers(22), batch_sampler=ShardBatchSampler(inner))
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize(
    ("sampler", "options", "named"),
    [
        (5, {}, "sampler=5 is no sampler"),
        (None, {}, "sampler=None"),
        ("abc", {}, "sampler='abc'"),
        (iter([1]), {}, "gone through once"),
        ([[1]], {"rank": 3, "world_size": 2}, "rank=3 is outside"),
        ([[1]], {"rank": 1}, "both, or neither"),
        ([[1]], {"tail": 1}, "tail=1"),
        ([[1]], {"seed": None}, "seed=None"),
        ([[1]], {"seed": 1.5}, "seed=1.5"),
        ([[1]], {"epoch_length": 0}, "epoch_length=0"),
    ],
)
def test_bad_arguments_are_named(sampler: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ShardBatchSampler(sampler, **options)


def test_items_cannot_be_split_and_mixtures_are_named() -> None:
    with pytest.raises(ValueError, match="yields items"):
        list(ShardBatchSampler(range(4), 0, 2, split_batches=True))
    with pytest.raises(ValueError, match="both batches and single items"):
        list(ShardBatchSampler([[1], 2], 0, 2))

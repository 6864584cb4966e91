"""shard_iterable: every element once over ranks and workers, equal counts, a position free of both."""

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
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from phalanx.dist import iterable
from phalanx.dist.iterable import ShardIterable, shard_iterable
from phalanx.dist.plan import Tail
from phalanx.dist.samplers import ShardSampler
from tests.dist.loading import flat

TAILS: list[Tail] = ["uneven", "drop", "pad"]


class Stream(IterableDataset[int]):
    """Numbers without a length."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_items))


class Shuffled(Stream):
    """In an order of the global generators of whoever iterates, read in pieces."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.num_items).tolist()
        while order:
            yield order.pop(random.randrange(len(order)) if np.random.rand() < 0.5 else -1)


def of_ranks(make: Any, world_size: int, **options: Any) -> list[ShardIterable]:
    return [shard_iterable(make(), rank, world_size, **options) for rank in range(world_size)]


def batches(loader: DataLoader[Any], count: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader, count)]


def interleaved(parts: list[list[Any]]) -> list[Any]:
    dealt = itertools.chain.from_iterable(itertools.zip_longest(*parts))
    return [element for element in dealt if element is not None]


def test_the_examples_of_the_docstrings() -> None:
    found = doctest.testmod(iterable)
    assert found.attempted >= 2
    assert found.failed == 0


@given(st.integers(0, 60), st.integers(1, 6), st.sampled_from(TAILS), st.integers(1, 5), st.booleans())
def test_shares_are_those_of_a_shard_sampler(
    num_items: int, world_size: int, tail: Tail, batch_size: int, sized: bool
) -> None:
    shares = of_ranks(
        lambda: range(num_items) if sized else Stream(num_items), world_size, tail=tail, batch_size=batch_size
    )
    expected = [
        list(ShardSampler(num_items, rank, world_size, shuffle=False, tail=tail))
        for rank in range(world_size)
    ]
    for share, part in zip(shares, expected, strict=True):
        if sized:
            assert len(share) == len(part)
        assert list(share) == part


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_items", [3, 64, 67])
def test_batches_are_the_same_for_any_number_of_workers(num_items: int, num_workers: int) -> None:
    for make in (Stream, Shuffled):
        parts = []
        for rank in range(2):
            shares = [shard_iterable(make(num_items), rank, 2, batch_size=4) for _ in range(2)]
            without = batches(DataLoader(shares[0], batch_size=4))
            assert batches(DataLoader(shares[1], batch_size=4, num_workers=num_workers)) == without
            parts.append(flat(without))
        assert sorted(flat(parts)) == list(range(num_items))


def test_every_element_comes_once_when_batch_sizes_differ() -> None:
    seen = []
    for rank in range(2):
        loader = DataLoader(shard_iterable(Stream(50), rank, 2), batch_size=4, num_workers=2)
        seen += flat(batches(loader))
    assert sorted(seen) == list(range(50))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_resumed_epoch_is_short_and_each_later_one_whole(persistent: bool) -> None:
    dataset = shard_iterable(Shuffled(128), 0, 1, batch_size=2)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=persistent)
    orders = [batches(loader) for _ in range(4)]
    assert [len(order) for order in orders] == [64] * 4
    assert len({str(order) for order in orders}) == 4

    resumed = shard_iterable(Shuffled(128), 0, 1, batch_size=2)
    again = DataLoader(resumed, batch_size=2, num_workers=2, persistent_workers=persistent)
    resumed.load_state_dict({"seed": 0, "epoch": 1, "consumed": 122})
    assert batches(again) == orders[1][61:]
    assert batches(again) == orders[2]
    assert batches(again) == orders[3]
    # also when workers live already
    resumed.load_state_dict({"seed": 0, "epoch": 2, "consumed": 100})
    assert batches(again) == orders[2][50:]
    assert batches(again) == orders[3]
    resumed.set_epoch(0)
    assert batches(again) == orders[0]
    assert resumed.epoch == 0


@settings(max_examples=60)
@given(
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 6),
    st.booleans(),
)
def test_a_state_resumes_on_another_number_of_ranks(
    num_items: int, then: int, now: int, batch_size: int, rounds: int, shuffled: bool
) -> None:
    def make() -> Stream:
        return (Shuffled if shuffled else Stream)(num_items)

    (alone,) = of_ranks(make, 1)
    alone.set_epoch(1)
    order = list(alone)
    if rounds * batch_size * then > num_items:
        return
    seen, states = [], []
    for share in of_ranks(make, then, batch_size=batch_size):
        share.set_epoch(1)
        seen.append(list(itertools.islice(share, rounds * batch_size)))
        states.append(share.state_dict(rounds * batch_size * then))
        if rounds:
            assert share.state_dict() == states[-1]
    assert all(state == {"seed": 0, "epoch": 1, "consumed": len(flat(seen))} for state in states)
    resumed = of_ranks(make, now)
    for share in resumed:
        share.load_state_dict(states[0])
    rest = [list(share) for share in resumed]
    assert interleaved(seen) + interleaved(rest) == order
    after = interleaved([list(share) for share in resumed])
    alone.set_epoch(2)
    assert after == list(alone)


def test_a_state_at_the_end_is_that_of_the_next_epoch() -> None:
    share = shard_iterable(Stream(7), 0, 3)
    assert len(list(share)) == 3
    assert share.state_dict() == {"seed": 0, "epoch": 1, "consumed": 0}
    part_way = iter(share)
    next(part_way)
    assert share.state_dict() == {"seed": 0, "epoch": 1, "consumed": 3}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_position_counts_batches_delivered(num_workers: int) -> None:
    share = shard_iterable(Shuffled(64), 0, 2, batch_size=4)
    loader = DataLoader(share, batch_size=4, num_workers=num_workers)
    delivered = batches(loader, 3)
    state = share.state_dict(consumed=3 * 4 * 2)
    assert state == {"seed": 0, "epoch": 0, "consumed": 24}
    resumed = shard_iterable(Shuffled(64), 0, 2, batch_size=4)
    resumed.load_state_dict(state)
    whole = list(shard_iterable(Shuffled(64), 0, 2))
    assert flat(delivered) + list(resumed) == whole
    if num_workers:
        with pytest.raises(ValueError, match="state_dict\\(consumed=batches"):
            share.state_dict()


def test_a_stream_that_draws_is_the_same_everywhere_and_disturbs_nobody() -> None:
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        drawn, without = [], []
        share = shard_iterable(Shuffled(20), rank, 2)
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        for element in share:
            drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
            parts.append(element)
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
        for _ in drawn:
            without.append((torch.rand(()).item(), random.random(), np.random.rand()))
        assert drawn == without
    assert sorted(parts) == list(range(20))


def test_equal_counts_need_no_length_and_no_more_than_the_round() -> None:
    read = []

    class Counted(Stream):
        def __iter__(self) -> Iterator[int]:
            for number in range(self.num_items):
                read.append(number)
                yield number

    first = iter(shard_iterable(Counted(100), 0, 4, tail="drop"))
    assert next(first) == 0
    assert read == [0, 1, 2, 3]
    read.clear()
    assert next(iter(shard_iterable(Counted(100), 0, 4))) == 0
    assert read == [0]


class SharesAmongWorkers(Stream):
    """As torch's documentation shows it: each worker takes its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(start, self.num_items, step)


def test_a_stream_that_shares_itself_among_workers_is_not_shared_twice() -> None:
    loader = DataLoader(
        shard_iterable(SharesAmongWorkers(40), 0, 1, batch_size=4), batch_size=4, num_workers=2
    )
    assert flat(batches(loader)) == list(range(40))


class KnowsEpochs(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * self.num_items)


def test_a_stream_that_knows_of_epochs_is_told_in_every_worker() -> None:
    share = shard_iterable(KnowsEpochs(4), 0, 1)
    loader = DataLoader(share, batch_size=2, num_workers=2, persistent_workers=True)
    assert [flat(batches(loader)) for _ in range(2)] == [[0] * 4, [1] * 4]
    share.set_epoch(7)
    assert flat(batches(loader)) == [7] * 4


def test_a_stream_without_random_numbers_needs_no_seed() -> None:
    share = shard_iterable(Stream(8), 1, 2, seed=None)
    assert list(share) == [1, 3, 5, 7]
    assert share.state_dict() == {"seed": None, "epoch": 1, "consumed": 0}


def test_the_length_is_that_of_the_stream_or_unknown() -> None:
    assert len(DataLoader(shard_iterable(range(10), 0, 3), batch_size=2)) == 2
    with pytest.raises(TypeError, match="Stream has no len"):
        len(shard_iterable(Stream(10), 0, 3))


def test_rank_and_world_size_come_from_the_world(run_ranks: Any) -> None:
    parts = run_ranks(_share_of_the_world, world_size=2)
    assert parts == [[0, 2, 4], [1, 3]]


def _share_of_the_world(rank: int, world_size: int) -> list[int]:
    return list(shard_iterable(range(5)))


def test_workers_that_are_no_copies_of_this_process_share_the_position_too() -> None:
    share = shard_iterable(Stream(8), 0, 1, batch_size=2)
    share.load_state_dict({"seed": 0, "epoch": 0, "consumed": 4})
    loader = DataLoader(
        share, batch_size=2, num_workers=1, multiprocessing_context="forkserver", persistent_workers=True
    )
    assert [flat(batches(loader)) for _ in range(2)] == [[4, 5, 6, 7], list(range(8))]


@pytest.mark.parametrize(
    ("stream", "options", "named"),
    [
        (iter([1]), {}, "gone through once"),
        (5, {}, "iterable=int has no __iter__"),
        (None, {}, "iterable=NoneType"),
        (TensorDataset(torch.arange(3)), {}, "map-style dataset goes into ShardLoader"),
        (ShardSampler(4, 0, 2), {}, "one rank's share already"),
        (shard_iterable(range(4), 0, 2), {}, "one rank's share already"),
        ([1], {"rank": 2, "world_size": 2}, "rank=2 is outside"),
        ([1], {"rank": -1, "world_size": 2}, "rank=-1"),
        ([1], {"world_size": 2}, "both, or neither"),
        ([1], {"batch_size": 0}, "batch_size=0"),
        ([1], {"batch_size": None}, "batch_size=None"),
        ([1], {"seed": 0.5}, "seed=0.5"),
        ([1], {"tail": "equal"}, "tail='equal'"),
    ],
)
def test_bad_arguments_are_named(stream: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        shard_iterable(stream, **options)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"seed": 0, "epoch": 0}, "consumed missing"),
        ({"seed": 1, "epoch": 0, "consumed": 0}, "seed=1"),
        ({"seed": 0, "epoch": -1, "consumed": 0}, "epoch=-1"),
        ({"seed": 0, "epoch": 0, "consumed": 11}, "ended after 8"),
    ],
)
def test_states_that_do_not_fit_are_refused(state: dict[str, int], named: str) -> None:
    def resume() -> None:
        share = shard_iterable(Stream(8), 0, 2)
        share.load_state_dict(state)
        list(share)

    with pytest.raises(ValueError, match=named):
        resume()

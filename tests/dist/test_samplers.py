"""ShardSampler: shares that cover the dataset, orders that all agree on, a position free of the world size."""

from __future__ import annotations

import itertools
import logging
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from phalanx.dist.plan import Tail
from phalanx.dist.samplers import ShardSampler

TAILS: list[Tail] = ["uneven", "drop", "pad"]


def shares(num_items: int, world_size: int, **options: Any) -> list[list[int]]:
    return [list(ShardSampler(num_items, rank, world_size, **options)) for rank in range(world_size)]


def interleaved(parts: list[list[int]]) -> list[int]:
    """The order that the ranks' shares were dealt from."""
    dealt = itertools.chain.from_iterable(itertools.zip_longest(*parts))
    return [index for index in dealt if index is not None]


def test_the_table_of_the_docstring() -> None:
    expected: dict[Tail, list[list[int]]] = {
        "uneven": [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]],
        "drop": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "pad": [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]],
    }
    for tail, parts in expected.items():
        assert shares(10, 4, shuffle=False, tail=tail) == parts


def test_a_mean_over_uneven_shares_weighs_every_sample_once() -> None:
    parts = shares(10, 3, shuffle=False)
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert sum(map(sum, parts)) / sum(map(len, parts)) == 4.5


@given(st.integers(0, 300), st.integers(1, 9), st.booleans(), st.sampled_from(TAILS), st.integers(0, 3))
def test_shares_cover_the_dataset_and_their_lengths_are_known(
    num_items: int, world_size: int, shuffle: bool, tail: Tail, epoch: int
) -> None:
    samplers = [
        ShardSampler(num_items, rank, world_size, shuffle=shuffle, tail=tail) for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    parts = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    seen = np.bincount([index for part in parts for index in part], minlength=num_items)
    assert len(seen) == num_items
    if tail == "uneven":
        assert (seen == 1).all()
    elif tail == "drop":
        assert seen.sum() == num_items // world_size * world_size
        assert seen.max(initial=0) <= 1
    elif num_items:
        assert len({len(part) for part in parts}) == 1
        assert seen.min() >= 1
        assert seen.sum() - num_items < world_size


@pytest.mark.parametrize("num_items", [10, 1000, 70_000])
def test_the_order_is_the_same_on_any_number_of_ranks(num_items: int) -> None:
    (alone,) = shares(num_items, 1)
    assert alone != sorted(alone)
    assert interleaved(shares(num_items, 3)) == alone
    assert interleaved(shares(num_items, 8)) == alone


def test_indices_are_python_integers() -> None:
    assert {type(index) for index in ShardSampler(70_000, 0, 1000)} == {int}


def test_every_pass_is_the_next_epoch_without_set_epoch() -> None:
    samplers = [ShardSampler(22, rank, 2) for rank in range(2)]
    first, second = ([list(sampler) for sampler in samplers] for _ in range(2))
    assert first != second
    for parts in (first, second):
        assert sorted(parts[0] + parts[1]) == list(range(22))
    told = [ShardSampler(22, rank, 2) for rank in range(2)]
    for sampler in told:
        sampler.set_epoch(1)
    assert [list(sampler) for sampler in told] == second


def test_running_an_epoch_again_is_said(caplog: pytest.LogCaptureFixture) -> None:
    sampler = ShardSampler(22, 0, 2)
    sampler.set_epoch(0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        sampler.set_epoch(1)
    assert "epoch 1 is about to run again" in caplog.text


def test_leaving_a_pass_early_ends_its_epoch() -> None:
    sampler, whole = ShardSampler(40, 0, 2), ShardSampler(40, 0, 2)
    next(iter(sampler))
    list(whole)
    assert list(sampler) == list(whole)


def test_global_generators_neither_matter_nor_change() -> None:
    parts = []
    for rank in range(2):  # different seeds, as on ranks that were seeded apart
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        before = (
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
        )
        parts.append(list(ShardSampler(8, rank, 2)))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before[2]
    assert sorted(parts[0] + parts[1]) == list(range(8))


def test_a_resumed_pass_is_the_tail_of_the_old_order_and_later_passes_are_whole() -> None:
    (order,) = shares(64, 1, seed=3)
    sampler = ShardSampler(64, 0, 1, seed=3)
    seen = list(itertools.islice(sampler, 20))
    state = sampler.state_dict()
    assert state == {"seed": 3, "epoch": 0, "consumed": 20}

    resumed = ShardSampler(64, 0, 1, seed=3)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert rest == order[20:]
    assert sorted(seen + rest) == list(range(64))
    uninterrupted = ShardSampler(64, 0, 1, seed=3)
    list(uninterrupted)
    for _ in range(2):
        assert list(resumed) == list(uninterrupted)


@pytest.mark.parametrize("call_set_epoch", [False, True])
def test_a_pass_stopped_in_a_later_epoch_resumes_in_that_epoch(call_set_epoch: bool) -> None:
    uninterrupted = ShardSampler(50, 0, 1)
    orders = [list(uninterrupted) for _ in range(5)]
    sampler = ShardSampler(50, 0, 1)
    sampler.set_epoch(3)
    list(itertools.islice(sampler, 17))

    resumed = ShardSampler(50, 0, 1)
    resumed.load_state_dict(sampler.state_dict())
    if call_set_epoch:  # as the usual loop does
        resumed.set_epoch(3)
    assert list(resumed) == orders[3][17:]
    if call_set_epoch:
        resumed.set_epoch(4)
    assert list(resumed) == orders[4]


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 6), st.integers(0, 200), st.integers(0, 2))
def test_a_state_resumes_on_another_number_of_ranks(
    num_items: int, then: int, now: int, steps: int, epoch: int
) -> None:
    whole = ShardSampler(num_items, 0, 1)
    whole.set_epoch(epoch)
    order = list(whole)
    state, seen = {}, []
    for rank in range(then):
        sampler = ShardSampler(num_items, rank, then)
        sampler.set_epoch(epoch)
        seen.append(list(itertools.islice(sampler, min(steps, num_items // then))))
        state = sampler.state_dict()
    consumed = len(interleaved(seen))
    if consumed < num_items:
        assert state == {"seed": 0, "epoch": epoch, "consumed": consumed}
    rest = []
    for rank in range(now):
        resumed = ShardSampler(num_items, rank, now)
        resumed.load_state_dict({"seed": 0, "epoch": epoch, "consumed": consumed})
        rest.append(list(resumed))
    assert interleaved(seen) + interleaved(rest) == order


def test_the_state_knows_its_place_within_blocks() -> None:
    sampler = ShardSampler(100_000, 1, 3)
    for taken, _ in enumerate(sampler, start=1):
        if taken in (1, 255, 256, 257, 768, 769, 20_000):
            assert sampler.state_dict()["consumed"] == taken * 3
    assert sampler.state_dict() == {"seed": 0, "epoch": 1, "consumed": 0}


def test_a_state_at_an_uneven_end_counts_no_more_than_there_is() -> None:
    sampler = ShardSampler(10, 0, 4)
    indices = iter(sampler)
    for _ in range(3):
        next(indices)
    state = sampler.state_dict()
    assert state == {"seed": 0, "epoch": 0, "consumed": 10}
    resumed = ShardSampler(10, 0, 4)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert len(list(resumed)) == 3


def test_batches_drawn_ahead_by_workers_are_left_out_when_the_count_is_given() -> None:
    dataset = TensorDataset(torch.arange(64))
    (order,) = shares(64, 1)
    sampler = ShardSampler(64, 0, 1)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1)
    passing = iter(loader)
    seen = [int(index) for _ in range(3) for index in next(passing)[0]]
    assert seen == order[:12]
    assert sampler.state_dict()["consumed"] != 12  # the worker is ahead
    state = sampler.state_dict(consumed=12)
    del passing, loader
    resumed = ShardSampler(64, 0, 1)
    resumed.load_state_dict(state)
    assert list(resumed) == order[12:]


def test_a_plain_dataloader_takes_it() -> None:
    dataset = TensorDataset(torch.arange(10))
    loaders = [DataLoader(dataset, batch_size=2, sampler=ShardSampler(10, rank, 3)) for rank in range(3)]
    assert [len(loader) for loader in loaders] == [2, 2, 2]
    seen = [int(index) for loader in loaders for (batch,) in loader for index in batch]
    assert sorted(seen) == list(range(10))


def test_two_passes_at_once_are_each_whole() -> None:
    sampler = ShardSampler(2000, 0, 2)
    pairs = list(zip(sampler, sampler, strict=True))
    assert [len({pair[side] for pair in pairs}) for side in (0, 1)] == [1000, 1000]


def test_without_a_seed_the_dataset_order_is_kept() -> None:
    assert shares(5, 2, seed=None) == [[0, 2, 4], [1, 3]]


def test_memory_before_the_first_index_does_not_grow_with_the_dataset() -> None:
    next(iter(ShardSampler(10**8, 3, 8)))  # what is made once per process is not counted
    tracemalloc.start()
    try:
        next(iter(ShardSampler(10**8, 4, 8, seed=1)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200_000


def test_rank_and_world_size_come_from_the_world(run_ranks: Any) -> None:
    parts = run_ranks(_share_of_the_world, world_size=2)
    assert sorted(parts[0] + parts[1]) == list(range(9))
    assert len(parts[0]) == 5


def _share_of_the_world(rank: int, world_size: int) -> list[int]:
    return list(ShardSampler(9))


@pytest.mark.parametrize(
    ("args", "options", "named"),
    [
        ((-1, 0, 1), {}, "num_items=-1"),
        ((10.0, 0, 1), {}, "num_items=10.0"),
        (([1, 2], 0, 1), {}, "len\\(dataset\\)"),
        ((10, 2, 2), {}, "rank=2 is outside of a group of 2"),
        ((10, -1, 2), {}, "rank=-1"),
        ((10, 0, 0), {}, "world_size=0"),
        ((10, 0), {}, "both, or neither"),
        ((10, 0, 1), {"tail": "wrap"}, "tail='wrap'"),
        ((10, 0, 1), {"seed": 0.5}, "seed=0.5"),
    ],
)
def test_bad_arguments_are_named(args: tuple[Any, ...], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ShardSampler(*args, **options)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"seed": 0, "epoch": 0}, "consumed missing"),
        ({"seed": 0, "epoch": -1, "consumed": 0}, "epoch=-1"),
        ({"seed": 0, "epoch": 0, "consumed": 11}, "11 samples"),
    ],
)
def test_states_that_do_not_fit_are_refused(state: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ShardSampler(10, 0, 1).load_state_dict(state)

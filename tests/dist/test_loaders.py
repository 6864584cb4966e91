"""ShardLoader: a rank's share of every step, in passes that count themselves."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    random_split,
)

from phalanx.dist.loaders import ShardLoader
from phalanx.dist.plan import Plan, Progress, Tail
from tests.dist.loading import flat, numbers, taken, world

TAILS: list[Tail] = ["uneven", "drop", "pad"]


def test_50_samples_on_4_ranks_are_13_13_12_12() -> None:
    loaders = [
        ShardLoader(numbers(100), global_batch_size=50, shuffle=True, world=world(rank, 4))
        for rank in range(4)
    ]
    steps = [taken(loader) for loader in loaders]
    assert [[len(batch) for batch in batches] for batches in steps] == [
        [13, 13],
        [13, 13],
        [12, 12],
        [12, 12],
    ]
    assert sorted(flat([flat(batches) for batches in steps])) == list(range(100))


@pytest.mark.parametrize("num_items", [64, 70_001])
def test_a_step_sees_the_same_samples_on_any_number_of_ranks(num_items: int) -> None:
    dataset: Any = range(num_items)
    alone = ShardLoader(dataset, global_batch_size=20, shuffle=True, seed=4, world=world(), collate_fn=list)
    shared = [
        ShardLoader(
            dataset, global_batch_size=20, shuffle=True, seed=4, world=world(rank, 3), collate_fn=list
        )
        for rank in range(3)
    ]
    for whole, *parts in itertools.islice(zip(alone, *shared, strict=True), 4):
        assert sorted(whole) == sorted(flat(parts))


def test_each_rank_of_two_gets_half_the_batches_of_one() -> None:
    lengths = [
        len(ShardLoader(numbers(104_096), micro_batch_size=16, world=world(0, world_size)))
        for world_size in (1, 2)
    ]
    assert lengths == [6506, 3253]


@given(
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(1, 25)),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(TAILS),
)
def test_the_length_is_the_number_of_batches_and_ranks_agree(
    num_items: int, total: int | None, micro: int | None, world_size: int, training: bool, tail: Tail
) -> None:
    if total is None and micro is None:
        total = 7
    size = total if total is not None else (micro or 0) * world_size
    if tail == "drop" and num_items < size:
        return
    counts, seen, shares = [], [], []
    for rank in range(world_size):
        loader = ShardLoader(
            numbers(num_items),
            global_batch_size=total,
            micro_batch_size=micro,
            shuffle=training,
            tail=tail,
            world=world(rank, world_size),
        )
        marks: list[tuple[int, bool]] = []
        share: dict[int, tuple[int, int]] = {}
        local: dict[int, int] = {}
        for batch in loader:
            step = loader.progress.step_in_epoch - loader.is_last_micro
            marks.append((step, loader.is_last_micro))
            local[step] = local.get(step, 0) + loader.local_count
            share[step] = loader.step_local_count, loader.global_count
            seen += batch[0][: loader.local_count].tolist()
            assert loader.local_count == len(loader.positions)
            assert len(batch[0]) == max(1, loader.local_count)
            assert micro is None or len(batch[0]) <= micro
        assert len(marks) == len(loader)
        assert local == {step: mine for step, (mine, _) in share.items()}
        assert loader.progress == Progress(1, 0, loader.plan.steps_per_epoch)
        counts.append(marks)
        shares.append(share)
    if training:
        assert all(marks == counts[0] for marks in counts)
        for step, (_, global_count) in shares[0].items():
            assert sum(share[step][0] for share in shares) == global_count
    expected = Plan(num_items, size, world_size, tail=tail)
    assert len(seen) == sum(expected.count(0, step) for step in range(expected.steps_per_epoch))
    if tail == "uneven":
        assert sorted(seen) == list(range(num_items))


def test_a_share_is_cut_into_equally_many_micro_batches_on_every_rank() -> None:
    def sizes(rank: int) -> list[tuple[int, bool]]:
        loader = ShardLoader(
            numbers(14), global_batch_size=9, micro_batch_size=4, shuffle=True, world=world(rank, 2)
        )
        return [(loader.local_count, loader.is_last_micro) for _ in loader]

    assert sizes(0) == [(3, False), (2, True), (3, True)]
    assert sizes(1) == [(2, False), (2, True), (2, True)]


def test_evaluation_sees_every_item_once_and_nothing_else() -> None:
    for num_items, size, world_size in ((10, 8, 4), (9, 5, 1), (9, 5, 2), (512, 32, 2), (3, 8, 4)):
        loaders = [
            ShardLoader(numbers(num_items), global_batch_size=size, world=world(rank, world_size))
            for rank in range(world_size)
        ]
        assert sorted(flat([flat(taken(loader)) for loader in loaders])) == list(range(num_items))


def test_a_dropped_tail_leaves_the_full_batches_whole() -> None:
    loaders = [
        ShardLoader(numbers(9), global_batch_size=5, tail="drop", world=world(rank, 2)) for rank in range(2)
    ]
    assert sorted(flat([flat(taken(loader)) for loader in loaders])) == [0, 1, 2, 3, 4]


def test_a_rank_without_samples_joins_a_training_step_with_a_stand_in() -> None:
    loader = ShardLoader(numbers(5), global_batch_size=4, shuffle=True, world=world(2, 3))
    first = ShardLoader(numbers(5), global_batch_size=4, shuffle=True, world=world(0, 3))
    *_, ((batch,), (other,)) = zip(loader, first, strict=True)
    assert batch.tolist() == other.tolist()  # the step's first sample
    assert (loader.local_count, loader.step_local_count, loader.global_count) == (0, 0, 1)
    assert loader.positions.tolist() == []
    assert len(loader) == 2


def test_a_loader_becomes_one_of_training_when_it_is_told() -> None:
    loader = ShardLoader(numbers(5), global_batch_size=4, world=world(2, 3))
    assert (len(loader), len(taken(loader))) == (1, 1)
    loader.training = True
    assert (len(loader), len(taken(loader))) == (2, 2)


def test_every_pass_is_the_next_epoch_without_set_epoch() -> None:
    loaders = [
        ShardLoader(numbers(22), global_batch_size=5, shuffle=True, world=world(rank, 2)) for rank in range(2)
    ]
    first, second = ([flat(taken(loader)) for loader in loaders] for _ in range(2))
    assert first != second
    for parts in (first, second):
        assert sorted(parts[0] + parts[1]) == list(range(22))


def test_running_an_epoch_again_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loader = ShardLoader(numbers(22), global_batch_size=5, shuffle=True, world=world())
    orders = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        orders.append(taken(loader))
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        loader.set_epoch(1)
    assert "epoch 1 is about to run again" in caplog.text
    assert taken(loader) == orders[1] != orders[0]


def test_progress_counts_what_was_delivered() -> None:
    loader = ShardLoader(numbers(10), global_batch_size=4, shuffle=True, world=world())
    assert loader.progress == Progress()
    for _ in range(2):
        before = loader.progress
        for step, _ in enumerate(loader, start=1):
            assert loader.progress == Progress(before.epoch, step, before.step + step)
    assert loader.progress == Progress(2, 0, 6)


def test_progress_moves_on_with_the_last_micro_batch_of_a_step() -> None:
    loader = ShardLoader(numbers(8), global_batch_size=4, micro_batch_size=2, shuffle=True, world=world())
    assert [loader.progress.step for _ in loader] == [0, 1, 1, 2]


def test_leaving_a_pass_early_makes_the_next_one_the_next_epoch(caplog: pytest.LogCaptureFixture) -> None:
    loader = ShardLoader(numbers(40), global_batch_size=4, shuffle=True, world=world())
    other = ShardLoader(numbers(40), global_batch_size=4, shuffle=True, world=world())
    orders = [taken(other) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        assert taken(loader, 3) == orders[0][:3]
        assert taken(loader) == orders[1]
    assert "left after 3 of 10 steps" in caplog.text
    assert loader.progress == Progress(2, 0, 13)
    caplog.clear()
    for _ in range(2):  # said once; and a pass left after its last step has missed nothing
        assert len(taken(loader, 10)) == 10
    assert loader.progress == Progress(3, 10, 33)
    assert caplog.text == ""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pass_that_was_overtaken_ends_with_a_word_and_takes_nothing_from_the_next(num_workers: int) -> None:
    def make(workers: int) -> ShardLoader:
        return ShardLoader(numbers(40), global_batch_size=4, shuffle=True, num_workers=workers, world=world())

    reference = make(0)
    epochs = [taken(reference) for _ in range(2)]
    loader = make(num_workers)
    old = iter(loader)
    assert next(old)[0].tolist() == epochs[0][0]
    new = iter(loader)
    assert next(new)[0].tolist() == epochs[1][0]
    with pytest.raises(RuntimeError, match="has ended"):
        next(old)
    assert [batch[0].tolist() for batch in new] == epochs[1][1:]


def test_steps_skipped_by_the_engine_stay_counted() -> None:
    loader = ShardLoader(numbers(12), global_batch_size=4, shuffle=True, world=world())
    for number, _ in enumerate(loader):
        if number == 1:
            loader.progress = Progress(0, 2, 2, skipped=1)
    assert loader.progress == Progress(1, 0, 3, skipped=1)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "named"),
    [
        (numbers(8), {"batch_size": 4}, "global_batch_size=4 .*micro_batch_size=4"),
        (numbers(8), {}, "no batch size"),
        (numbers(8), {"global_batch_size": 0}, "global_batch_size=0"),
        (numbers(8), {"micro_batch_size": 1.5}, "micro_batch_size=1.5"),
        (numbers(8), {"global_batch_size": 4, "drop_last": True}, 'tail="drop"'),
        (numbers(8), {"global_batch_size": 4, "batch_sampler": [[0]]}, "batch_sampler"),
        (numbers(8), {"global_batch_size": 4, "generator": torch.Generator()}, "seed=generator.initial_seed"),
        (numbers(8), {"global_batch_size": 4, "in_order": False}, "in_order=False"),
        (numbers(8), {"global_batch_size": 4, "seed": None}, "seed=None"),
        (numbers(8), {"global_batch_size": 4, "tail": "wrap"}, "tail='wrap'"),
        (numbers(8), {"global_batch_size": 9, "tail": "drop"}, "no step"),
        (numbers(0), {"global_batch_size": 9, "shuffle": True}, "no step"),
        (
            numbers(8),
            {"global_batch_size": 4, "shuffle": True, "sampler": RandomSampler(range(8))},
            "both say",
        ),
        (numbers(8), {"global_batch_size": 4, "sampler": iter([1])}, "no __len__"),
        (Endless(), {"global_batch_size": 4}, "shard_iterable"),
        (NoLength(), {"global_batch_size": 4}, "no __len__"),
    ],
)
def test_bad_arguments_are_named(dataset: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){named}"):
        ShardLoader(dataset, world=world(0, 2), **options)


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(TypeError, match="'num_worker': 'num_workers'"):
        ShardLoader(numbers(8), global_batch_size=4, num_worker=2, world=world())


def test_an_empty_evaluation_set_is_no_error() -> None:
    loader = ShardLoader(numbers(0), global_batch_size=4, world=world())
    assert (len(loader), list(loader)) == (0, [])


def test_a_batch_smaller_than_the_world_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ShardLoader(numbers(8), global_batch_size=2, shuffle=True, world=world(0, 3))
    assert "less than the 3 ranks" in caplog.text


@pytest.mark.parametrize("progress", [{"epoch": 0}, Progress(0, 99, 99).to_dict()])
def test_states_that_are_no_place_are_refused(progress: dict[str, int]) -> None:
    loader = ShardLoader(numbers(8), global_batch_size=4, world=world())
    with pytest.raises(ValueError, match=r"lacks|stands at step 99"):
        loader.load_state_dict({**loader.state_dict(), "progress": progress})


def _split(rank: int, world_size: int) -> str:
    torch.manual_seed(rank)  # as on ranks whose generators were never seeded alike
    train, _ = random_split(numbers(40), [30, 10])
    with pytest.raises(ValueError) as caught:
        ShardLoader(train, global_batch_size=4, shuffle=True)
    seeded, _ = random_split(numbers(40), [30, 10], generator=torch.Generator().manual_seed(0))
    ShardLoader(seeded, global_batch_size=4, shuffle=True)
    with pytest.raises(ValueError, match="another seed than rank 0"):
        ShardLoader(seeded, global_batch_size=4, shuffle=True, seed=rank)
    with pytest.raises(ValueError, match="another global_batch_size than rank 0"):
        ShardLoader(seeded, global_batch_size=4 + rank, shuffle=True)
    return str(caught.value)


def test_ranks_with_different_splits_or_settings_all_hear_of_it(run_ranks: Any) -> None:
    messages = run_ranks(_split, world_size=3)
    assert len(set(messages)) == 1
    assert "ranks 1, 2 hold other indices than rank 0" in messages[0]
    assert "unseeded random_split?" in messages[0]
    assert "Fix: the same split on every rank" in messages[0]


def test_the_same_loop_over_a_plain_dataloader_has_no_shares() -> None:
    """What the loader is for: torch's, built on each rank without a sampler, gives everything to each."""
    assert len(DataLoader(numbers(40), batch_size=4)) == 10
    assert [len(ShardLoader(numbers(40), micro_batch_size=4, world=world(rank, 2))) for rank in range(2)] == [
        5,
        5,
    ]

"""ShardLoader: a rank's share of every step, whatever the ranks, workers and restarts."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from phalanx.dist.batches import draws_no_random_numbers, fetches_whole_batches
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.plan import Plan, Progress, Tail
from phalanx.dist.samplers import ShardSampler
from phalanx.dist.transfer import to_device
from phalanx.dist.world import World

TAILS: list[Tail] = ["uneven", "drop", "pad"]


def world(rank: int = 0, world_size: int = 1) -> World:
    """A made-up place among ranks that do not exist."""
    return World(
        rank=rank,
        local_rank=rank,
        node_rank=0,
        world_size=world_size,
        local_world_size=world_size,
        device=torch.device("cpu"),
        backend=None,
        source="single",
    )


class Augmented(Dataset[Any]):
    """Each sample comes with numbers drawn from all three generators."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def numbers(num_items: int) -> TensorDataset:
    return TensorDataset(torch.arange(num_items))


def taken(loader: ShardLoader, batches: int | None = None) -> list[list[int]]:
    """The indices of each batch of a pass, real samples alone."""
    return [batch[0][: loader.local_count].tolist() for batch in itertools.islice(loader, batches)]


def rows(loader: ShardLoader, batches: int | None = None) -> list[tuple[float, ...]]:
    """The samples of a pass with the random numbers they came with."""
    return [
        row
        for batch in itertools.islice(loader, batches)
        for row in zip(*(part[: loader.local_count].tolist() for part in batch), strict=True)
    ]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


# Shares


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
    dataset = range(num_items)
    alone = ShardLoader(dataset, global_batch_size=20, shuffle=True, seed=4, world=world(), collate_fn=list)  # type: ignore[arg-type]
    shared = [
        ShardLoader(
            dataset, global_batch_size=20, shuffle=True, seed=4, world=world(rank, 3), collate_fn=list
        )  # type: ignore[arg-type]
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


# Passes and progress


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


def test_a_pass_that_was_overtaken_ends_with_a_word() -> None:
    loader = ShardLoader(numbers(40), global_batch_size=4, shuffle=True, world=world())
    old = iter(loader)
    next(old)
    new = iter(loader)
    assert next(new)
    with pytest.raises(RuntimeError, match="has ended"):
        next(old)
    assert len(list(new)) == 9


def test_steps_skipped_by_the_engine_stay_counted() -> None:
    loader = ShardLoader(numbers(12), global_batch_size=4, shuffle=True, world=world())
    for number, _ in enumerate(loader):
        if number == 1:
            loader.progress = Progress(0, 2, 2, skipped=1)
    assert loader.progress == Progress(1, 0, 3, skipped=1)


# Resuming


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_goes_on_where_it_was_delivered_to(num_workers: int) -> None:
    """Workers draw ahead; what they drew and the loop has not seen comes again, with the same numbers."""

    def make(workers: int) -> ShardLoader:
        return ShardLoader(
            Augmented(64), global_batch_size=6, shuffle=True, num_workers=workers, world=world()
        )

    uninterrupted = make(0)
    epochs = [rows(uninterrupted) for _ in range(3)]
    loader = make(num_workers)
    seen = rows(loader, 4)
    state = loader.state_dict()
    assert state["progress"] == {"epoch": 0, "step_in_epoch": 4, "step": 4, "skipped": 0}
    del loader
    resumed = make(2 - num_workers)
    resumed.load_state_dict(state)
    assert seen + rows(resumed) == epochs[0]
    assert [rows(resumed) for _ in range(2)] == epochs[1:]


@pytest.mark.parametrize("call_set_epoch", [False, True])
def test_a_pass_stopped_in_a_later_epoch_resumes_in_that_epoch(call_set_epoch: bool) -> None:
    loader = ShardLoader(numbers(50), global_batch_size=5, shuffle=True, world=world())
    epochs = [taken(loader) for _ in range(5)]
    loader.set_epoch(3)
    taken(loader, 4)
    resumed = ShardLoader(numbers(50), global_batch_size=5, shuffle=True, world=world())
    resumed.load_state_dict(loader.state_dict())
    if call_set_epoch:
        resumed.set_epoch(3)
    assert taken(resumed) == epochs[3][4:]
    assert taken(resumed) == epochs[4]


def test_a_state_taken_at_an_epochs_last_step_leaves_an_empty_rest() -> None:
    loader = ShardLoader(numbers(12), global_batch_size=4, shuffle=True, world=world())
    states = [loader.state_dict() for _ in loader]
    resumed = ShardLoader(numbers(12), global_batch_size=4, shuffle=True, world=world())
    resumed.load_state_dict(states[-1])
    assert taken(resumed) == []
    assert resumed.progress == loader.progress == Progress(1, 0, 3)


def test_steps_of_the_run_go_on_counting_after_a_resume() -> None:
    loader = ShardLoader(numbers(250), global_batch_size=1, shuffle=True, world=world())
    state = {**loader.state_dict(), "progress": Progress(epoch=7, step=1750).to_dict()}
    loader.load_state_dict(state)
    assert len(taken(loader)) == 250
    assert loader.progress == Progress(epoch=8, step=2000)


def test_8_ranks_state_resumes_on_4_with_the_same_samples() -> None:
    def make(rank: int, world_size: int) -> ShardLoader:
        return ShardLoader(numbers(1280), global_batch_size=64, shuffle=True, world=world(rank, world_size))

    def step(loaders: list[ShardLoader]) -> list[int]:
        return sorted(flat([batch for loader in loaders for batch in taken(loader, 1)]))

    eight = [make(rank, 8) for rank in range(8)]
    for loader in eight:
        taken(loader, 10)
    states = [loader.state_dict() for loader in eight]
    assert all(state == states[0] for state in states)
    assert states[0]["progress"]["step_in_epoch"] == 10

    def resumed(world_size: int) -> list[ShardLoader]:
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            loader.load_state_dict(states[0])
        return loaders

    assert step(resumed(4)) == step(resumed(8)) == step(resumed(1))


def test_another_batch_size_resumes_within_an_epoch_when_it_divides_what_was_seen() -> None:
    loader = ShardLoader(numbers(640), global_batch_size=64, shuffle=True, world=world())
    order = flat(taken(loader))
    loader.set_epoch(0)
    taken(loader, 5)
    state = loader.state_dict()

    half = ShardLoader(numbers(640), micro_batch_size=8, shuffle=True, world=world(0, 4))  # 32 a step
    half.load_state_dict(state)
    assert half.progress == Progress(0, 10, 15)
    assert set(taken(half, 1)[0]) <= set(order[320:352])
    with pytest.raises(ValueError, match="320 samples into epoch 0") as caught:
        ShardLoader(numbers(640), global_batch_size=50, shuffle=True, world=world()).load_state_dict(state)
    assert "Fix: global_batch_size=64" in str(caught.value)


@pytest.mark.parametrize(
    ("num_items", "options", "named"),
    [(640, {"seed": 1}, "seed .0 then, 1 now"), (641, {}, "num_items"), (640, {"tail": "pad"}, "tail")],
)
def test_within_an_epoch_other_data_or_order_is_refused(
    num_items: int, options: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ShardLoader(numbers(640), global_batch_size=64, shuffle=True, world=world())
    at_start = loader.state_dict()
    taken(loader, 5)
    other = ShardLoader(numbers(num_items), global_batch_size=64, shuffle=True, world=world(), **options)
    with pytest.raises(ValueError, match=named):
        other.load_state_dict(loader.state_dict())
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(at_start)  # between epochs it is the user's choice, and said
    assert named.split()[0] in caplog.text


# Randomness


def test_samples_draw_the_same_numbers_on_any_number_of_ranks_and_workers() -> None:
    def all_rows(world_size: int, workers: int, size: int = 6) -> list[tuple[float, ...]]:
        found = []
        for rank in range(world_size):
            loader = ShardLoader(
                Augmented(20),
                global_batch_size=size,
                shuffle=True,
                num_workers=workers,
                world=world(rank, world_size),
            )
            found += rows(loader)
        return sorted(found)

    expected = all_rows(1, 0)
    assert len({row[1:] for row in expected}) == 20
    assert all_rows(3, 0) == expected
    assert all_rows(2, 2) == expected
    assert all_rows(1, 0, size=7) == expected


def test_a_subset_is_fetched_sample_by_sample() -> None:
    """torch's Subset passes whole batches on; a random_split's samples have keys of their own all the same."""
    subset = Subset(Augmented(20), range(20))
    loader = ShardLoader(Augmented(20), global_batch_size=6, shuffle=True, world=world())
    split = ShardLoader(subset, global_batch_size=6, shuffle=True, world=world())
    assert rows(loader) == rows(split)


class WholeBatches(Dataset[Any]):
    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        raise AssertionError("fetched one by one")

    def __getitems__(self, indices: list[int]) -> list[float]:
        self.calls.append(indices)
        return torch.rand(len(indices)).tolist()


def test_a_dataset_that_fetches_whole_batches_gets_one_call_for_each() -> None:
    dataset = WholeBatches()
    loader = ShardLoader(dataset, global_batch_size=4, world=world())
    first = [batch.tolist() for batch in loader]
    assert dataset.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    loader.set_epoch(0)
    torch.rand(1)
    assert [batch.tolist() for batch in loader] == first


def test_which_datasets_fetch_batches_or_draw_nothing() -> None:
    assert fetches_whole_batches(WholeBatches())
    assert fetches_whole_batches(Subset(WholeBatches(), [0]))
    assert not fetches_whole_batches(Subset(Augmented(4), [0]))
    assert not fetches_whole_batches(numbers(4))
    assert draws_no_random_numbers(Subset(numbers(4), [0]) + numbers(3))
    assert not draws_no_random_numbers(Augmented(4))
    assert not draws_no_random_numbers(numbers(4) + Augmented(3))


def _noisy(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([sample[0] for sample in samples]), torch.rand(2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_function_draws_the_same_numbers_again(num_workers: int) -> None:
    def noise(workers: int, skip: int) -> list[list[float]]:
        loader = ShardLoader(
            numbers(10),
            global_batch_size=4,
            shuffle=True,
            collate_fn=_noisy,
            num_workers=workers,
            world=world(),
        )
        state = {**loader.state_dict(), "progress": Progress(step_in_epoch=skip, step=skip).to_dict()}
        loader.load_state_dict(state)
        return [batch[1].tolist() for batch in loader]

    whole = noise(0, 0)
    assert len({tuple(found) for found in whole}) == 3
    assert noise(num_workers, 1) == whole[1:]


def test_the_loop_of_a_training_step_starts_from_its_key() -> None:
    def draws(skip: int = 0) -> list[tuple[int, float, float, float]]:
        loader = ShardLoader(
            Augmented(10), global_batch_size=4, micro_batch_size=2, shuffle=True, world=world(1, 2)
        )
        loader.load_state_dict(
            {**loader.state_dict(), "progress": Progress(step_in_epoch=skip, step=skip).to_dict()}
        )
        return [(loader.key, torch.rand(()).item(), float(np.random.rand()), random.random()) for _ in loader]

    whole = draws()
    assert len(set(whole)) == 3
    assert draws(1) == whole[1:]
    assert whole[0][0] == Plan(10, 4, 2).key(0, 0, 1, "loop")


def test_micro_batches_of_a_step_have_keys_of_their_own() -> None:
    loader = ShardLoader(numbers(8), global_batch_size=8, micro_batch_size=2, shuffle=True, world=world())
    assert len({loader.key for _ in loader}) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluation_leaves_the_generators_alone(num_workers: int) -> None:
    loader = ShardLoader(
        Augmented(10), global_batch_size=4, num_workers=num_workers, collate_fn=_plain, world=world()
    )
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    drawn = rows(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert len({row[1:] for row in drawn}) == 10


def _plain(samples: list[Any]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*samples, strict=True)]


class WorkerReport(Dataset[Any]):
    """Returns what its worker drew when it started."""

    drawn: list[float]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, list[float]]:
        info = get_worker_info()
        assert info is not None
        return info.id, self.drawn


def _draw_at_start(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, WorkerReport)  # the user's dataset, as with a plain DataLoader
    info.dataset.drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_workers_of_all_ranks_are_seeded_apart_and_alike_again() -> None:
    def starts() -> list[tuple[int, tuple[float, ...]]]:
        found = set()
        for rank in range(2):
            loader = ShardLoader(
                WorkerReport(),
                global_batch_size=4,
                micro_batch_size=1,
                num_workers=2,
                worker_init_fn=_draw_at_start,
                collate_fn=list,
                world=world(rank, 2),
            )
            found |= {(rank * 2 + worker, tuple(drawn)) for batch in loader for worker, drawn in batch}
        return sorted(found)

    first = starts()
    assert [name for name, _ in first] == [0, 1, 2, 3]
    for generator in range(3):
        assert len({drawn[generator] for _, drawn in first}) == 4
    assert starts() == first


class WorkerName(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        import os

        return os.getpid()


@pytest.mark.parametrize(("options", "kept"), [({}, True), ({"persistent_workers": False}, False)])
def test_workers_stay_for_the_next_epoch(options: dict[str, Any], kept: bool) -> None:
    loader = ShardLoader(WorkerName(), global_batch_size=4, num_workers=1, world=world(), **options)
    pids = [set(batch.tolist()) for _ in range(2) for batch in loader]
    assert (pids[0] == pids[1]) is kept


def test_workers_end_with_their_loader() -> None:
    import psutil

    loader = ShardLoader(WorkerName(), global_batch_size=4, num_workers=1, world=world())
    (batch,) = loader
    worker = psutil.Process(int(batch[0]))
    del loader
    worker.wait(timeout=10)
    assert not worker.is_running()


# Samplers of the user's


class FromGlobalGenerators(Sampler[int]):
    """Draws from all three generators, as user code does."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.num_items).numpy()
        np.random.shuffle(order)
        mixed = order.tolist()
        random.shuffle(mixed)
        return iter(mixed)


@pytest.mark.parametrize(
    "make",
    [
        FromGlobalGenerators,
        lambda num_items: RandomSampler(range(num_items)),
        lambda num_items: RandomSampler(range(num_items), generator=torch.Generator()),
    ],
    ids=["global", "random", "own-generator"],
)
def test_a_sampler_is_drawn_once_for_all_ranks_whatever_their_seeds(make: Any) -> None:
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = ShardLoader(numbers(8), global_batch_size=4, sampler=make(8), seed=3, world=world(rank, 2))
        state = torch.get_rng_state()
        passes = []
        for _ in range(2):
            torch.set_rng_state(state)
            passes.append(flat(taken(loader)))
        parts.append(passes)
    for epoch in range(2):
        assert sorted(parts[0][epoch] + parts[1][epoch]) == list(range(8))
    assert parts[0][0] != parts[0][1]


def test_drawing_from_a_sampler_leaves_every_generator_as_it_was() -> None:
    own = torch.Generator()
    states = torch.get_rng_state(), random.getstate(), own.get_state()
    loader = ShardLoader(
        numbers(8), global_batch_size=4, sampler=RandomSampler(range(8), generator=own), world=world()
    )
    loader.training = False
    taken(loader)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(own.get_state(), states[2])


def test_weighted_draws_are_shared_without_padding() -> None:
    weights = [0.1] * 90 + [0.9] * 10

    def draws(world_size: int) -> list[list[int]]:
        return [
            flat(
                taken(
                    ShardLoader(
                        numbers(100),
                        global_batch_size=100,
                        sampler=WeightedRandomSampler(weights, 100),
                        world=world(rank, world_size),
                    )
                )
            )
            for rank in range(world_size)
        ]

    (alone,), shared = draws(1), draws(8)
    assert [len(part) for part in shared] == [13, 13, 13, 13, 12, 12, 12, 12]
    dealt = [index for row in itertools.zip_longest(*shared) for index in row if index is not None]
    assert dealt == alone


def test_a_sampler_resumes_within_its_order() -> None:
    def make() -> ShardLoader:
        return ShardLoader(numbers(20), global_batch_size=4, sampler=FromGlobalGenerators(20), world=world())

    whole = make()
    epochs = [taken(whole) for _ in range(2)]
    loader = make()
    taken(loader)
    seen = taken(loader, 2)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert seen + taken(resumed) == epochs[1]


def test_a_sampler_makes_a_training_loader_unless_it_is_sequential() -> None:
    for sampler, training in ((FromGlobalGenerators(8), True), (SequentialSampler(range(8)), False)):
        assert (
            ShardLoader(numbers(8), global_batch_size=4, sampler=sampler, world=world()).training is training
        )


class Inexact(FromGlobalGenerators):
    def __len__(self) -> int:
        return self.num_items + 1


def test_a_sampler_whose_length_is_not_exact_is_refused() -> None:
    loader = ShardLoader(numbers(8), global_batch_size=4, sampler=Inexact(8), world=world())
    with pytest.raises(ValueError, match="gave 8 indices in epoch 0 and has a length of 9"):
        taken(loader)


class Wrapped(Sampler[int]):
    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DistributedSampler(range(64), num_replicas=4, rank=0),  # type: ignore[arg-type]
        lambda: ShardSampler(64, 0, 4),
        lambda: Wrapped(DistributedSampler(range(64), num_replicas=4, rank=0)),  # type: ignore[arg-type]
    ],
    ids=["torch's", "ours", "wrapped"],
)
def test_a_sampler_that_is_a_share_already_is_not_shared_again(make: Any) -> None:
    with pytest.raises(ValueError, match="one rank's share already") as caught:
        ShardLoader(numbers(64), global_batch_size=16, sampler=make(), world=world(0, 4))
    assert "shuffle=True" in str(caught.value)


# Devices


def test_batches_on_the_cpu_are_not_copied() -> None:
    kept: list[torch.Tensor] = []

    def collate(samples: list[Any]) -> torch.Tensor:
        kept.append(torch.stack([sample[0] for sample in samples]))
        return kept[-1]

    loader = ShardLoader(numbers(8), global_batch_size=4, collate_fn=collate, world=world())
    assert all(batch is kept[-1] for batch in loader)


def test_moving_keeps_the_kind_of_every_container() -> None:
    from collections import OrderedDict, namedtuple

    point = namedtuple("point", "x y")
    batch = {
        "a": [torch.ones(2), "text", 3],
        "b": point(torch.ones(1), None),
        "c": OrderedDict(d=(torch.ones(1),)),
    }
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1:] == ["text", 3]
    assert type(moved["b"]) is point
    assert moved["b"].x.device.type == "meta"
    assert type(moved["c"]) is OrderedDict
    assert moved["c"]["d"][0].device.type == "meta"
    assert batch["a"][0].device.type == "cpu"  # type: ignore[index,union-attr]


def test_batches_are_moved_to_the_loaders_device() -> None:
    loader = ShardLoader(numbers(8), global_batch_size=4, pin_memory=False, world=world())
    loader.device = torch.device("meta")
    assert [batch[0].device.type for batch in loader] == ["meta", "meta"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_cuda_are_those_of_the_cpu(num_workers: int) -> None:
    dataset = TensorDataset(torch.randn(1000, 512))
    here = ShardLoader(dataset, global_batch_size=64, shuffle=True, world=world())
    there = ShardLoader(dataset, global_batch_size=64, shuffle=True, num_workers=num_workers, world=world())
    there.device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(2):
        for (a,), (b,) in zip(here, there, strict=True):
            assert b.is_cuda
            torch.cuda._sleep(1_000_000)  # later copies must not reach into a batch in use
            assert torch.equal(a, (b * 1).cpu())
            assert here.progress == there.progress


# Bad input


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
        (Endless(), {"global_batch_size": 4}, "islice"),
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


# Real ranks


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

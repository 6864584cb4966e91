"""What a sample draws depends on seed, epoch and position alone; workers are seeded apart."""

from __future__ import annotations

import os
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from phalanx.dist.batches import KeyedDataset, WorkerInit, draws_no_random_numbers, fetches_whole_batches
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.plan import Plan, Progress
from tests.dist.loading import Augmented, numbers, rows, world


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
    def draws(seed: int, skip: int = 0) -> list[tuple[int, float, float, float]]:
        loader = ShardLoader(
            numbers(10), global_batch_size=4, micro_batch_size=2, shuffle=True, world=world(1, 2)
        )
        loader.load_state_dict(
            {**loader.state_dict(), "progress": Progress(step_in_epoch=skip, step=skip).to_dict()}
        )
        torch.manual_seed(seed)  # wherever the generators stood before
        np.random.seed(seed)
        random.seed(seed)
        return [(loader.key, torch.rand(()).item(), float(np.random.rand()), random.random()) for _ in loader]

    whole = draws(0)
    assert len(set(whole)) == 3
    assert draws(1, skip=1) == whole[1:]
    assert whole[0][0] == Plan(10, 4, 2).key(0, 0, 1, "loop")


def test_an_item_drawn_twice_in_an_epoch_draws_other_numbers() -> None:
    sampler = WeightedRandomSampler([1.0, 0.0], 6)
    loader = ShardLoader(Augmented(2), global_batch_size=4, sampler=sampler, world=world())
    found = rows(loader)
    assert {row[0] for row in found} == {0}
    assert len({row[1:] for row in found}) == 6


def test_micro_batches_of_a_step_have_keys_of_their_own() -> None:
    loader = ShardLoader(numbers(8), global_batch_size=8, micro_batch_size=2, shuffle=True, world=world())
    assert len({loader.key for _ in loader}) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluation_leaves_the_generators_alone(num_workers: int) -> None:
    loader = ShardLoader(
        Augmented(10), global_batch_size=4, num_workers=num_workers, collate_fn=_plain, world=world()
    )
    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )
    drawn = rows(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before[2]
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


def test_what_goes_to_workers_can_be_pickled() -> None:
    """As the start methods forkserver and spawn do."""
    keyed = KeyedDataset(Augmented(8), Plan(8, 4, 1), own_collate=False)
    order = (1, [3, 0], [5, 2])
    assert pickle.loads(pickle.dumps(keyed)).__getitems__(order) == keyed.__getitems__(order)
    assert callable(pickle.loads(pickle.dumps(WorkerInit(_draw_at_start))))


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

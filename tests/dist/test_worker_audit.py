"""Workers, ranks and epochs that draw the same random numbers are named; those that draw apart are left alone."""

from __future__ import annotations

import functools
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from phalanx.dist.loaders import ShardLoader
from phalanx.dist.worker_audit import watch_workers
from phalanx.dist.world import init_world
from tests.ranks import RankRunner

_OF_THIS_MODULE = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)  # put back afterwards
    watch_workers()


class Samples(Dataset[Any]):
    """24 samples; fetching one draws by ``draw(self, index)``."""

    def __init__(self, draw: Callable[[Any, int], float]) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(0)
        self.odd = Odd() if draw is by_an_odd_one else None  # it cannot be pickled
        self.transforms = {"noise": [random.Random(0)]}
        # Only where it is asked for: torch's own cannot be sent to a spawned worker.
        self.generator = torch.Generator().manual_seed(0) if draw is by_own_torch else None

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        return self.draw(self, index)


def by_numpy(samples: Samples, index: int) -> float:
    return float(np.random.rand())


def by_torch(samples: Samples, index: int) -> float:
    return torch.rand(()).item()


def by_random(samples: Samples, index: int) -> float:
    return random.random()


def by_nothing(samples: Samples, index: int) -> float:
    return float(index)


def by_own_numpy(samples: Samples, index: int) -> float:
    return float(samples.rng.random())


def by_own_random(samples: Samples, index: int) -> float:
    return samples.transforms["noise"][0].random()


def by_own_torch(samples: Samples, index: int) -> float:
    return torch.rand((), generator=samples.generator).item()


def by_the_modules(samples: Samples, index: int) -> float:
    return float(_OF_THIS_MODULE.random())


def by_index(samples: Samples, index: int) -> float:
    """A generator of its own, reseeded for each sample: it is nobody's copy."""
    samples.transforms["noise"][0].seed(index)
    return samples.transforms["noise"][0].random()


def by_a_late_one(samples: Samples, index: int) -> float:
    """A generator made when it is first needed, in each worker with the same seed."""
    if samples.generator is None:
        samples.generator = random.Random(0)
    return samples.generator.random()


def by_an_odd_one(samples: Samples, index: int) -> float:
    return samples.odd.random()


class Odd(random.Random):
    def getstate(self) -> tuple[Any, ...]:
        raise NotImplementedError


def seed_alike(worker: int) -> None:
    np.random.seed(7)
    random.seed(7)
    torch.manual_seed(7)


def seed_apart(worker: int) -> None:
    np.random.seed(7 + worker)
    random.seed(7 + worker)
    torch.manual_seed(7 + worker)


def said(loader: Any, passes: int = 1) -> list[str]:
    """What the audit said in so many passes; torch warns of more workers than cores as well."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(passes):
            list(loader)
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if text.startswith(("DataLoader: ", "ShardLoader: "))]


@pytest.mark.parametrize(
    ("draw", "name"),
    [(by_numpy, "numpy's global"), (by_torch, "torch's global"), (by_random, "random's global")],
)
def test_workers_seeded_alike_are_named(draw: Any, name: str) -> None:
    loader = DataLoader(Samples(draw), batch_size=4, num_workers=3, worker_init_fn=seed_alike)
    (text,) = said(loader, passes=3)
    assert f"workers 0, 1, 2 draw the same random numbers from {name} generator" in text
    assert "worker_init_fn (seed_alike)" in text
    assert loader.worker_init_fn is seed_alike


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (by_own_numpy, "dataset.rng"),
        (by_own_random, "dataset.transforms['noise'][0]"),
        (by_own_torch, "dataset.generator"),
        (by_the_modules, "test_worker_audit._OF_THIS_MODULE"),
        (by_a_late_one, "dataset.generator"),
    ],
)
@pytest.mark.parametrize("kind", ["DataLoader", "ShardLoader"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_generator_copied_into_each_worker_is_named(
    draw: Any, name: str, kind: str, persistent: bool
) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
    loader = (
        DataLoader(Samples(draw), batch_size=4, **options)
        if kind == "DataLoader"
        else ShardLoader(Samples(draw), global_batch_size=4, shuffle=True, **options)
    )
    (text,) = said(loader, passes=2)
    assert text.startswith(f"{kind}: workers 0, 1 draw the same random numbers from ")
    assert f"{name}: each has a copy" in text
    assert ("which ShardLoader reseeds" in text) == (kind == "ShardLoader")


@pytest.mark.parametrize("draw", [by_numpy, by_torch, by_random, by_nothing, by_index, by_an_odd_one])
@pytest.mark.parametrize("seed", [None, seed_apart])
def test_workers_that_draw_apart_are_left_alone(draw: Any, seed: Any) -> None:
    assert said(DataLoader(Samples(draw), batch_size=4, num_workers=3, worker_init_fn=seed), passes=2) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("draw", [by_numpy, by_torch, by_random, by_nothing, by_index])
def test_a_shard_loader_reseeds_whatever_a_worker_init_fn_does(
    workers: int, shuffle: bool, draw: Any
) -> None:
    loader = ShardLoader(
        Samples(draw),
        global_batch_size=4,
        shuffle=shuffle,
        num_workers=workers,
        worker_init_fn=seed_alike,
        persistent_workers=False if workers else None,
    )
    first, second = list(loader), list(loader)
    if draw not in (by_nothing, by_index):
        values = torch.cat(first).tolist()
        assert len(set(values)) == 24
        assert not set(values) & set(torch.cat(second).tolist())
    assert said(loader) == []


@pytest.mark.parametrize(("draw", "seed"), [(by_own_numpy, None), (by_numpy, seed_apart)])
def test_epochs_with_the_same_numbers_are_named_where_a_loader_shuffles(draw: Any, seed: Any) -> None:
    def loader(**options: Any) -> DataLoader[Any]:
        return DataLoader(Samples(draw), batch_size=4, num_workers=1, worker_init_fn=seed, **options)

    (text,) = said(loader(shuffle=True), passes=4)
    assert "this epoch draws the same random numbers" in text
    assert "as the last one" in text
    assert said(loader(), passes=3) == [], "an evaluation may want the same noise each time"
    assert said(loader(shuffle=True, persistent_workers=True), passes=3) == []


def give_each_its_own(worker: int) -> None:
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


@pytest.mark.parametrize("kind", ["DataLoader", "ShardLoader"])
def test_generators_made_in_worker_init_fn_are_apart(kind: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "worker_init_fn": give_each_its_own}
    loader = (
        DataLoader(Samples(by_own_numpy), batch_size=4, shuffle=True, **options)
        if kind == "DataLoader"
        else ShardLoader(Samples(by_own_numpy), global_batch_size=4, shuffle=True, **options)
    )
    assert said(loader, passes=3) == []


class Unhashable(DataLoader[Any]):
    __hash__ = None  # type: ignore[assignment]


def test_a_loader_that_cannot_be_remembered_loads_all_the_same() -> None:
    loader = Unhashable(Samples(by_nothing), batch_size=4, num_workers=1)
    assert torch.cat(list(loader)).tolist() == list(range(24))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[float]:
        for _ in range(6):
            yield float(np.random.rand())


def test_streams_are_looked_at_as_well() -> None:
    assert said(DataLoader(Stream(), batch_size=2, num_workers=2)) == []
    (text,) = said(DataLoader(Stream(), batch_size=2, num_workers=2, worker_init_fn=seed_alike))
    assert "workers 0, 1 draw the same" in text


@pytest.mark.parametrize("context", ["spawn", "forkserver"])  # torch is imported anew: the slow ones
def test_spawned_workers_report_too(context: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": context}
    (text,) = said(DataLoader(Samples(by_own_random), **options))
    assert "dataset.transforms['noise'][0]" in text


def test_fewer_batches_than_workers_and_passes_that_are_left() -> None:
    loader = DataLoader(Samples(by_numpy), batch_size=12, num_workers=4, worker_init_fn=seed_alike)
    (text,) = said(loader)
    assert "workers 0, 1 draw" in text
    loader = DataLoader(Samples(by_numpy), batch_size=4, num_workers=2, worker_init_fn=seed_alike)
    for _ in loader:
        break
    (text,) = said(loader)
    assert "workers 0, 1 draw" in text


def noisy(batch: list[float], rng: random.Random) -> list[float]:
    return [value + rng.random() for value in batch]


def test_a_collate_functions_generator_is_found() -> None:
    collate = functools.partial(noisy, rng=random.Random(0))
    (text,) = said(DataLoader(Samples(by_nothing), batch_size=4, num_workers=2, collate_fn=collate))
    assert "collate_fn.keywords['rng']" in text


def test_a_dataset_that_raises_raises_as_without_the_audit() -> None:
    def fail(samples: Samples, index: int) -> float:
        raise KeyError(f"sample {index}")

    with pytest.raises(KeyError, match="sample 0"):
        list(DataLoader(Samples(fail), batch_size=4, num_workers=2))
    gc.collect()  # the exception's frames hold the pass, and with it the workers


Case = tuple[
    str, str, int, bool
]  # how samples are drawn, by which loader, its workers, whether ranks are seeded apart


def _on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[list[str]]:
    init_world()
    found = []
    for draw, kind, workers, apart in cases:
        seed = rank if apart else 0
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        samples = Samples(globals()[draw])
        samples.rng = np.random.default_rng(seed)
        options: dict[str, Any] = {"shuffle": True, "num_workers": workers}
        loader = (
            ShardLoader(samples, global_batch_size=4, **options)
            if kind == "ShardLoader"
            else DataLoader(samples, batch_size=4, **options)
        )
        found.append(said(loader, passes=2))
    return found


def test_ranks_seeded_alike_are_named(run_ranks: RankRunner) -> None:
    cases: list[Case] = [
        (draw, "DataLoader", workers, False)
        for draw in ("by_numpy", "by_torch", "by_random")
        for workers in (0, 2)
    ]
    cases += [("by_own_numpy", "ShardLoader", workers, False) for workers in (0, 1)]
    found = run_ranks(_on_ranks, cases, world_size=2)
    for (draw, kind, _, _), *texts in zip(cases, *found, strict=True):
        said_by = [rank for rank in range(2) if texts[rank]]
        assert len(said_by) == 1, (draw, kind, texts)
        (text,) = texts[said_by[0]]
        name = "dataset.rng" if draw == "by_own_numpy" else f"{draw[3:]}'s global generator"
        assert text.startswith(f"{kind}: rank {said_by[0]} draws the same random numbers from {name} as rank")
        assert ("seed_everything(seed + rank)" in text) == (kind == "DataLoader")


def test_ranks_that_draw_apart_are_left_alone(run_ranks: RankRunner) -> None:
    cases: list[Case] = [
        ("by_numpy", "DataLoader", 0, True),
        ("by_torch", "DataLoader", 2, True),
        ("by_own_numpy", "ShardLoader", 0, True),
        ("by_nothing", "DataLoader", 0, False),
        ("by_nothing", "DataLoader", 2, False),
        ("by_torch", "ShardLoader", 0, False),
        ("by_torch", "ShardLoader", 2, False),
    ]
    for texts in run_ranks(_on_ranks, cases, world_size=2):
        assert dict(zip(cases, texts, strict=True)) == {case: [] for case in cases}

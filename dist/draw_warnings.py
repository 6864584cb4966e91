"""In words: who draws the same random numbers as whom while samples are loaded, why, and what to do about it."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader

from phalanx.dist.batches import KeyedDataset
from phalanx.dist.random_streams import global_streams


def _name(loader: DataLoader[Any]) -> str:
    return "ShardLoader" if isinstance(loader.dataset, KeyedDataset) else "DataLoader"


def _is_global(name: str) -> bool:
    return name in [stream.name for stream in global_streams()]


def warn_of_workers(loader: DataLoader[Any], name: str, workers: list[int]) -> None:
    """Several workers of one loader have drawn the same numbers from the generator of this name."""
    numbers = ", ".join(map(str, workers))
    if _is_global(name):
        why = f"worker_init_fn ({_words(loader.worker_init_fn)}) seeds them alike"
        fix = "leave the seeding out, torch has seeded each worker apart; or seed with torch.initial_seed() % 2**32"
    else:
        why = "each has a copy of that generator"
        fix = _draw_elsewhere(loader)
    _warn(f"{_name(loader)}: workers {numbers} draw the same random numbers from {name}: {why}. Fix: {fix}")


def warn_of_passes(loader: DataLoader[Any], name: str) -> None:
    """An epoch has drawn the same numbers as the one before."""
    if _is_global(name):
        why = "whoever seeds the workers does so with the same seed for each epoch"
        fix = "leave the seeding of workers out: torch seeds them anew for each epoch"
    else:
        why = "each epoch's workers start with a copy of that generator as it stands in this process"
        fix = _draw_elsewhere(loader)
    _warn(
        f"{_name(loader)}: this epoch draws the same random numbers from {name} as the last one: {why}. Fix: {fix}"
    )


def warn_of_ranks(loader: DataLoader[Any], name: str, rank: int, other: int) -> None:
    """This rank has drawn the same numbers as another one."""
    if _is_global(name):
        fix = (
            "after the model is built, seed_everything(seed + rank) on each rank; or ShardLoader, which seeds each sample by "
            "its position"
        )
    else:
        fix = _draw_elsewhere(loader)
    _warn(
        f"{_name(loader)}: rank {rank} draws the same random numbers from {name} as rank {other}: they were seeded alike, and "
        f"change their samples in the same ways. Fix: {fix}"
    )


def _draw_elsewhere(loader: DataLoader[Any]) -> str:
    if isinstance(loader.dataset, KeyedDataset):
        return (
            "draw from the global generators (torch.rand, random.random, np.random.rand), which ShardLoader reseeds for each "
            "sample, whichever worker and rank fetches it"
        )
    return (
        "draw from the global generators (torch.rand, random.random, np.random.rand), or make the generator in worker_init_fn "
        "from torch.initial_seed()"
    )


def _words(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)

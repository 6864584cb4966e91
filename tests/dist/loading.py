"""Made-up worlds and data sets for tests of loaders."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    TensorDataset,
)

from phalanx.dist.loaders import ShardLoader
from phalanx.dist.world import World


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

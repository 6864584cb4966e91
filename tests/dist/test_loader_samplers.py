"""Samplers of the user's: one draw that all ranks share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from phalanx.dist.loaders import ShardLoader
from phalanx.dist.samplers import ShardSampler
from tests.dist.loading import flat, numbers, taken, world


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

"""The order of an epoch: of the keyed permutation, or drawn from a sampler that knows nothing of ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from phalanx.dist.audits import hash_values
from phalanx.dist.epochs import nested_parts, set_epoch
from phalanx.dist.keys import derive_key, generator_states, reseed, restore_generator_states
from phalanx.dist.loader_options import knows_whole_epochs
from phalanx.dist.permutation import Indices
from phalanx.dist.plan import Plan

_COMPARED = 4096  # positions of an order that ranks compare, where it is computed piece by piece


class EpochOrders:
    """Dataset indices by position within an epoch, the same on every rank.

    Args:
        plan: Gives the order where there is no sampler, and the seed where there is one.
        sampler: One of ours that knows the whole epoch (``indices_at``), which is asked under its own
            seed. Or a torch Sampler with an exact length; drawn whole, once an epoch, see `draw_elements`.
    """

    def __init__(self, plan: Plan, sampler: Any = None) -> None:
        self._plan = plan
        self._sampler = sampler
        self._drawn: tuple[int, list[Any]] | None = None

    def indices(self, epoch: int, positions: Indices) -> list[Any]:
        """The dataset indices at these positions of an epoch."""
        if self._sampler is None:
            indices: list[Any] = self._plan.order(epoch, positions).tolist()
            return indices
        if knows_whole_epochs(self._sampler):
            found: list[Any] = self._sampler.indices_at(epoch, positions).tolist()
            return found
        drawn = self.draw(epoch)
        return [drawn[position] for position in positions.tolist()]

    def fingerprint(self) -> str:
        """A hash of the first epoch's order, equal on ranks that were given the same sampler."""
        if self._sampler is not None and not knows_whole_epochs(self._sampler):
            return hash_values(self.draw(0))
        spread = np.linspace(0, self._plan.num_items - 1, min(self._plan.num_items, _COMPARED))
        return hash_values(self.indices(0, spread.astype(np.int64)))

    def draw(self, epoch: int) -> list[Any]:
        """The sampler's whole order of an epoch; the last one is kept.

        Raises:
            ValueError: The sampler gives more or fewer indices than its length.
        """
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._draw(epoch)
        return self._drawn[1]

    def _draw(self, epoch: int) -> list[Any]:
        drawn = list(draw_elements(self._sampler, self._plan.seed or 0, epoch))
        if len(drawn) != self._plan.num_items:
            raise ValueError(
                f"sampler={type(self._sampler).__name__} gave {len(drawn)} indices in epoch {epoch} and has a length "
                f"of {self._plan.num_items}: the ranks' steps would not match.\nFix: a __len__ that is exact"
            )
        return drawn


def draw_elements(sampler: Iterable[Any], seed: int, epoch: int, limit: int | None = None) -> list[Any]:
    """What a sampler or batch sampler yields in an epoch, the same in every process.

    It is told the epoch, with everything inside it, and drawn while the global generators and those
    that it holds (torch's, numpy's or random's, as attributes at any depth) stand at a key of (seed,
    epoch); all are put back afterwards.

    >>> from torch.utils.data import RandomSampler
    >>> draw_elements(RandomSampler(range(8)), seed=0, epoch=1) == draw_elements(RandomSampler(range(8)), 0, 1)
    True

    Args:
        sampler: Whatever can be iterated.
        seed: The same on every rank.
        epoch: From 0.
        limit: Take no more elements than that.
    """
    set_epoch(sampler, epoch)
    key = derive_key(seed, epoch, "sampler")
    states = generator_states()
    try:
        reseed(key, cuda=False)
        with _own_generators(sampler, key):
            return list(itertools.islice(sampler, limit))
    finally:
        restore_generator_states(states)


@contextmanager
def _own_generators(sampler: Any, key: int) -> Iterator[None]:
    """The generators that a sampler holds stand at ``key`` inside, and where they were afterwards."""
    undo: list[tuple[Any, Any]] = []
    for part in nested_parts(sampler, datasets=False):
        for value in list(getattr(part, "__dict__", {}).values()):
            if isinstance(value, torch.Generator):
                undo.append((value.set_state, value.get_state()))
                value.manual_seed(key)
            elif isinstance(value, np.random.Generator):
                kind = type(value.bit_generator)
                undo.append((_numpy_setter(value.bit_generator), value.bit_generator.state))
                value.bit_generator.state = kind(key).state
            elif isinstance(value, np.random.RandomState):
                undo.append((value.set_state, value.get_state()))
                value.seed(key >> 31)
            elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
                undo.append((value.setstate, value.getstate()))
                value.seed(key)
    try:
        yield
    finally:
        for put_back, state in undo:
            put_back(state)


def _numpy_setter(bit_generator: Any) -> Any:
    return lambda state: setattr(bit_generator, "state", state)

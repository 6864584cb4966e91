"""The order of an epoch: of the keyed permutation, or drawn from a sampler that knows nothing of ranks."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.dist.keys import derive_key, generator_states, reseed, restore_generator_states
from phalanx.dist.permutation import Indices
from phalanx.dist.plan import Plan


class EpochOrders:
    """Dataset indices by position within an epoch, the same on every rank.

    Args:
        plan: Gives the order where there is no sampler, and the seed where there is one.
        sampler: A torch Sampler with an exact length; drawn whole, once an epoch, under a seed of
            (seed, epoch) for the global generators and for its own ``generator``, all of which are put
            back afterwards.
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
        drawn = self.draw(epoch)
        return [drawn[position] for position in positions.tolist()]

    def draw(self, epoch: int) -> list[Any]:
        """The sampler's whole order of an epoch; the last one is kept.

        Raises:
            ValueError: The sampler gives more or fewer indices than its length.
        """
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._draw(epoch)
        return self._drawn[1]

    def _draw(self, epoch: int) -> list[Any]:
        sampler, key = self._sampler, derive_key(self._plan.seed or 0, epoch, "sampler")
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        own = getattr(sampler, "generator", None)
        if not isinstance(own, torch.Generator):
            own = torch.Generator()
        own_state, states = own.get_state(), generator_states()
        try:
            reseed(key, cuda=False)
            own.manual_seed(key)
            drawn = list(sampler)
        finally:
            restore_generator_states(states)
            own.set_state(own_state)
        if len(drawn) != self._plan.num_items:
            raise ValueError(
                f"sampler={type(sampler).__name__} gave {len(drawn)} indices in epoch {epoch} and has a length of "
                f"{self._plan.num_items}: the ranks' steps would not match.\nFix: a __len__ that is exact"
            )
        return drawn

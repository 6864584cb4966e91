"""Hidden states that belong to streams of text, not to ranks: kept, handed on, and put into checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.dist import all_reduce_sum
from phalanx.dist.steps import StepLoader


class StreamStates:
    """The state of every stream after what was read of it; a rank knows those of the streams it reads.

    Made for a loader over `phalanx.recipes.texts.Streams`: position p of an epoch is the next segment of stream
    p % streams. At an epoch's beginning the streams begin anew. ::

        state = states.before(loader)
        outputs, state = model(x, state)
        states.after(loader, state)
        ...
        checkpoints.maybe_save(states=states.gathered)

    Args:
        streams: How many there are.
        shape: Of one stream's state.
        device: Where the model is.
    """

    def __init__(self, streams: int, shape: tuple[int, ...], device: torch.device) -> None:
        self._states = torch.zeros(streams, *shape, device=device)
        self._read_here = torch.zeros(streams, dtype=torch.bool, device=device)

    def before(self, loader: StepLoader) -> Tensor:
        """The states that the batch which ``loader`` delivered last goes on from: [samples, *shape]."""
        rows, begins = self._rows(loader)
        if not loader.local_count:  # a stand-in, which weighs nothing and belongs to no stream
            return torch.zeros_like(self._states[:1])
        return self._states[rows].masked_fill(begins.view(-1, *[1] * (self._states.dim() - 1)), 0.0)

    def after(self, loader: StepLoader, states: Tensor) -> None:
        """Keep the states after that batch, without the graph that made them."""
        if loader.local_count:
            rows, _ = self._rows(loader)
            self._states[rows] = states.detach().to(self._states.dtype)
            self._read_here[rows] = True

    def gathered(self) -> list[Any]:
        """All streams' states, for a checkpoint. Collective, at a step's end."""
        if not all_reduce_sum(self._read_here.any().double()).item():
            return list(self._states.tolist())  # nothing was read since `load`, and all ranks have the same
        mine = self._read_here.view(-1, *[1] * (self._states.dim() - 1))
        return list(all_reduce_sum(self._states * mine).tolist())

    def load(self, states: list[Any] | None) -> None:
        """What `gathered` gave, on any number of ranks; None leaves zeros."""
        if states is not None:
            self._states.copy_(torch.tensor(states))
            self._read_here.zero_()

    def _rows(self, loader: StepLoader) -> tuple[Tensor, Tensor]:
        """The streams of the batch, and which of them begin with it."""
        positions = torch.as_tensor([int(position) for position in loader.positions])
        positions = positions.to(self._states.device)
        return positions % len(self._states), positions < len(self._states)

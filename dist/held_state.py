"""State that a strategy keeps where neither the model nor its optimizer shows it, as ZeRO does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist.engines.engine import engine_of
from phalanx.dist.named_optimizer import NamedOptimizer, PlainOptimizer

#: Copies a saved value, or this rank's share of it, into a tensor that may be a `FlatPart`.
ReadInto = Callable[[Any, Tensor], None]


class HeldState(Protocol):
    """How a checkpoint reads and writes such state: by the names of the user's own module."""

    @property
    def sharded(self) -> bool:
        """Whether no rank has room for all of it: each then writes its parts, and nothing is gathered."""
        ...

    @property
    def optimizer(self) -> NamedOptimizer:
        """The optimizer's state."""
        ...

    def values(self) -> dict[str, Any]:
        """What the module's ``state_dict`` would be; of what is shared out, in fp32, this rank's part."""
        ...

    def load(self, state: Mapping[str, Any], read: ReadInto) -> None:
        """Replace parameters, given by the module's keys. Every rank must call it."""
        ...


def held_state(model: nn.Module) -> HeldState | None:
    """What the model's engine keeps elsewhere; None when model and optimizer have it all.

    Raises:
        ValueError: The model is a DeepSpeed engine that `parallelize` has not made: its parts cannot be named.
    """
    engine = engine_of(model)
    stage = getattr(model, "zero_optimization_stage", None)  # of DeepSpeed's own class
    if engine is None and stage is not None and stage() > 0:
        raise ValueError(
            "the model comes from deepspeed.initialize: which part of ZeRO's state is whose is not known.\n"
            "Fix: parallelize(model, optimizer, 'deepspeed', config=...) makes the same engine from the same config"
        )
    held: HeldState | None = getattr(engine, "held", None)
    return held


def named_optimizer(model: nn.Module, optimizer: Optimizer) -> NamedOptimizer:
    """The optimizer's state by parameter name.

    Raises:
        ValueError: As for `held_state`, or the optimizer is not the one that trains the model.
    """
    held = held_state(model)
    if held is None:
        return PlainOptimizer(optimizer, model)
    engine = engine_of(model)
    if engine is not None and optimizer is not engine.optimizer:
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__} that does not train this model: the state is elsewhere.\n"
            "Fix: pass the model and optimizer that parallelize() returned"
        )
    return held.optimizer

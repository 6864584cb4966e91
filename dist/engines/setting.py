"""What `parallelize` was asked for, as each engine's ``build`` reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.dist.engines.engine import CountingLoader, Engine
from phalanx.dist.engines.precision import Precision
from phalanx.dist.membership import World

DDP_OPTIONS = (
    "broadcast_buffers",
    "bucket_cap_mb",
    "compression",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class _Place(TypedDict):
    device: torch.device


class Common(_Place, total=False):
    """What every engine's constructor takes, see `SingleEngine`."""

    precision: Precision
    max_grad_norm: float | None
    loader: CountingLoader | None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The arguments that all engines share, and the options of one.

    Args:
        world: This rank's place.
        device: Where the model goes.
        precision: Of the forward.
        max_grad_norm: To clip to; None does not clip.
        loader: Tells how a step's samples are spread.
        virtual_ranks: How many share a step, see `VirtualEngine`; None for no such thing.
        options: Of this engine alone; each is in its ``OPTIONS``.
    """

    world: World
    device: torch.device
    precision: Precision = "fp32"
    max_grad_norm: float | None = None
    loader: CountingLoader | None = None
    virtual_ranks: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def common(self) -> Common:
        """Keyword arguments of every engine's constructor."""
        return {
            "device": self.device,
            "precision": self.precision,
            "max_grad_norm": self.max_grad_norm,
            "loader": self.loader,
        }


class Builder(Protocol):
    """What the module of an engine has: the names of its options, and the function that makes it."""

    OPTIONS: tuple[str, ...]

    def build(
        self, model: nn.Module, optimizer: Optimizer | MakeOptimizer | None, setting: Setting
    ) -> tuple[nn.Module, Optimizer, Engine]:
        """The model as the user's loop calls it, the optimizer as it steps it, and the engine. Collective."""
        ...

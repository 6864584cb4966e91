"""What every engine does: the part of a step that depends on the strategy."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class StepInfo:
    """What one optimizer step did::

        info = engine.step()
        if info.skipped:
            print("fp16 overflowed: this step changed nothing")

    Args:
        grad_norm: Total norm of the gradients before clipping; None without ``max_grad_norm``.
        skipped: The step was left out, since fp16 gradients overflowed.
        loss: With virtual ranks the step's loss over all ranks, without dims; None for the other engines.
    """

    grad_norm: float | None
    skipped: bool
    loss: Tensor | None = None


@runtime_checkable
class CountingLoader(Protocol):
    """What engines read of a loader: how the samples of the step, and of the batch yielded last, are spread."""

    training: bool
    local_count: int
    step_local_count: int
    global_count: int
    is_last_micro: bool


class Engine(Protocol):
    """One step of training, by one strategy, as `parallelize` returns it.

    The loop is the same for every strategy, precision and number of micro batches::

        for x, y in loader:
            with engine.micro_step():
                engine.backward(loss_fn(model(x), y) * len(x), loader.global_count)  # of a mean, the sum
            if loader.is_last_micro:
                info = engine.step()
    """

    model: nn.Module
    optimizer: Optimizer

    def micro_step(self, key: int | None = None, *, last: bool | None = None) -> AbstractContextManager[None]:
        """Around forward and backward of one micro batch; gradients are reduced in the last one only.

        Args:
            key: Reseeds the global generators when given; a training loader has done so already.
            last: Whether this is the step's last micro batch; None asks the loader, and is True without one.
        """
        ...

    def backward(self, loss_sum: Tensor, global_count: int) -> None:
        """Add the gradients of ``loss_sum / global_count``, summed over ranks. Collective in the last micro step.

        Args:
            loss_sum: Scalar, the *sum* over this micro batch's samples (or tokens). A stand-in batch weighs nothing.
            global_count: Samples (or tokens) of the whole step over all ranks, more than 0.
        """
        ...

    def step(self) -> StepInfo:
        """Unscale, clip, update, and set gradients to None. Collective."""
        ...

    def export(self) -> dict[str, Any]:
        """The states of model (canonical keys), optimizer and scaler. Every rank must call it."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `export` returned, between steps. Every rank must call it."""
        ...

    def unwrap(self) -> nn.Module:
        """The user's own module. Calling its forward in training skips the gradients' reduction."""
        ...


_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that `parallelize` made for ``model`` (as it returned it), None when there is none."""
    return _engines.get(model)


def remember(model: nn.Module, engine: Engine) -> None:
    """Let `engine_of` find ``engine``."""
    _engines[model] = engine

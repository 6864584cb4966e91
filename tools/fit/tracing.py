"""One training step on fake tensors: what is alive when, without any memory behind it.

torch's own MemTracker gives one peak of one step. Here every moment's gradients are told from everything else, since
strategies hold different shares of them; so storages are followed by a dispatch mode of our own. A test holds the two
together.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FIXED, GRADIENT, CAST, OTHER = "fixed", "gradient", "cast", "other"


class NothingToTrain(ValueError):
    """The loss depends on no parameter."""


class StorageTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that operators make, from its first to its last reference."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = {FIXED: 0, GRADIENT: 0, CAST: 0, OTHER: 0}
        self._known: dict[int, tuple[str, int, weakref.ref[Any]]] = {}
        self._weights: set[int] = set()
        self.moments = Moments()

    def hold(self, tensors: Iterable[Tensor], kind: str, weights: bool = False) -> int:
        """Count these tensors' storages as of a kind, each once; how many bytes they have."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if weights:
                self._weights.add(storage._cdata)
            known = self._known.get(storage._cdata)
            if known is None:
                self._add(storage, kind)
                total += storage.nbytes()
            elif known[0] != kind:
                self.now[known[0]] -= known[1]
                self.now[kind] += known[1]
                self._known[storage._cdata] = (kind, known[1], known[2])
        self.moments.note(self.now)
        return total

    def _add(self, storage: Any, kind: str) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone(_: Any) -> None:
            kind_then, size_then, _ = self._known.pop(key)
            self.now[kind_then] -= size_then

        self._known[key] = (kind, size, weakref.ref(storage, gone))
        self.now[kind] += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = OTHER
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights:
            kind = CAST  # autocast's copy of a weight, kept for the whole step
        made = False
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None:
                    self._add(storage, kind)
                    made = True
                elif known[1] != storage.nbytes():  # resized in place
                    self.now[known[0]] += storage.nbytes() - known[1]
                    self._known[storage._cdata] = (known[0], storage.nbytes(), known[2])
                    made = True
        if made:
            self.moments.note(self.now)
        return out


@dataclass
class Moments:
    """The moments of a step that can be the peak, whatever share of the gradients and casts a strategy holds."""

    found: list[tuple[int, int, int]] = field(default_factory=list)  # gradients, casts, others

    def note(self, now: dict[str, int]) -> None:
        """Keep this moment unless another one holds as much of everything."""
        moment = (now[GRADIENT], now[CAST], now[OTHER])
        if any(all(a >= b for a, b in zip(other, moment, strict=True)) for other in self.found):
            return
        self.found = [
            other for other in self.found if not all(a >= b for a, b in zip(moment, other, strict=True))
        ]
        self.found.append(moment)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What forward and backward of one batch size hold beside weights and optimizer.

    Attributes:
        batch_size: Samples.
        batch_bytes: Of the inputs themselves.
        moments: Gradients, casts and other bytes at the moments that can be the peak.
    """

    batch_size: int
    batch_bytes: int
    moments: list[tuple[int, int, int]]


def trace_step(
    model: nn.Module, batch: Any, batch_size: int, run: Callable[[Any], Tensor], autocast: torch.dtype | None
) -> Step:
    """Trace forward and backward; `run` takes the batch and returns the loss. Gradients are left on the parameters."""
    trace = StorageTrace()
    trace.hold(model.parameters(), FIXED, weights=True)
    trace.hold(model.buffers(), FIXED)
    batch_bytes = trace.hold([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)], FIXED)

    def accumulated(parameter: Tensor) -> None:
        assert parameter.grad is not None
        trace.hold([parameter.grad], GRADIENT)

    hooks = [
        parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    context: Any = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    try:
        with trace:
            with context:
                loss = run(batch)
            if not loss.requires_grad:
                raise NothingToTrain
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    return Step(batch_size=batch_size, batch_bytes=batch_bytes, moments=trace.moments.found)


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """What the optimizer keeps, and what its step needs for a moment on top of it."""

    state_bytes: int
    temporary_bytes: int


def trace_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerStep:
    """Two steps: the first makes the state, the second shows what a step needs when it is there."""
    trace = StorageTrace()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trace.hold(parameters, FIXED)
    trace.hold([parameter.grad for parameter in parameters if parameter.grad is not None], GRADIENT)
    with trace:
        optimizer.step()
        state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
        # What the first step has made is new to the trace under "other".
        size = sum(storage.nbytes() for storage in unique_storages(state))
        trace.hold(state, FIXED)
        trace.moments = Moments()
        optimizer.step()
    temporary = max((other for _, _, other in trace.moments.found), default=0)
    return OptimizerStep(state_bytes=size, temporary_bytes=temporary)


def unique_storages(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Each storage once, however many tensors are views of it."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage

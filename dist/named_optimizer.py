"""An optimizer as checkpoints see it: groups and state by parameter name, wherever they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist.shards import share_into
from phalanx.dist.stored_tensors import StoredTensors
from phalanx.dist.wrappers import canonical_name, wrapper_paths

NOT_OPTIONS = {"params", "param_names"}


@dataclass(frozen=True)
class Later:
    """A saved tensor that is read only when the place for it is known."""

    key: str


class NamedOptimizer(Protocol):
    """Reads and replaces an optimizer's state by parameter name."""

    @property
    def kind(self) -> str:
        """The optimizer's class."""
        ...

    @property
    def joined(self) -> bool:
        """Whether the optimizer sees parameters joined and cut, so that what it keeps by rows or norms is another thing."""
        ...

    @property
    def groups(self) -> list[list[str]]:
        """Parameter names of each group.

        Raises:
            ValueError: It holds a parameter that the model does not have.
        """
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the model's parameters."""
        ...

    def options(self) -> list[dict[str, Any]]:
        """Learning rate and the like, of each group."""
        ...

    def state(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """What is kept for each parameter, and what is kept once for all of them."""
        ...

    def check(self, states: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """Find out whether `load` would take these states, before anything is loaded.

        Raises:
            OptimizerMismatchError: It would not.
        """
        ...

    def load(
        self,
        options: list[dict[str, Any]],
        states: Mapping[str, Mapping[str, Any]],
        shared: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Replace all of it; a `Later` stands for one of `tensors`."""
        ...


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's name without wrapper components; a shared one has its first name."""
    model.state_dict(
        keep_vars=True
    )  # lets FSDP put its shards back, where gathered weights were in their place
    added = set(wrapper_paths(model))
    return {parameter: canonical_name(name, added) for name, parameter in model.named_parameters()}


class PlainOptimizer:
    """A torch optimizer over the parameters of a model, which may be DTensors.

    Args:
        optimizer: To read and to load into.
        model: Has all of its parameters, wrapped or not.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer, self._names = optimizer, parameter_names(model)

    @property
    def kind(self) -> str:
        """See `NamedOptimizer`."""
        return type(self._optimizer).__name__

    @property
    def joined(self) -> bool:
        """See `NamedOptimizer`."""
        return False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `NamedOptimizer`."""
        return {name: tuple(parameter.shape) for parameter, name in self._names.items()}

    @property
    def groups(self) -> list[list[str]]:
        """See `NamedOptimizer`."""
        groups = []
        for number, group in enumerate(self._optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in self._names:
                    raise ValueError(
                        f"the optimizer's parameter {place} of group {number}, shape {list(parameter.shape)}, is not one of "
                        "the model's: its state could not be stored by name.\n"
                        "Fix: pass the model and optimizer that parallelize() returned; put extra parameters into one module"
                    )
            groups.append([self._names[parameter] for parameter in group["params"]])
        return groups

    def options(self) -> list[dict[str, Any]]:
        """See `NamedOptimizer`."""
        return options_of(self._optimizer)

    def state(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """See `NamedOptimizer`."""
        owners: dict[Any, Any] = dict(self._optimizer.state)
        states = {self._names[owner]: entries for owner, entries in owners.items() if owner in self._names}
        shared = {str(owner): entries for owner, entries in owners.items() if owner not in self._names}
        return states, shared

    def check(self, states: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """See `NamedOptimizer`; torch takes what it has saved."""

    def load(
        self,
        options: list[dict[str, Any]],
        states: Mapping[str, Mapping[str, Any]],
        shared: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """See `NamedOptimizer`."""
        optimizer = self._optimizer
        read = self._read(states, tensors)
        packed = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = [name for group in self.groups for name in group]
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        by_number = {number: read[name] for number, name in zip(numbers, names, strict=True) if name in read}
        exact = {name: by_number[number] for name, number in zip(names, numbers, strict=True) if name in read}
        saved_dtypes = {
            name: {entry: value.dtype for entry, value in entries.items() if isinstance(value, Tensor)}
            for name, entries in exact.items()
        }
        new_groups = [
            {**group, **saved} for group, saved in zip(packed["param_groups"], options, strict=True)
        ]
        optimizer.load_state_dict({"state": {**shared, **by_number}, "param_groups": new_groups})
        # torch casts floating-point state to its parameter's dtype, which would round the fp32 state of
        # low-precision parameters: put the saved precision back.
        for name, parameter in zip(names, parameters, strict=True):
            for entry, dtype in saved_dtypes.get(name, {}).items():
                value = optimizer.state[parameter][entry]
                if isinstance(value, Tensor) and value.dtype != dtype:
                    optimizer.state[parameter][entry] = exact[name][entry].to(value.device)

    def _read(
        self, states: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]
    ) -> dict[str, dict[str, Any]]:
        """The states with their tensors read, one at a time, into the optimizer's own where it has such."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        read: dict[str, dict[str, Any]] = {}
        for name, parameter in zip(
            [name for group in self.groups for name in group], parameters, strict=True
        ):
            own = self._optimizer.state.get(parameter, {})
            if name in states:
                read[name] = {
                    entry: _own_copy(tensors, value.key, parameter, own.get(entry))
                    if isinstance(value, Later)
                    else value
                    for entry, value in states[name].items()
                }
        return read


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's entries without its parameters."""
    return [
        {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        for group in optimizer.param_groups
    ]


def saved_shape(tensors: Mapping[str, Tensor], key: str) -> tuple[tuple[int, ...], torch.dtype]:
    """A saved tensor's shape and dtype, without reading it."""
    if isinstance(tensors, StoredTensors):
        stored = tensors.stored[key]
        return stored.shape, stored.dtype
    return tuple(tensors[key].shape), tensors[key].dtype


def read_into(tensors: Mapping[str, Tensor], key: str, target: Tensor) -> None:
    """Copy a saved tensor, or this rank's share of it, into `target`."""
    if isinstance(tensors, StoredTensors):
        tensors.fill(key, target)
    else:
        share_into(target, tensors[key])


def _own_copy(tensors: Mapping[str, Tensor], key: str, parameter: Tensor, present: Any) -> Tensor:
    """A saved tensor in memory of its own, laid out (and sharded) as the parameter is, as the optimizer would have it."""
    shape, dtype = saved_shape(tensors, key)
    if not shape or shape != tuple(parameter.shape):  # a count of steps: torch decides where it belongs
        return tensors[key].clone()
    fits = isinstance(present, Tensor) and present.shape == parameter.shape and present.dtype == dtype
    target: Tensor = present if fits else torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    read_into(tensors, key, target)
    return target

"""An optimizer's state by parameter name, so that it can be resumed by another wrapping or order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist.checkpoint_errors import OptimizerMismatchError
from phalanx.dist.key_rewrites import sample_names
from phalanx.dist.plain_values import decode, encode
from phalanx.dist.stored_tensors import StoredTensors, share_into
from phalanx.dist.wrappers import canonical_name, wrapper_paths

# Optimizers whose state means the same thing: one may go on where the other stopped.
_SAME_STATE = ({"Adam", "AdamW"},)
_NOT_OPTIONS = {"params", "param_names"}


@dataclass(frozen=True)
class _Later:
    """A tensor that is read only when the place for it is known."""

    key: str


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's name without wrapper components; a shared one has its first name."""
    model.state_dict(
        keep_vars=True
    )  # lets FSDP put its shards back, where gathered weights were in their place
    added = set(wrapper_paths(model))
    return {parameter: canonical_name(name, added) for name, parameter in model.named_parameters()}


def group_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """Parameter names of each of the optimizer's groups.

    Raises:
        ValueError: It holds a parameter that the model does not have.
    """
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ValueError(
                    f"the optimizer's parameter {place} of group {number}, shape {list(parameter.shape)}, is not one of "
                    "the model's: its state could not be stored by name.\n"
                    "Fix: pass the model and optimizer that parallelize() returned; put extra parameters into one module"
                )
        groups.append([names[parameter] for parameter in group["params"]])
    return groups


def export_optimizer(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as tensors called ``<parameter>/<entry>``, and the rest as plain values.

    ::

        tensors["fc.weight/exp_avg"], plain["groups"][0] == {"params": ["fc.weight"], "options": {"lr": 0.1, ...}}

    Raises:
        NotPlainError: The optimizer keeps something that is neither a tensor nor a plain value.
    """
    tensors: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    shared: dict[str, Any] = {}

    def keep(where: str, tensor: Tensor) -> str:
        tensors[where] = tensor
        return where

    by_owner: dict[Any, Any] = dict(optimizer.state)
    for owner, entries in by_owner.items():
        if owner not in names:  # state of the optimizer as a whole, under a name of its own
            shared[str(owner)] = encode(entries, f"$optimizer/{owner}", keep)
            continue
        name = names[owner]
        for entry, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{entry}"] = value
            else:
                state.setdefault(name, {})[entry] = encode(value, f"{name}/{entry}", keep)
    groups = []
    for number, params in enumerate(group_names(optimizer, names)):
        options = {
            key: encode(value, f"$group/{number}/{key}", keep)
            for key, value in optimizer.param_groups[number].items()
            if key not in _NOT_OPTIONS
        }
        groups.append({"params": params, "options": options})
    plain = {"class": type(optimizer).__name__, "groups": groups, "state": state, "shared": shared}
    return tensors, plain


def prepare_optimizer(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    partial: bool = False,
) -> Callable[[], None]:
    """Check saved state against this optimizer; the function returned loads it.

    Args:
        optimizer: To load into; how its parameters are grouped and ordered may differ.
        names: From `parameter_names`.
        tensors: As `export_optimizer` returned them.
        plain: Likewise.
        partial: Start parameters without saved state fresh, and drop state without a parameter.

    Raises:
        OptimizerMismatchError: Another optimizer class, or other parameters; the message names them.
    """
    kind, saved_kind = type(optimizer).__name__, plain["class"]
    if kind != saved_kind and not any({kind, saved_kind} <= family for family in _SAME_STATE):
        raise OptimizerMismatchError(
            f"the checkpoint's optimizer is {saved_kind}, this run's is {kind}: the state of one means nothing to the "
            f"other.\nFix: use {saved_kind}, or load the weights alone with load_state_dict()"
        )
    groups = group_names(optimizer, names)
    saved_group = {name: number for number, group in enumerate(plain["groups"]) for name in group["params"]}
    ours = [name for group in groups for name in group]
    missing = [name for name in ours if name not in saved_group]
    extra = [name for name in saved_group if name not in set(ours)]
    if (missing or extra) and not partial:
        raise OptimizerMismatchError(
            f"the checkpoint's optimizer has {len(saved_group)} parameters, this run's has {len(ours)}.\n"
            f"  without saved state: {sample_names(missing)}\n"
            f"  saved but not optimized now: {sample_names(extra)}\n"
            "Fix: optimize the same parameters, or restore(partial_optimizer=True) to start those fresh"
        )
    options = [
        _options(number, group, saved_group, plain["groups"], tensors) for number, group in enumerate(groups)
    ]
    states = _states(set(ours), tensors, plain)

    def load() -> None:
        shared = decode(plain.get("shared", {}), tensors.__getitem__)
        _load(optimizer, groups, options, _read(optimizer, groups, states, tensors), shared)

    return load


def _options(
    number: int,
    group: list[str],
    saved_group: Mapping[str, int],
    saved: list[dict[str, Any]],
    tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The saved learning rate and the like for one of our groups, {} when all of it is new."""
    origins = sorted({saved_group[name] for name in group if name in saved_group})
    if not origins:
        return {}
    options = [decode(saved[origin]["options"], lambda key: tensors[key].clone()) for origin in origins]
    for other in options[1:]:
        differ = [key for key in options[0] if options[0][key] != other.get(key)]
        if differ:
            raise OptimizerMismatchError(
                f"group {number} joins parameters that were saved in groups {origins} with different {differ[0]!r} "
                f"({options[0][differ[0]]} and {other.get(differ[0])}).\nFix: group the parameters as they were"
            )
    return dict(options[0])


def _states(
    ours: set[str], tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    nested: set[str] = set()

    def look_up(key: str) -> Tensor:
        nested.add(key)
        return tensors[key].clone()

    states = {
        name: dict(decode(entries, look_up)) for name, entries in plain["state"].items() if name in ours
    }
    for key in tensors:
        name, _, entry = key.rpartition("/")
        if name in ours and key not in nested:
            states.setdefault(name, {})[entry] = _Later(key)
    return states


def _read(
    optimizer: Optimizer,
    groups: list[list[str]],
    states: Mapping[str, dict[str, Any]],
    tensors: Mapping[str, Tensor],
) -> dict[str, dict[str, Any]]:
    """The states with their tensors read, one at a time, into the optimizer's own where it has such."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    read: dict[str, dict[str, Any]] = {}
    for name, parameter in zip([name for group in groups for name in group], parameters, strict=True):
        own = optimizer.state.get(parameter, {})
        if name in states:
            read[name] = {
                entry: _own_copy(tensors, value.key, parameter, own.get(entry))
                if isinstance(value, _Later)
                else value
                for entry, value in states[name].items()
            }
    return read


def _own_copy(tensors: Mapping[str, Tensor], key: str, parameter: Tensor, present: Any) -> Tensor:
    """A saved tensor in memory of its own, laid out (and sharded) as the parameter is, as the optimizer would have it."""
    if isinstance(tensors, StoredTensors):
        stored = tensors.stored[key]
        shape, dtype = stored.shape, stored.dtype
    else:
        shape, dtype = tuple(tensors[key].shape), tensors[key].dtype
    if not shape or shape != tuple(parameter.shape):  # a count of steps: torch decides where it belongs
        return tensors[key].clone()
    fits = isinstance(present, Tensor) and present.shape == parameter.shape and present.dtype == dtype
    target: Tensor = present if fits else torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(tensors, StoredTensors):
        tensors.fill(key, target)
    else:
        share_into(target, tensors[key])
    return target


def _load(
    optimizer: Optimizer,
    groups: list[list[str]],
    options: list[dict[str, Any]],
    states: Mapping[str, dict[str, Any]],
    shared: Mapping[str, Any],
) -> None:
    packed = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [name for group in groups for name in group]
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    by_number = {number: states[name] for number, name in zip(numbers, names, strict=True) if name in states}
    exact = {name: by_number[number] for name, number in zip(names, numbers, strict=True) if name in states}
    saved_dtypes = {
        name: {entry: value.dtype for entry, value in entries.items() if isinstance(value, Tensor)}
        for name, entries in exact.items()
    }
    new_groups = [{**group, **saved} for group, saved in zip(packed["param_groups"], options, strict=True)]
    optimizer.load_state_dict({"state": {**shared, **by_number}, "param_groups": new_groups})
    # torch casts floating-point state to its parameter's dtype, which would round the fp32 state of
    # low-precision parameters: put the saved precision back.
    for name, parameter in zip(names, parameters, strict=True):
        for entry, dtype in saved_dtypes.get(name, {}).items():
            value = optimizer.state[parameter][entry]
            if isinstance(value, Tensor) and value.dtype != dtype:
                optimizer.state[parameter][entry] = exact[name][entry].to(value.device)

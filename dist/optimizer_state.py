"""An optimizer's state by parameter name, so that it can be resumed by another wrapping or order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from phalanx.dist.checkpoint_errors import OptimizerMismatchError
from phalanx.dist.key_rewrites import sample_names
from phalanx.dist.named_optimizer import Later, NamedOptimizer
from phalanx.dist.plain_values import decode, encode

# Optimizers whose state means the same thing: one may go on where the other stopped.
_SAME_STATE = ({"Adam", "AdamW"},)
# Those that treat every element alike: their state means the same however parameters are joined and cut.
_BY_ELEMENT = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip


def export_optimizer(optimizer: NamedOptimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as tensors called ``<parameter>/<entry>``, and the rest as plain values.

    ::

        tensors["fc.weight/exp_avg"], plain["groups"][0] == {"params": ["fc.weight"], "options": {"lr": 0.1, ...}}

    Raises:
        NotPlainError: The optimizer keeps something that is neither a tensor nor a plain value.
    """
    tensors: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}

    def keep(where: str, tensor: Tensor) -> str:
        tensors[where] = tensor
        return where

    states, shared = optimizer.state()
    for name, entries in states.items():
        for entry, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{entry}"] = value
            else:
                state.setdefault(name, {})[entry] = encode(value, f"{name}/{entry}", keep)
    groups = []
    for number, (params, options) in enumerate(zip(optimizer.groups, optimizer.options(), strict=True)):
        plain = {key: encode(value, f"$group/{number}/{key}", keep) for key, value in options.items()}
        groups.append({"params": params, "options": plain})
    # State of the optimizer as a whole has a name of its own.
    whole = {owner: encode(entries, f"$optimizer/{owner}", keep) for owner, entries in shared.items()}
    return tensors, {
        "class": optimizer.kind,
        "joined": optimizer.joined,
        "groups": groups,
        "state": state,
        "shared": whole,
    }


def prepare_optimizer(
    optimizer: NamedOptimizer,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    partial: bool = False,
) -> Callable[[], None]:
    """Check saved state against this optimizer; the function returned loads it.

    Args:
        optimizer: To load into; how its parameters are grouped and ordered may differ.
        tensors: As `export_optimizer` returned them.
        plain: Likewise.
        partial: Start parameters without saved state fresh, and drop state without a parameter.

    Raises:
        OptimizerMismatchError: Another optimizer class, or other parameters; the message names them.
    """
    kind, saved_kind = optimizer.kind, plain["class"]
    if kind != saved_kind and not any({kind, saved_kind} <= family for family in _SAME_STATE):
        raise OptimizerMismatchError(
            f"the checkpoint's optimizer is {saved_kind}, this run's is {kind}: the state of one means nothing to the "
            f"other.\nFix: use {saved_kind}, or load the weights alone with load_state_dict()"
        )
    if kind not in _BY_ELEMENT and plain.get("joined", False) != optimizer.joined:
        raise OptimizerMismatchError(
            f"the checkpoint's {saved_kind} state is that of parameters {'joined and cut by ZeRO' if plain.get('joined') else 'as they are'}: "
            f"unlike SGD's and Adam's it means nothing to another strategy.\n"
            f"Fix: go on with {'strategy=' + repr('deepspeed') if plain.get('joined') else 'ddp or fsdp'}, or load the weights alone "
            "with load_state_dict()"
        )
    groups = optimizer.groups
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
    optimizer.check(states, tensors)

    def load() -> None:
        shared = decode(plain.get("shared", {}), tensors.__getitem__)
        optimizer.load(options, states, shared, tensors)

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
            states.setdefault(name, {})[entry] = Later(key)
    return states

"""Loading a checkpoint's weights into a model without holding a second copy of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.dist.checkpoint_sources import Source
from phalanx.dist.held_state import HeldState
from phalanx.dist.key_rewrites import Rule
from phalanx.dist.shards import is_sharded, share_into
from phalanx.dist.state_dict import Match, alias_groups, assigns, fit_state_dict
from phalanx.dist.stored_tensors import StoredTensors

_DIRECT_BYTES = 16 << 20
_GROUP_BYTES = 64 << 20


def load_stored(model: nn.Module, stored: StoredTensors, extra: Mapping[str, Any]) -> Match:
    """What `load_state_dict` does strictly, tensor by tensor.

    Names and shapes are matched first, and nothing is loaded when they do not fit. Large parameters, and
    those of which a rank holds a part, are read into their own memory; the others go through the model's
    ``load_state_dict`` in groups, so that modules which do more while loading still do it.

    Args:
        model: To load into, in place; wrapped or not.
        stored: The checkpoint's tensors.
        extra: Its plain values, for modules with extra state.

    Raises:
        StateDictError: The names or shapes are not the model's; the model is as it was.
        DamagedFileError: A tensor is not what was written.
    """
    values = model.state_dict(keep_vars=True)
    source: dict[str, Any] = {**stored.on_meta(), **extra}
    source.update(_unequal_names(values, source, stored))
    names = {id(tensor): name for name, tensor in source.items() if isinstance(tensor, Tensor)}
    match, state = fit_state_dict(model, source)

    def tensor_for(value: Any) -> Any:
        return stored[names[id(value)]] if isinstance(value, Tensor) and value.is_meta else value

    if assigns(values):  # the tensors become the model's own: read each once, and there is no second copy
        read = {id(value): tensor_for(value) for value in state.values()}
        model.load_state_dict(
            {key: read[id(value)] for key, value in state.items()}, strict=False, assign=True
        )
        return match
    straight, rest = OrderedDict[str, Any](), OrderedDict[str, Any]()
    for key, value in state.items():
        special = not (
            isinstance(value, Tensor) and value.is_meta and _goes_straight(model, key, values.get(key))
        )
        (rest if special else straight)[key] = value
    # These first: a module that must not be loaded now says so in its hooks, before anything is changed.
    for group in _groups(rest):
        model.load_state_dict({key: tensor_for(rest[key]) for key in group}, strict=False)
    for key, value in straight.items():
        stored.fill(names[id(value)], values[key])
    return match


def load_held(
    module: nn.Module,
    held: HeldState,
    source: Source,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    ignore_mismatched: bool = False,
    rules: Sequence[Rule] = (),
) -> Match:
    """What `load_state_dict` does, for a model whose parameters a strategy holds elsewhere.

    Collective: every rank must call it.

    Args:
        module: The user's module, without wrappers.
        held: Its state.
        source: As for `load_state_dict`; `StoredTensors` are read one by one, each rank what it needs.
        extra: Plain values that are not in `StoredTensors`, for modules with extra state.
        strict: As for `load_state_dict`, and so are `ignore_mismatched` and `rules`.

    Raises:
        StateDictError: The names or shapes are not the model's; the model is as it was.
        DamagedFileError: A tensor is not what was written.
    """
    values = held.values()
    stored = source if isinstance(source, StoredTensors) else None
    names: dict[int, str] = {}
    if stored is not None:
        on_meta: dict[str, Any] = {**stored.on_meta(), **(extra or {})}
        source = {**on_meta, **_unequal_names(values, on_meta, stored)}
        names = {id(value): key for key, value in source.items() if isinstance(value, Tensor)}
    match, state = fit_state_dict(
        module, source, strict, ignore_mismatched=ignore_mismatched, rules=rules, values=values
    )

    def read(value: Any, target: Tensor) -> None:
        if stored is not None and value.is_meta:
            stored.fill(names[id(value)], target)
        else:
            share_into(target, value)

    def whole(value: Any) -> Any:
        is_stored = stored is not None and isinstance(value, Tensor) and value.is_meta
        return stored[names[id(value)]] if stored is not None and is_stored else value

    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    # These first: a module that must not be loaded now says so in its hooks, before anything is changed.
    module.load_state_dict({k: whole(v) for k, v in state.items() if k not in parameters}, strict=False)
    held.load({key: value for key, value in state.items() if key in parameters}, read)
    return match


def _goes_straight(model: nn.Module, key: str, target: Any) -> bool:
    """Whether the tensor is one of the model's own that no module treats specially while loading."""
    if is_sharded(target):
        return True
    if not isinstance(target, Tensor) or target.numel() * target.element_size() < _DIRECT_BYTES:
        return False
    path, _, leaf = key.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    plain = type(module)._load_from_state_dict is nn.Module._load_from_state_dict
    # Hooks of parents see the names of their children too, but only the module's own could want this tensor whole.
    own = module._parameters.get(leaf) is target or module._buffers.get(leaf) is target
    return plain and own and not module._load_state_dict_pre_hooks


def _groups(state: Mapping[str, Any]) -> list[list[str]]:
    """Keys in groups of a bounded size; at least one, since a load also runs the modules' hooks."""
    groups: list[list[str]] = [[]]
    size = 0
    for key, value in state.items():
        bytes_here = value.numel() * value.element_size() if isinstance(value, Tensor) else 0
        if groups[-1] and size + bytes_here > _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += bytes_here
    return groups


def _unequal_names(
    values: Mapping[str, Any], source: Mapping[str, Any], stored: StoredTensors
) -> dict[str, torch.Tensor]:
    """Tensors that the model ties and the checkpoint does not: read, since their values must be compared."""
    found: dict[str, Tensor] = {}
    for group in alias_groups(values):
        present = [key for key in group if isinstance(source.get(key), Tensor)]
        if len({id(source[key]) for key in present}) > 1:
            found.update({key: stored[key] for key in present})
    return found

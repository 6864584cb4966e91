"""Loading one model's weights into another that is wrapped, compiled or named differently."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.dist.checkpoint_sources import (
    CheckpointFileError,
    DamagedFileError,
    MissingCheckpointError,
    PickledCodeError,
    Source,
    pick_weights,
    read_source,
    shape_of,
)
from phalanx.dist.engines.engine import engine_of
from phalanx.dist.key_matches import (
    KeysDifferError,
    Match,
    Mismatch,
    first_lines,
    keys_differ,
    nothing_matched,
    renamed_metadata,
    shape_text,
)
from phalanx.dist.key_rewrites import (
    AmbiguousKeysError,
    FlattenedShardsError,
    NothingMatchedError,
    Pairing,
    Rule,
    StateDictError,
    canonical_key,
    collapsed_keys,
    fits,
    pair_keys,
    sample_names,
)
from phalanx.dist.shards import is_sharded, local_part, share_of
from phalanx.dist.wrappers import canonical_name, unwrap, wrapper_paths

__all__ = [
    "AmbiguousKeysError",
    "CheckpointFileError",
    "DamagedFileError",
    "FlattenedShardsError",
    "KeysDifferError",
    "Match",
    "Mismatch",
    "MissingCheckpointError",
    "NothingMatchedError",
    "PickledCodeError",
    "StateDictError",
    "canonical_keys",
    "load_state_dict",
    "match_state_dict",
    "unwrap",
]

Target = nn.Module | Mapping[str, Any] | Iterable[str]


def canonical_keys(model_or_keys: nn.Module | Iterable[str]) -> list[str]:
    """Keys as they would be without any wrapper, in order.

    A model's wrappers are known for certain. Of bare keys, ``module`` is removed only where it is
    its parent's only child, as in a DDP checkpoint::

        >>> import torch
        >>> canonical_keys(torch.compile(torch.nn.Linear(8, 8)))
        ['weight', 'bias']
        >>> canonical_keys(["module.net._orig_mod.fc.weight", "module.head.weight"])
        ['net.fc.weight', 'head.weight']
    """
    if isinstance(model_or_keys, nn.Module):
        added = set(wrapper_paths(model_or_keys))
        return list(dict.fromkeys(canonical_name(key, added) for key in model_or_keys.state_dict()))
    return list(collapsed_keys(_checked(model_or_keys, "model_or_keys")).values())


def match_state_dict(
    source: Source, target: Target, *, rules: Sequence[Rule] = (), ignore_mismatched: bool = False
) -> Match:
    """Find each of the target's keys in a checkpoint that was saved under other wrappers or prefixes.

    Wrapper components (``module``, ``_orig_mod``, ``_fsdp_wrapped_module`` ...) are whole path
    components, dropped or added anywhere, only where the two sides differ. Beyond those, one
    constant prefix may differ, if names and shapes leave one answer. Containers (``state_dict``,
    ``model``, a moving average) are recognised. Nothing is guessed where two answers fit, and
    neither side is modified::

        >>> import torch
        >>> match = match_state_dict({"module.fc.weight": torch.ones(2, 3)}, {"fc.weight": torch.zeros(2, 3)})
        >>> list(match.state_dict), match.renamed, match.missing, match.unexpected
        (['fc.weight'], {'module.fc.weight': 'fc.weight'}, [], [])

    Args:
        source: A state dict, a dict that contains one, or a file (torch's formats read with
            ``weights_only``, safetensors, or a checkpoint folder of `CheckpointManager`).
        target: A module, a state dict, or keys.
        rules: ``(regular expression, replacement)`` pairs for keys that were renamed, applied in
            order to the source's keys after wrappers are removed.
        ignore_mismatched: Leave tensors of another shape out of ``.state_dict``; they are listed in
            ``.mismatched`` either way.

    Raises:
        NothingMatchedError: No key matched.
        AmbiguousKeysError: Two source keys would become one, or two rewrites fit equally well.
        FlattenedShardsError: The source holds flattened FSDP shards.
        CheckpointFileError: The file is missing, damaged, or holds pickled code (which is not run).
    """
    return _match(source, target, rules, ignore_mismatched)[0]


def load_state_dict(
    model: nn.Module,
    source: Source,
    strict: bool = True,
    *,
    ignore_mismatched: bool = False,
    rules: Sequence[Rule] = (),
) -> Match:
    """Load `source` into `model`, whatever wrapped either of them; see `match_state_dict`.

    On an error the model is as it was before. Names that share a tensor in the model count as
    loaded when one of them is::

        >>> import torch
        >>> trained, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> print(load_state_dict(torch.compile(fresh), {"model": trained.state_dict(), "epoch": 3}))
        2 keys matched, 2 of them renamed, 0 missing, 0 unexpected, 0 of another shape
        weights taken from the entry 'model'
        '_orig_mod' added to 2 of 2 keys

    Args:
        model: The module to load into, in place; wrapped or not.
        source: As for `match_state_dict`.
        strict: Refuse missing and unexpected keys. Without it they are only listed, but a load that
            matches nothing at all is still an error.
        ignore_mismatched: Keep the model's own values where the shapes differ.
        rules: As for `match_state_dict`.

    Raises:
        KeysDifferError: Keys are missing or unexpected (``strict``), or shapes differ.
        StateDictError: As for `match_state_dict`.
    """
    if not isinstance(model, nn.Module):
        raise StateDictError(
            f"model={model!r} is no module: there is nothing to load into.\n"
            "Fix: load_state_dict(model, source); match_state_dict() takes bare keys"
        )
    _check_flag("strict", strict)
    _check_flag("ignore_mismatched", ignore_mismatched)
    held = getattr(engine_of(model), "held", None)
    if held is not None:  # copied into the model's own tensors they would be lost, or not fit
        from phalanx.dist.stored_loading import load_held  # which imports this module

        return load_held(
            unwrap(model), held, source, strict=strict, ignore_mismatched=ignore_mismatched, rules=rules
        )
    match, state = fit_state_dict(model, source, strict, ignore_mismatched=ignore_mismatched, rules=rules)
    values = model.state_dict(keep_vars=True)
    on_meta = assigns(values)
    for key, value in state.items():
        if is_sharded(values.get(key)) and isinstance(value, Tensor) and not is_sharded(value):
            state[key] = share_of(value, values[key])
    model.load_state_dict(state, strict=False, assign=on_meta)
    return match


def fit_state_dict(
    model: nn.Module,
    source: Source,
    strict: bool = True,
    *,
    ignore_mismatched: bool = False,
    rules: Sequence[Rule] = (),
    values: Mapping[str, Any] | None = None,
) -> tuple[Match, OrderedDict[str, Any]]:
    """What `load_state_dict` would load, under the model's keys, and the match; nothing is loaded.

    `values` stand for the model's state dict where a strategy keeps its tensors elsewhere.

    Raises:
        StateDictError: As for `load_state_dict`.
    """
    target = model if values is None else values
    match, name, pairing, weights = _match(source, target, rules, ignore_mismatched=True)
    state = OrderedDict(match.state_dict)
    if match.unexpected and match.missing:
        match, state = _with_own_translation(model, match, weights)
    problems = []
    if match.mismatched and not ignore_mismatched:
        shapes = [
            f"{m.key} {shape_text(m.source_shape)} -> {shape_text(m.target_shape)}" for m in match.mismatched
        ]
        problems.append(f"{len(shapes)} of another shape (checkpoint -> model): {first_lines(shapes)}")
    if strict and match.missing:
        problems.append(f"{len(match.missing)} missing: {sample_names(match.missing)}")
    if strict and match.unexpected:
        problems.append(f"{len(match.unexpected)} unexpected: {sample_names(match.unexpected)}")
    if ignore_mismatched and match.mismatched and not state:
        problems.append("nothing is left to load: the model would have kept all of its initial values")
    if problems:
        raise keys_differ(name, problems, match, pairing)
    values = model.state_dict(keep_vars=True) if values is None else values
    _refuse_unequal_twins(values, match)
    assigns(values)
    if hasattr(match.state_dict, "_metadata"):
        state._metadata = match.state_dict._metadata  # type: ignore[attr-defined]
    return match, state


def assigns(values: Mapping[str, Any]) -> bool:
    """Whether the model is on the meta device, so that tensors become its own rather than being copied.

    Raises:
        StateDictError: A part of it is.
    """
    on_meta = [key for key, value in values.items() if isinstance(value, Tensor) and value.is_meta]
    if on_meta and len(on_meta) < len(values):
        raise StateDictError(
            f"{sample_names(on_meta)}: on the meta device while other tensors of the model are not; copying into "
            "them would do nothing.\nFix: model.to_empty(device=...) first"
        )
    return bool(on_meta)


def _checked(keys: Iterable[str], name: str) -> list[str]:
    if (
        isinstance(keys, str | bytes | os.PathLike | type)
        or not isinstance(keys, Iterable)
        or getattr(keys, "ndim", 1) == 0
    ):
        raise StateDictError(
            f"{name}={keys!r}: neither a module, nor a state dict, nor a list of its keys.\n"
            "Fix: pass the model, or list(model.state_dict())"
        )
    listed = list(keys)
    wrong = [key for key in listed if not isinstance(key, str)]
    if wrong:
        raise StateDictError(
            f"{name}: {wrong[0]!r} is no key of a state dict.\nFix: keys are strings, such as 'fc.weight'"
        )
    return listed


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise StateDictError(f"{name}={value!r}.\nFix: {name}=True or False")


def _target_values(target: Target) -> Mapping[str, Any]:
    if isinstance(target, nn.Module):
        return target.state_dict(keep_vars=True)
    keys = _checked(target, "target")
    return target if isinstance(target, Mapping) else dict.fromkeys(keys)


def _match(
    source: Source, target: Target, rules: Sequence[Rule], ignore_mismatched: bool
) -> tuple[Match, str, Pairing, Mapping[str, Any]]:
    _check_flag("ignore_mismatched", ignore_mismatched)
    values = _target_values(target)
    everything, name = read_source(source)
    shapes = {key: shape_of(value) for key, value in values.items()}
    weights, container, others = pick_weights(everything, shapes)
    _checked(weights, "source")
    pairing = pair_keys(
        {key: shape_of(value) for key, value in weights.items()},
        shapes,
        rules,
        lambda first, second: _one_tensor(weights[first], weights[second]),
    )
    for key, found in list(pairing.pairs.items()):
        if isinstance(values[found], Tensor) and not isinstance(weights[key], Tensor):
            del pairing.pairs[key]  # a plain value cannot fill a tensor: it is a stranger of the same name
            kind = f"{type(weights[key]).__module__}.{type(weights[key]).__name__}".removeprefix("builtins.")
            pairing.hint = (
                f"{key!r} holds a {kind} where the model has a tensor.\n"
                "Fix: pass tensors, e.g. {key: torch.as_tensor(value) for key, value in source.items()}"
            )
        elif shape_of(weights[key]) is None and shapes[found] is not None:
            raise StateDictError(
                f"{key!r} in {name} is a lazy parameter that has no shape and no values yet.\n"
                "Fix: save the model after its first forward"
            )
    if not pairing.pairs and values:
        raise NothingMatchedError(nothing_matched(name, weights, values, pairing, container))
    loaded: OrderedDict[str, Any] = OrderedDict()
    mismatched = []
    by_target = {found: key for key, found in pairing.pairs.items()}
    for key in values:
        if key not in by_target:
            continue
        value = weights[by_target[key]]
        have, want = shape_of(value), shapes[key]
        if have is not None and want is not None and not fits(have, want):
            mismatched.append(Mismatch(key, have, want))
            if ignore_mismatched:
                continue
        loaded[key] = value
    metadata = getattr(weights, "_metadata", None)
    if metadata is not None:
        loaded._metadata = renamed_metadata(metadata, pairing.pairs)  # type: ignore[attr-defined]
    used = {*pairing.pairs, *pairing.averaged, *pairing.duplicates}
    match = Match(
        state_dict=loaded,
        renamed={key: found for key, found in pairing.pairs.items() if key != found},
        missing=_missing(values, by_target, loaded),
        unexpected=[key for key in weights if key not in used],
        mismatched=mismatched,
        rewrites=pairing.rewrites,
        averaged=pairing.averaged,
        container=container,
        other_containers=others,
        unused_rules=pairing.unused_rules,
        matched=len(by_target),
    )
    return match, name, pairing, weights


def _one_tensor(first: Any, second: Any) -> bool:
    return first is second or (_place(first) is not None and _place(first) == _place(second))


def _place(value: Any) -> tuple[Any, ...] | None:
    """What two names of one tensor have in common; None for a tensor without memory of its own."""
    if not isinstance(value, Tensor) or shape_of(value) is None:
        return None
    if value.device.type == "meta" or value.layout != torch.strided:
        return ("id", id(value))
    if is_sharded(value):
        value = local_part(value)
    if value.numel() == 0:
        return ("id", id(value))
    return (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)


def alias_groups(values: Mapping[str, Any]) -> list[list[str]]:
    """Names that stand for one and the same tensor, groups of two and more."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for key, value in values.items():
        try:
            place = _place(value)
        except (RuntimeError, NotImplementedError):  # a tensor subclass without a plain memory address
            place = ("id", id(value))
        if place is not None:
            groups[place].append(key)
    return [group for group in groups.values() if len(group) > 1]


def _missing(values: Mapping[str, Any], found: Mapping[str, str], loaded: Mapping[str, Any]) -> list[str]:
    present = set(found)
    for group in alias_groups(values):
        if any(key in found for key in group):
            present.update(group)
    versions = getattr(loaded, "_metadata", None) or {}
    missing = []
    for key in values:
        if key in present:
            continue
        # Batch norm before torch 0.4.1 did not count batches, and torch fills the counter in by itself.
        module, _, leaf = key.rpartition(".")
        mean = f"{module}.running_mean" if module else "running_mean"
        if leaf == "num_batches_tracked" and mean in found and versions.get(module, {}).get("version", 1) < 2:
            continue
        missing.append(key)
    return missing


def _refuse_unequal_twins(values: Mapping[str, Any], match: Match) -> None:
    """Two names of one parameter with different values: whichever came last would win."""
    for group in alias_groups(values):
        given = [key for key in group if isinstance(match.state_dict.get(key), Tensor)]
        for key in given[1:]:
            first, second = match.state_dict[given[0]], match.state_dict[key]
            if not _one_tensor(first, second) and not equal_values(first, second):
                raise AmbiguousKeysError(
                    f"{given[0]!r} and {key!r} share one tensor in the model, but the checkpoint holds different "
                    "values for them, and the last one would silently win.\n"
                    f"Fix: remove the one that is not meant, or untie them in the model"
                )


def _with_own_translation(
    model: nn.Module, match: Match, weights: Mapping[str, Any]
) -> tuple[Match, OrderedDict[str, Any]]:
    """Let sub-modules translate old keys as they would while loading (parametrizations do), on a copy.

    Returns the match with what they explain taken out of missing and unexpected, and the dict to load.
    """
    added = set(wrapper_paths(model))
    places = {
        canonical_name(f"{path}.x", added)[:-1]: f"{path}." for path, _ in model.named_modules() if path
    }
    state: OrderedDict[str, Any] = OrderedDict(match.state_dict)
    origin = {}
    for key in match.unexpected:
        path, dot, leaf = canonical_key(key).rpartition(".")
        name = places.get(path + dot, places.get("", path + dot)) + leaf
        if name not in state:
            state[name], origin[name] = weights[key], key
    translated = OrderedDict(state)
    metadata = getattr(match.state_dict, "_metadata", {})
    for path, module in model.named_modules():
        for hook in module._load_state_dict_pre_hooks.values():
            hook(translated, f"{path}." if path else "", metadata.get(path, {}), True, [], [], [])
    missing = [key for key in match.missing if key not in translated]
    unexpected = [key for name, key in origin.items() if name in translated]
    if len(missing) == len(match.missing):
        return match, OrderedDict(match.state_dict)
    found = match.matched + len(match.missing) - len(missing)
    unexpected += [key for key in match.unexpected if key not in origin.values()]
    return replace(match, missing=missing, unexpected=unexpected, matched=found), state


def equal_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same; tensors on meta, which hold nothing, are taken for different ones."""
    if first.is_meta or second.is_meta:
        return False
    second = second.to(first.device)
    if torch.equal(first, second) or not first.is_floating_point():
        return torch.equal(first, second)
    nan, other_nan = first.isnan(), second.isnan()  # not equal to itself, though a copy of it is the same
    same = torch.equal(nan, other_nan) and bool(nan.any())
    return same and torch.equal(first.masked_fill(nan, 0), second.masked_fill(nan, 0))

"""Which key of a checkpoint is which key of a model, from names and shapes alone (no torch)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.dist.wrappers import MODULE, RESERVED_COMPONENTS, WRAPPER_COMPONENTS

Shape = tuple[int, ...]
Rule = tuple["str | re.Pattern[str]", str]

# Entries under which scripts and trainers keep the weights, live ones first.
LIVE_ENTRIES = ("state_dict", "model_state_dict", "model", "module", "network", "net", "weights", "params")
AVERAGED_ENTRIES = ("ema", "model_ema", "ema_model", "ema_state_dict", "state_dict_ema", "params_ema")
# First components under which training scripts keep an averaged copy beside the live weights.
AVERAGED = frozenset(
    {"ema", "ema_model", "ema_module", "model_ema", "ema_net", "net_ema", "averaged_model", "avg_model"}
)
_AVERAGED_COUNTERS = frozenset({"n_averaged", "num_updates", "decay"})
_SAMPLES = 5


class StateDictError(ValueError):
    """A state dict that does not fit; the model has not been touched."""


class AmbiguousKeysError(StateDictError):
    """Two answers fit: two source keys for one target key, or two rewrites of equal worth."""


class FlattenedShardsError(StateDictError):
    """The file holds FSDP's flattened shards, which carry no parameter names at all."""


class NothingMatchedError(StateDictError):
    """Not one key matched: loading would have left the model as it was, without a word."""


@dataclass
class Pairing:
    """Outcome of `pair_keys`: source key to target key, and what is worth reporting."""

    pairs: dict[str, str] = field(default_factory=dict)
    rewrites: list[str] = field(default_factory=list)
    averaged: list[str] = field(default_factory=list)
    duplicates: dict[str, str] = field(default_factory=dict)  # second name of one tensor -> the name used
    unused_rules: list[str] = field(default_factory=list)
    hint: str = ""


def canonical_key(key: str) -> str:
    """`key` without wrapper components; the last component is a tensor's own name and stays.

    >>> canonical_key("module.net._orig_mod.fc.weight"), canonical_key("module_list.0.weight")
    ('net.fc.weight', 'module_list.0.weight')
    """
    *path, leaf = key.split(".")
    return ".".join([part for part in path if part not in WRAPPER_COMPONENTS] + [leaf])


def collapsed_keys(keys: Iterable[str]) -> dict[str, str]:
    """Keys without the wrappers that can be told from layers by structure; always one-to-one.

    Reserved components go; ``module`` goes only where it is its parent's sole child, since a wrapper
    holds nothing beside what it wraps::

        >>> collapsed_keys(["module.net.module.weight", "module.net.bias"])
        {'module.net.module.weight': 'net.module.weight', 'module.net.bias': 'net.bias'}
    """
    paths = {}
    children: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for key in keys:
        *path, leaf = key.split(".")
        parts = (*(part for part in path if part not in RESERVED_COMPONENTS), leaf)
        paths[key] = parts
        for end, part in enumerate(parts):
            children[parts[:end]].add(part)
    collapsed = {}
    for key, parts in paths.items():
        kept = [
            part
            for end, part in enumerate(parts)
            if part != MODULE or end == len(parts) - 1 or children[parts[:end]] != {MODULE}
        ]
        collapsed[key] = ".".join(kept)
    return collapsed


def fits(source: Shape | None, target: Shape | None) -> bool:
    """Whether a tensor can go there, as far as is known; a 1-element vector may become a scalar."""
    if source is None or target is None or source == target:
        return True
    return target == () and source == (1,)


def pair_keys(
    source: Mapping[str, Shape | None],
    target: Mapping[str, Shape | None],
    rules: Sequence[Rule] = (),
    same_tensor: Callable[[str, str], bool] = lambda first, second: False,
) -> Pairing:
    """Pair every source key with at most one target key, one-to-one.

    Args:
        source: Keys of the checkpoint with their shapes (None: unknown).
        target: Keys of the model with their shapes (None: unknown).
        rules: ``(regular expression, replacement)``, applied in order after wrappers are removed.
        same_tensor: Whether two source keys are two names of one tensor.

    Raises:
        FlattenedShardsError: The source holds FSDP's flattened shards.
        AmbiguousKeysError: Two answers fit.
    """
    _refuse_flattened(source, target)
    result = Pairing()
    names, result.unused_rules = _apply_rules(source, rules)
    targets: dict[str, list[str]] = defaultdict(list)
    for key in target:
        targets[canonical_key(key)].append(key)

    flat_targets = {key.replace(".", joint) for key in targets for joint in ("", "_")}
    averaged = {key for key, name in names.items() if _is_averaged(name, targets, flat_targets)}
    if all(
        key in averaged or not _is_weight(key) for key in names
    ):  # nothing but the average: it is what is meant
        averaged = {key for key in averaged if not _is_weight(key)}
    result.averaged = list(filter(averaged.__contains__, names))
    live = {key: name for key, name in names.items() if key not in averaged}

    search = _PrefixSearch(live, source, target, targets)
    moved, rewrite, result.hint = search.best()
    if rewrite:
        result.rewrites.append(rewrite)
    groups: dict[str, list[str]] = defaultdict(list)
    for key, name in moved.items():
        if name in targets:
            groups[name].append(key)
    chosen = _by_structure(groups, targets, source, target, {key: names[key] for key in moved})
    for name, keys in groups.items():
        _pair_group(keys, targets[name], chosen, same_tensor, result)
    result.rewrites[:0] = _describe_wrappers(result.pairs)
    return result


def _is_weight(key: str) -> bool:
    return key.rpartition(".")[2] not in _AVERAGED_COUNTERS


def _refuse_flattened(source: Iterable[str], target: Mapping[str, Shape | None]) -> None:
    flat = [
        key
        for key in source
        if key not in target and key.rpartition(".")[2].lstrip("_").startswith("flat_param")
    ]
    if flat:
        raise FlattenedShardsError(
            f"{flat[0]!r}{_more(flat)}: the checkpoint holds flattened FSDP shards. Their values are glued "
            "together without parameter names, so no renaming can fit them to this model.\n"
            "Fix: let the job that saved it write a full state dict (torch.distributed.checkpoint.state_dict."
            "get_model_state_dict with full_state_dict=True) or a torch.distributed.checkpoint folder."
        )


def _apply_rules(keys: Iterable[str], rules: Sequence[Rule]) -> tuple[dict[str, str], list[str]]:
    """Each key's name with the rules applied to its canonical form, and the rules that changed none."""
    compiled = _compiled(rules)
    used = [False] * len(compiled)
    names = {}
    for key in keys:
        name = key
        for number, (pattern, replacement) in enumerate(compiled):
            before = canonical_key(name)
            try:
                after = pattern.sub(replacement, before)
            except (re.error, IndexError) as error:  # a reference to a group that the pattern does not have
                raise StateDictError(
                    f"rename rule ({pattern.pattern!r}, {replacement!r}): {error}.\n"
                    "Fix: refer to groups of the pattern, \\1 being the first; double a backslash that is meant literally"
                ) from error
            if after != before:
                used[number], name = True, after
        names[key] = name
    return names, [pattern.pattern for (pattern, _), hit in zip(compiled, used, strict=True) if not hit]


def _compiled(rules: Sequence[Rule]) -> list[tuple[re.Pattern[str], str]]:
    """The rules, checked.

    Raises:
        StateDictError: They are no pairs of a regular expression and its replacement.
    """
    given: Any = rules
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]
    compiled: list[tuple[re.Pattern[str], Any]] = []
    for rule in listed:
        if not isinstance(rule, Sequence) or isinstance(rule, str | bytes) or len(rule) != 2:
            raise _no_rule(rule)
        pattern, replacement = rule
        try:
            compiled.append((re.compile(pattern), replacement))
        except re.error as error:
            raise StateDictError(
                f"rename rule {pattern!r} is not a regular expression: {error}.\nFix: escape what is meant "
                "literally with re.escape()"
            ) from error
        except TypeError:
            raise _no_rule(rule) from None
        text: Any = compiled[-1][0].pattern  # of bytes, where the rule was compiled from them
        if not isinstance(text, str) or not (isinstance(replacement, str) or callable(replacement)):
            raise _no_rule(rule)
    return compiled


def _no_rule(rule: object) -> StateDictError:
    return StateDictError(
        f"rules: {rule!r} is no rename rule.\nFix: a list of pairs (regular expression, replacement), such as "
        "rules=[('^backbone\\\\.', '')]"
    )


def _is_averaged(name: str, targets: Mapping[str, list[str]], flat_targets: Collection[str]) -> bool:
    canonical = canonical_key(name)
    if canonical in targets:
        return False
    if canonical == "n_averaged":
        return True
    if canonical.startswith("ema_") and "." not in canonical:  # a buffer, which may have no dot in its name
        return canonical.removeprefix("ema_") in flat_targets
    first, _, rest = canonical.partition(".")
    if first not in AVERAGED:
        return False
    return rest in targets or rest in _AVERAGED_COUNTERS or rest in flat_targets


class _PrefixSearch:
    """The constant prefix, if any, that one side has and the other lacks."""

    def __init__(
        self,
        names: Mapping[str, str],
        source: Mapping[str, Shape | None],
        target: Mapping[str, Shape | None],
        targets: Mapping[str, list[str]],
    ) -> None:
        self.canonical = {key: canonical_key(name) for key, name in names.items()}
        self.source, self.target, self.targets = source, target, targets

    def best(self) -> tuple[dict[str, str], str, str]:
        """Canonical target name per source key, the rewrite in words, and a hint for an error."""
        plain = sum(name in self.targets for name in self.canonical.values())
        if plain in (len(self.targets), len(self.canonical)):
            return dict(self.canonical), "", ""
        candidates = self._candidates()
        top = max(candidates.values(), default=0)
        winners = [change for change, count in candidates.items() if count == top > plain]
        if plain and top < len(self.targets):
            winners = []  # some names fit as they are: a prefix is believed only if it fills the model
        moves = {change: self._move(*change) for change in winners}
        distinct = {tuple(sorted(move.items())) for move in moves.values()}
        if len(distinct) > 1 and not plain:
            raise AmbiguousKeysError(
                f"{len(winners)} rewrites fit {top} of the model's {len(self.targets)} keys each: "
                f"{'; '.join(_in_words(*change) for change in winners[:_SAMPLES])}. Loading one of them would be "
                f"a guess.\nFix: name the one that is meant, e.g. rules=[{_as_rule(*winners[0])}]"
            )
        if len(distinct) == 1:
            change = min(winners, key=lambda pair: len(pair[0]) + len(pair[1]))
            return moves[change], f"{_in_words(*change)} ({top} of {len(self.canonical)} keys)", ""
        return dict(self.canonical), "", self._hint()

    def _fits(self, key: str, name: str) -> bool:
        return any(fits(self.source[key], self.target[t]) for t in self.targets.get(name, ()))

    def _candidates(self) -> dict[tuple[str, str], int]:
        """Changes ``(prefix removed, prefix added)`` and how many target keys each fills."""
        changes = Counter[tuple[str, str]]()
        for key, name in self.canonical.items():
            for prefix, rest in _splits(name):
                if self._fits(key, rest):
                    changes[prefix, ""] += 1
        by_name: dict[str, list[str]] = defaultdict(list)
        for key, name in self.canonical.items():
            by_name[name].append(key)
        for name in self.targets:
            for prefix, rest in _splits(name):
                if any(self._fits(key, name) for key in by_name.get(rest, ())):
                    changes["", prefix] += 1
        if (replaced := self._replacement()) is not None:
            changes[replaced] += len(self.targets)
        counts = {}
        for change in changes:
            moved = [name for name in self._move(*change).values() if name in self.targets]
            if len(set(moved)) == len(moved):  # two keys on one target is no answer
                counts[change] = len(moved)
        return counts

    def _move(self, removed: str, added: str) -> dict[str, str]:
        moved = {}
        for key, name in self.canonical.items():
            new = added + name.removeprefix(removed) if name.startswith(removed) else name
            moved[key] = new if self._fits(key, new) else name
        return moved

    def _replacement(self) -> tuple[str, str] | None:
        """One prefix for another, only where every key of both sides fits by name and known shape.

        A single tensor is no structure: any name would "fit" it, so at least two are asked for.
        """
        if len(self.canonical) != len(self.targets) or len(self.canonical) < 2:
            return None
        ours, theirs = _common_prefix(self.canonical.values()), _common_prefix(self.targets)
        suffixes = {name[len(ours) :]: key for key, name in self.canonical.items()}
        if not ours or not theirs or suffixes.keys() != {name[len(theirs) :] for name in self.targets}:
            return None
        for suffix, key in suffixes.items():
            shapes = [self.target[t] for t in self.targets[theirs + suffix]]
            if self.source[key] is None or None in shapes or self.source[key] not in shapes:
                return None
        return _without_common_end(ours, theirs)

    def _hint(self) -> str:
        """Names on both sides that end alike, and the rewrite they suggest, for the error message."""
        ends: dict[str, list[str]] = defaultdict(list)
        for name in self.targets:
            for _, rest in [("", name), *_splits(name)]:
                ends[rest].append(name)
        guesses = Counter[tuple[str, str]]()
        shared: list[str] = []
        for name in self.canonical.values():
            if name in self.targets:
                continue
            for removed, rest in [("", name), *_splits(name)]:
                # A lone last component (weight, bias) ends every layer's name: no evidence.
                if rest in ends and ("." in rest or rest == name):
                    added = {other[: len(other) - len(rest)] for other in ends[rest]}
                    guesses.update((removed, prefix) for prefix in added if (removed, prefix) != ("", ""))
                    shared.append(rest)
                    break
        if not shared or not guesses:
            return ""
        (change, count), *others = guesses.most_common(2)
        text = f"names on both sides end in {', '.join(map(repr, dict.fromkeys(shared[:_SAMPLES])))}"
        if others and others[0][1] == count:
            return f"{text}."
        return f"{text}; they would fit with {_in_words(*change)}.\nFix: if that is meant, pass rules=[{_as_rule(*change)}]"


def _splits(name: str) -> list[tuple[str, str]]:
    """Every way to cut a name at a dot: ("a.", "b.c"), ("a.b.", "c")."""
    return [(name[: dot + 1], name[dot + 1 :]) for dot, letter in enumerate(name) if letter == "."]


def _common_prefix(names: Iterable[str]) -> str:
    """The longest prefix of whole components that every name has and none consists of."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return "".join(f"{part}." for part in common)


def _without_common_end(ours: str, theirs: str) -> tuple[str, str]:
    first, second = ours.split(".")[:-1], theirs.split(".")[:-1]
    while first and second and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return "".join(f"{part}." for part in first), "".join(f"{part}." for part in second)


def _in_words(removed: str, added: str) -> str:
    if not added:
        return f"prefix {removed!r} removed"
    return f"prefix {added!r} added" if not removed else f"prefix {removed!r} -> {added!r}"


def _as_rule(removed: str, added: str) -> str:
    return f"({'^' + re.escape(removed)!r}, {added!r})"


def _by_structure(
    groups: Mapping[str, list[str]],
    targets: Mapping[str, list[str]],
    source: Mapping[str, Shape | None],
    target: Mapping[str, Shape | None],
    names: Mapping[str, str],
) -> dict[str, str]:
    """One consistent reading of ``module`` where it is a layer's name on one side: pairs for all keys.

    Reading 1 takes names as they are. Reading 2 drops ``module`` wherever it is its parent's only
    child. The one that fits more keys of the whole dict holds for all of it; exact names win a tie.
    """
    if all(len(keys) == 1 and len(targets[name]) == 1 for name, keys in groups.items()):
        return {}
    exact = {key: name for key, name in names.items() if name in target and fits(source[key], target[name])}
    by_collapsed = {collapsed: key for key, collapsed in collapsed_keys(target).items()}
    ours = collapsed_keys(names.values())
    collapsed = {}
    for key, name in names.items():
        found = by_collapsed.get(ours[name])
        if found is not None and fits(source[key], target[found]):
            collapsed[key] = found
    return collapsed if len(collapsed) > len(exact) else exact


def _pair_group(
    keys: Sequence[str],
    wanted: Sequence[str],
    chosen: Mapping[str, str],
    same_tensor: Callable[[str, str], bool],
    result: Pairing,
) -> None:
    """Pair source keys and target keys that are equal but for wrapper components."""
    if len(keys) == 1 and len(wanted) == 1:
        result.pairs[keys[0]] = wanted[0]
        return
    taken: dict[str, str] = {}
    rest = []
    for key in keys:
        name = chosen.get(key)
        if name in wanted and name is not None and name not in taken:
            taken[name] = key
        else:
            rest.append(key)
    free = [name for name in wanted if name not in taken]
    if not taken and len(free) == 1 and all(same_tensor(rest[0], key) for key in rest[1:]):
        taken[free.pop()] = rest.pop(0)
    for key in rest:
        twin = next((other for other in taken.values() if same_tensor(other, key)), None)
        if twin is None:
            names = [*taken.values(), *rest] if not free else rest
            raise AmbiguousKeysError(
                f"{' and '.join(map(repr, names[:_SAMPLES]))} would all be loaded as "
                f"{' or '.join(map(repr, list(wanted)[:_SAMPLES]))}: they differ only in wrapper components, and "
                "the last one would silently win.\n"
                "Fix: pass a mapping without the keys that are not meant, or rules=[...] that tell them apart"
            )
        result.duplicates[key] = twin
    result.pairs.update({key: name for name, key in taken.items()})


def _describe_wrappers(pairs: Mapping[str, str]) -> list[str]:
    removed, added = Counter[str](), Counter[str]()
    for key, name in pairs.items():
        before, after = Counter(key.split(".")[:-1]), Counter(name.split(".")[:-1])
        removed.update(part for part in (before - after) if part in WRAPPER_COMPONENTS)
        added.update(part for part in (after - before) if part in WRAPPER_COMPONENTS)
    lines = [f"{part!r} removed from {count} of {len(pairs)} keys" for part, count in removed.items()]
    return lines + [f"{part!r} added to {count} of {len(pairs)} keys" for part, count in added.items()]


def _more(items: Sequence[str]) -> str:
    return f" and {len(items) - 1} more" if len(items) > 1 else ""


def sample_names(keys: Iterable[str]) -> str:
    """Up to five names, and how many there are beyond."""
    names = list(keys)
    text = ", ".join(map(repr, names[:_SAMPLES]))
    return text + (f" and {len(names) - _SAMPLES} more" if len(names) > _SAMPLES else "") if names else "none"

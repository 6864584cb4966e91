"""What came of matching a checkpoint with a model, and how it is told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.dist.key_rewrites import Pairing, Shape, StateDictError, canonical_key, sample_names


class Mismatch(NamedTuple):
    """A key whose tensor has another shape in the source than in the model."""

    key: str
    source_shape: Shape
    target_shape: Shape


@dataclass(frozen=True, kw_only=True)
class Match:
    """What `match_state_dict` found; printed, it tells what was done.

    >>> from phalanx.dist.state_dict import match_state_dict
    >>> match = match_state_dict({"module.w": 1, "module.old": 2}, ["w", "new"])
    >>> match.matched, match.missing, match.unexpected, match.rewrites
    (1, ['new'], ['module.old'], ["'module' removed from 1 of 1 keys"])

    Attributes:
        state_dict: The source's tensors under the target's keys (the same tensors, not copies).
        renamed: Source key to target key, where the two differ.
        missing: Target keys that nothing was found for (a tied name whose twin was found is not missing).
        unexpected: Source keys that the target does not have.
        mismatched: Keys found with another shape.
        rewrites: In words, what was done to the keys.
        averaged: Source keys of a moving average kept beside the live weights, left out.
        container: Entry of the source that held the weights; None when they were at the top.
        other_containers: Entries with tensors that were not used.
        unused_rules: Patterns of the rules that changed no key.
        matched: Number of target keys found.
    """

    state_dict: OrderedDict[str, Any]
    renamed: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[Mismatch]
    rewrites: list[str]
    averaged: list[str] = field(default_factory=list)
    container: str | None = None
    other_containers: list[str] = field(default_factory=list)
    unused_rules: list[str] = field(default_factory=list)
    matched: int = 0

    def __str__(self) -> str:
        lines = [
            f"{self.matched} keys matched, {len(self.renamed)} of them renamed, {len(self.missing)} missing, "
            f"{len(self.unexpected)} unexpected, {len(self.mismatched)} of another shape"
        ]
        if self.container is not None:
            lines.append(f"weights taken from the entry {self.container!r}")
        if self.other_containers:
            lines.append(f"not used: the entries {sample_names(self.other_containers)}")
        lines += self.rewrites
        if self.averaged:
            lines.append(f"left out as a moving average: {sample_names(self.averaged)}")
        if self.unused_rules:
            lines.append(f"rules that changed no key: {sample_names(self.unused_rules)}")
        return "\n".join(lines)


class KeysDifferError(StateDictError):
    """Keys are missing, unexpected or of another shape; `.match` tells which. The model is untouched."""

    def __init__(self, message: str, match: Match) -> None:
        super().__init__(message)
        self.match = match


def shape_text(shape: Shape) -> str:
    """A shape as a message shows it."""
    return str(list(shape))


def first_lines(lines: Sequence[str], count: int = 5) -> str:
    """The first few, and how many more there are."""
    return "; ".join(lines[:count]) + (f"; and {len(lines) - count} more" if len(lines) > count else "")


def nothing_matched(
    name: str, weights: Mapping[str, Any], values: Mapping[str, Any], pairing: Pairing, container: str | None
) -> str:
    entry = f" (entry {container!r})" if container else ""
    lines = [
        f"{name}{entry}: none of its {len(weights)} keys is one of the model's {len(values)}.",
        f"  checkpoint: {sample_names(weights)}",
        f"  model:      {sample_names(values)}",
        "The model would have kept its initial values.",
    ]
    elsewhere = _likely_place(weights)
    if elsewhere:
        lines.append(elsewhere)
    elif pairing.hint:
        lines.append(pairing.hint[0].upper() + pairing.hint[1:])
    else:
        lines.append(
            "Fix: is this the checkpoint of this model? If its layers were renamed, pass rules=[(pattern, new)]"
        )
    return "\n".join(lines)


def _likely_place(source: Mapping[str, Any]) -> str:
    """Where the weights are rather, in words, for what is plainly something else; empty when nothing tells."""
    if "param_groups" in source and "state" in source:
        return "It is an optimizer's state.\nFix: pass the model's state dict"
    for key, value in source.items():
        if isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
            return f"{key!r} holds a list of {len(value)} dicts.\nFix: pass the one that is meant, e.g. source[{key!r}][0]"
    return ""


def keys_differ(name: str, problems: Sequence[str], match: Match, pairing: Pairing) -> KeysDifferError:
    total = match.matched + len(match.missing)
    lines = [f"{name}: {match.matched} of the model's {total} keys found; the model was left as it is."]
    lines += [f"  {problem}" for problem in problems]
    if match.container is not None:
        lines.append(f"  (weights taken from the entry {match.container!r})")
    if pairing.hint and match.missing:
        lines.append(pairing.hint[0].upper() + pairing.hint[1:])
    if match.unused_rules:
        lines.append(f"Rules that changed no key: {sample_names(match.unused_rules)}")
    fixes = []
    if match.mismatched and match.state_dict:
        fixes.append("ignore_mismatched=True keeps the model's own values where shapes differ")
    if match.missing or match.unexpected:
        fixes.append("strict=False loads what fits")
    meant = " If it is meant, " + "; ".join(fixes) if fixes else ""
    lines.append(f"Fix: is this the checkpoint of this model?{meant}")
    return KeysDifferError("\n".join(lines), match)


def renamed_metadata(metadata: Mapping[str, Any], pairs: Mapping[str, str]) -> OrderedDict[str, Any]:
    """Version entries of sub-modules, under the names that their modules have in the target."""
    modules: dict[str, str] = {}
    for key, found in pairs.items():
        ours, theirs = key.split(".")[:-1], found.split(".")[:-1]
        modules.setdefault(".".join(ours), ".".join(theirs))
        while ours and theirs and ours[-1] == theirs[-1]:  # parents correspond as far as the names do
            ours, theirs = ours[:-1], theirs[:-1]
            modules.setdefault(".".join(ours), ".".join(theirs))
    renamed: OrderedDict[str, Any] = OrderedDict()
    if "" in metadata:
        renamed[""] = metadata[""]
    for path, entry in metadata.items():
        if path in modules:
            renamed[modules[path]] = entry
    for path, entry in metadata.items():
        if path and path not in modules:
            renamed.setdefault(canonical_key(f"{path}.x").removesuffix(".x").removesuffix("x"), entry)
    return renamed

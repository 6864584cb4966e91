"""`phalanx ckpt diff`: what two checkpoints do not have in common, down to the values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.dist.key_rewrites import StateDictError
from phalanx.tools.ckpt.contents import Contents, Entry
from phalanx.tools.ckpt.dtypes import item_bytes
from phalanx.tools.ckpt.errors import BadCheckpoint
from phalanx.tools.ckpt.reading import ValueReader, numbers, paired
from phalanx.tools.ckpt.weights import Weights, match_weights, pick


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both.

    Attributes:
        key: Its key in the first checkpoint.
        what: ``shape``, ``dtype``, ``values`` or ``unreadable``.
        first: Shape and dtype in the first.
        second: Shape and dtype in the second.
        count: Elements that differ.
        max_abs: The largest difference; None where NaN or infinity meets something else.
        max_rel: The largest relative to the first's values.
    """

    key: str
    what: str
    first: str
    second: str
    count: int = 0
    max_abs: float | None = None
    max_rel: float | None = None


@dataclass(frozen=True)
class Compared:
    """What two checkpoints do not have in common.

    Attributes:
        only_first: Keys of the first alone.
        only_second: Keys of the second alone.
        different: Tensors under a common key that differ.
        equal: How many are the same.
        other: Paths of other values that differ, with both.
        renamed: Keys of the first and what they are in the second, where they were matched through wrappers.
        rewrites: In words, how.
    """

    only_first: list[str]
    only_second: list[str]
    different: list[Difference]
    equal: int
    other: list[tuple[str, Any, Any]]
    renamed: dict[str, str] = field(default_factory=dict)
    rewrites: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return not (self.only_first or self.only_second or self.different or self.other)


def diff(
    first: Contents,
    second: Contents,
    *,
    values: bool = True,
    weights_only: bool = False,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> Compared:
    """Compare two checkpoints, of whatever formats.

    Args:
        first: From `open_checkpoint`, with ``values=True`` if values shall be compared.
        second: Likewise.
        values: Compare values, not only keys, shapes and dtypes.
        weights_only: Compare the model's weights alone, key by key through wrappers and prefixes.
        atol: Numbers that differ by at most ``atol + rtol * abs(first)`` are the same; NaN is NaN.
        rtol: See `atol`.
    """
    renamed: dict[str, str] = {}
    rewrites: list[str] = []
    if weights_only:
        ours, theirs = pick(first, pick(second).shapes), pick(second)
        pairs, renamed, rewrites = _through_wrappers(ours, theirs)
        left, right = dict(ours.entries), dict(theirs.entries)
    else:
        left, right = ({entry.key: entry for entry in contents.entries} for contents in (first, second))
        pairs = {key: key for key in left if key in right}
    different = []
    with ValueReader() as one, ValueReader() as two:
        for key, other in pairs.items():
            found = _compare(key, left[key], right[other], (one, two) if values else None, atol, rtol)
            different += [found] if found is not None else []
    taken = set(pairs.values())
    return Compared(
        only_first=[key for key in left if key not in pairs],
        only_second=[key for key in right if key not in taken],
        different=different,
        equal=len(pairs) - len(different),
        other=[] if weights_only else list(_other_differences(first.other, second.other)),
        renamed=renamed,
        rewrites=rewrites,
    )


def fixable(first: Contents, second: Contents) -> str:
    """A word of help where two checkpoints share no key: what would make the first's keys the second's."""
    try:
        match, _ = match_weights(pick(first, pick(second).shapes), pick(second).shapes)
    except StateDictError:
        return ""
    return "; ".join(match.rewrites) if match.matched else ""


def _through_wrappers(ours: Weights, theirs: Weights) -> tuple[dict[str, str], dict[str, str], list[str]]:
    match, pairing = match_weights(ours, theirs.shapes)
    return pairing.pairs, match.renamed, match.rewrites


def _described(entry: Entry) -> str:
    return f"{list(entry.shape)} {entry.dtype}"


def _compare(
    key: str,
    first: Entry,
    second: Entry,
    readers: tuple[ValueReader, ValueReader] | None,
    atol: float,
    rtol: float,
) -> Difference | None:
    names = (_described(first), _described(second))
    if first.shape != second.shape:
        return Difference(key, "shape", *names)
    loose = bool(atol or rtol)
    if first.dtype != second.dtype and not loose:
        return Difference(key, "dtype", *names)
    if readers is None or not first.count:
        return None
    try:
        count, largest, relative = _values(first, second, readers, atol, rtol)
    except BadCheckpoint as error:
        if not first.readable and not second.readable:
            return None
        return Difference(key, "unreadable", names[0], error.problem)
    if not count:
        return None
    finite = [value if math.isfinite(value) else None for value in (largest, relative)]
    return Difference(key, "values", *names, count, *finite)


def _values(
    first: Entry, second: Entry, readers: tuple[ValueReader, ValueReader], atol: float, rtol: float
) -> tuple[int, float, float]:
    count, largest, relative = 0, 0.0, 0.0
    if first.dtype == second.dtype:
        streams = paired(readers[0].pieces(first), readers[1].pieces(second), item_bytes(first.dtype))
    else:
        streams = _together(readers[0].pieces(first), readers[1].pieces(second), first.dtype, second.dtype)
    for one, two in streams:
        if first.dtype == second.dtype and one == two:
            continue
        left, right = numbers(one, first.dtype), numbers(two, second.dtype)
        wide: Any = np.complex128 if "c" in (left.dtype.kind, right.dtype.kind) else np.float64
        if left.dtype.kind in "iub" and right.dtype.kind in "iub" and not (atol or rtol):
            differ = left != right
        else:
            a, b = left.astype(wide), right.astype(wide)
            with np.errstate(all="ignore"):
                near = np.abs(a - b) <= atol + rtol * np.abs(a)
            differ = ~((a == b) | near | (np.isnan(a) & np.isnan(b)))
        count += int(differ.sum())
        if differ.any():
            with np.errstate(all="ignore"):
                gap = np.abs(left[differ].astype(wide) - right[differ].astype(wide))
                size = np.abs(left[differ].astype(wide))
                parts = np.where(size > 0, gap / np.where(size > 0, size, 1), np.inf)
            largest = max(largest, float(gap.max()) if not np.isnan(gap).any() else math.inf)
            relative = max(relative, float(parts.max()) if not np.isnan(parts).any() else math.inf)
    return count, largest, relative


def _together(first: Any, second: Any, one: str, two: str) -> Any:
    """Streams of elements of different widths, cut at the same elements."""
    left, right = b"", b""
    widths = item_bytes(one), item_bytes(two)
    while True:
        left, right = left or next(first, b""), right or next(second, b"")
        while len(left) < widths[0] and (more := next(first, b"")):
            left += more
        while len(right) < widths[1] and (more := next(second, b"")):
            right += more
        count = min(len(left) // widths[0], len(right) // widths[1])
        if not count:
            return
        yield left[: count * widths[0]], right[: count * widths[1]]
        left, right = left[count * widths[0] :], right[count * widths[1] :]


def _other_differences(first: Any, second: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        found = []
        for name in dict.fromkeys([*first, *second]):
            inner = f"{path}.{name}" if path else str(name)
            found += _other_differences(first.get(name, _ABSENT), second.get(name, _ABSENT), inner)
        return found
    if (
        isinstance(first, Sequence)
        and isinstance(second, Sequence)
        and not isinstance(first, str)
        and first != second
    ):
        return [(path, _short(first), _short(second))]
    return [] if first == second else [(path, _short(first), _short(second))]


_ABSENT = "(absent)"


def _short(value: Any) -> Any:
    text = json.dumps(value, default=str)
    return value if len(text) < 200 else f"{text[:200]}..."

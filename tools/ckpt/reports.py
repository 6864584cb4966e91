"""What the subcommands of `phalanx ckpt` print for people, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.tools.ckpt.contents import Contents, Entry
from phalanx.tools.ckpt.errors import shown

if TYPE_CHECKING:
    from phalanx.tools.ckpt.converting import Converted
    from phalanx.tools.ckpt.differing import Compared
    from phalanx.tools.ckpt.fixing import Fixed
    from phalanx.tools.ckpt.inspecting import Statistics
    from phalanx.tools.ckpt.verifying import Verified

_LISTED = 20


def size_text(count: int) -> str:
    """Bytes in decimal units: 4,000,000,000 bytes are 4.00 GB.

    >>> size_text(512), size_text(46_797_120)
    ('512 B', '46.8 MB')
    """
    if count < 1000:
        return f"{count} B"
    value, units = float(count), ["kB", "MB", "GB", "TB", "PB", "EB"]
    unit = ""
    while units and (not unit or value >= 999.5):
        value, unit = value / 1000, units.pop(0)
    return f"{value:.3g} {unit}"


def inspect_text(
    contents: Contents, entries: list[Entry], stats: Mapping[str, Statistics | str] | None
) -> Iterator[str]:
    """Lines for a terminal."""
    kind = contents.format
    if "container" in contents.facts:
        kind += f" in {contents.facts['container']}"
    total = len(contents.entries)
    yield f"{shown(str(contents.path))}: {kind}, {total} tensor{'s' * (total != 1)}, {size_text(contents.total_bytes)}"
    for name, value in contents.facts.items():
        if name not in ("folder", "container"):
            yield f"  {name}: {shown(str(value))}"
    yield from _table(entries, stats)
    if contents.other not in (None, {}, []):
        yield "other:"
        yield from _outline(contents.other, "  ")
    if contents.code:
        yield f"needs code to load in full (weights_only refuses it): {_few(contents.code)}"
    for problem in contents.problems:
        yield f"problem: {problem}"


def _table(entries: list[Entry], stats: Mapping[str, Statistics | str] | None) -> Iterator[str]:
    rows = [
        (shown(entry.key), str(list(entry.shape)), entry.dtype, size_text(entry.bytes)) for entry in entries
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    widths[0] = min(widths[0], 80)
    for row, entry in zip(rows, entries, strict=True):
        cells = [f"{cell:{width}}" for cell, width in zip(row[:3], widths, strict=False)]
        notes = [f"same as {shown(entry.shared_with)}"] if entry.shared_with else []
        notes += [entry.note] if entry.note else []
        notes += [_stats_text(stats[entry.key])] if stats and entry.key in stats else []
        yield "  ".join(["", *cells, f"{row[3]:>{widths[3]}}", *notes]).rstrip()


def _stats_text(found: Statistics | str) -> str:
    if isinstance(found, str):
        return f"({found})"
    words = [f"NaN {found.nan}", f"Inf {found.inf}"] if found.nan or found.inf else []
    if found.minimum is not None and found.maximum is not None:
        words.append(f"{found.minimum:.4g} to {found.maximum:.4g}")
    if found.mean is not None:
        words.append(f"mean {found.mean:.4g}")
    return ", ".join(words)


def _outline(value: Any, indent: str) -> Iterator[str]:
    """Nested values, a line each; long ones on one line."""
    items = value.items() if isinstance(value, dict) else [("", value)]
    for name, entry in items:
        label = f"{indent}{shown(str(name))}: " if name != "" else indent
        text = json.dumps(entry, default=str)
        if isinstance(entry, dict) and entry and len(text) > 80:
            yield label.rstrip()
            yield from _outline(entry, indent + "  ")
        else:
            yield label + shown(text, 160)


def _few(names: Any, count: int = 5) -> str:
    names = [shown(name) for name in names]
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def fix_json(fixed: Fixed) -> dict[str, Any]:
    """The object that `fix --json` prints."""
    match = fixed.match
    return {
        "schema": 1,
        "output": None if fixed.output is None else str(fixed.output),
        "matched": match.matched,
        "renamed": match.renamed,
        "missing": match.missing,
        "unexpected": match.unexpected,
        "mismatched": [
            {"key": found.key, "shape": list(found.source_shape), "wanted": list(found.target_shape)}
            for found in match.mismatched
        ],
        "rewrites": match.rewrites,
        "averaged": match.averaged,
        "container": match.container,
        "left_out": fixed.left_out,
        "unused_rules": match.unused_rules,
    }


def fix_text(fixed: Fixed) -> Iterator[str]:
    """Lines for a terminal."""
    match = fixed.match
    yield f"{fixed.output}: {len(match.state_dict)} tensors, {len(match.renamed)} of them renamed"
    if match.container:
        yield f"  weights taken from the entry {shown(match.container)!r}"
    for rewrite in match.rewrites:
        yield f"  {shown(rewrite)}"
    for label, names in (
        ("left out", fixed.left_out),
        ("missing", match.missing),
        ("unexpected", match.unexpected),
    ):
        if names:
            yield f"  {label}: {_few(names)}"
    if match.unused_rules:
        yield f"  rules that changed no key: {_few(match.unused_rules)}"


def diff_json(compared: Compared) -> dict[str, Any]:
    """The object that `diff --json` prints."""
    return {
        "schema": 1,
        "same": compared.same,
        "equal": compared.equal,
        "only_first": compared.only_first,
        "only_second": compared.only_second,
        "different": [vars(found) for found in compared.different],
        "other": [{"path": path, "first": one, "second": two} for path, one, two in compared.other],
        "renamed": compared.renamed,
    }


def diff_text(compared: Compared, hint: str, show_all: bool) -> Iterator[str]:
    """Lines for a terminal: the first few of each kind."""
    limit = 10**9 if show_all else _LISTED
    for mark, names in (("-", compared.only_first), ("+", compared.only_second)):
        yield from (f"{mark} {shown(name)}" for name in names[:limit])
        if len(names) > limit:
            yield f"{mark} ... {len(names) - limit} more"
    for found in compared.different[:limit]:
        yield f"~ {shown(found.key)}: {_difference(found)}"
    if len(compared.different) > limit:
        yield f"~ ... {len(compared.different) - limit} more"
    for path, one, two in compared.other[:limit]:
        yield f"~ {shown(path)}: {shown(json.dumps(one, default=str), 80)} -> {shown(json.dumps(two, default=str), 80)}"
    counts = [
        f"{compared.equal} tensors equal",
        f"{len(compared.different)} differ",
        f"{len(compared.only_first)} only in the first",
        f"{len(compared.only_second)} only in the second",
    ]
    yield ", ".join(counts) + (f", {len(compared.other)} other values differ" if compared.other else "")
    yield from (f"matched with {shown(rewrite)}" for rewrite in compared.rewrites)
    if hint:
        yield f"The keys would be the same with: {shown(hint)} (--weights compares them so, `phalanx ckpt fix` writes them so)"


def _difference(found: Any) -> str:
    if found.what in ("shape", "dtype"):
        return f"{found.first} -> {found.second}"
    if found.what == "unreadable":
        return shown(found.second)
    largest = "NaN or Inf against a number" if found.max_abs is None else f"by at most {found.max_abs:.4g}"
    relative = "" if found.max_rel is None else f" (relative {found.max_rel:.2g})"
    return f"{found.count} elements differ, {largest}{relative}"


def convert_json(converted: Converted) -> dict[str, Any]:
    """The object that `convert --json` prints."""
    return {"schema": 1, **vars(converted), "output": str(converted.output)}


def convert_text(converted: Converted) -> Iterator[str]:
    """Lines for a terminal."""
    yield f"{converted.output}: {converted.tensors} tensors"
    if converted.container:
        yield f"  weights taken from the entry {shown(converted.container)!r}"
    if converted.left_out:
        yield f"  left out: {_few(converted.left_out)}"
    if converted.ties and converted.kind == "safetensors":
        yield f"  written under each of its names, since safetensors knows no shared tensors: {_few(converted.ties)}"


def verify_json(path: str, verified: Verified) -> dict[str, Any]:
    """The object that `verify --json` prints."""
    return {"schema": 1, "path": path, "ok": not verified.problems, **vars(verified)}


def verify_text(path: str, verified: Verified) -> Iterator[str]:
    """Lines for a terminal."""
    state = (
        "whole"
        if not verified.problems
        else f"{len(verified.problems)} problem{'s' * (len(verified.problems) != 1)}"
    )
    yield f"{shown(path)}: {verified.format}, {size_text(verified.bytes)}: {state}"
    yield f"  checked: {verified.checked}"
    yield from (f"  {shown(problem)}" for problem in verified.problems[:50])

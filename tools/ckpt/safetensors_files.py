"""safetensors files: the header alone tells where every tensor is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.tools.ckpt.contents import Entry, Extent, Piece, View
from phalanx.tools.ckpt.dtypes import FROM_SAFETENSORS, SUB_BYTE
from phalanx.tools.ckpt.errors import CUT_FIX, BadCheckpoint, shown
from phalanx.tools.ckpt.torch_values import MAX_DIMS, MAX_SIDE
from phalanx.tools.ckpt.zip_reading import FileReader

HEADER_LIMIT = 32 << 20  # a quarter of a million tensors; safetensors itself allows 100 MB


@dataclass(frozen=True)
class SafetensorsFile:
    """A safetensors file's header, read."""

    path: Path
    entries: list[Entry]
    metadata: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_safetensors(path: Path, prefix: str = "") -> SafetensorsFile:
    """Its tensors and metadata; aliases that phalanx notes there are entries of their own.

    Raises:
        BadCheckpoint: The header is cut, too long, or makes no sense.
    """
    with FileReader(path) as reader:
        header, start = _header(reader)
        metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else {}
        if not isinstance(metadata, dict):
            metadata = {}
        entries = [_entry(reader, prefix, key, entry, start) for key, entry in header.items()]
        problems = _layout_problems(entries, start, reader.size)
    text = {key: value for key, value in metadata.items() if isinstance(value, str)}
    entries += _aliases(entries, text, prefix)
    return SafetensorsFile(path, entries, text, tuple(problems))


def _header(reader: FileReader) -> tuple[dict[str, Any], int]:
    if reader.size < 8:
        raise BadCheckpoint(
            reader.path, f"has {reader.size} bytes, too few for a header: cut short.", fix=CUT_FIX
        )
    length = int.from_bytes(reader.read(0, 8), "little")
    if length > HEADER_LIMIT:
        raise BadCheckpoint(
            reader.path,
            f"its header would have {length:,} bytes, and at most {HEADER_LIMIT:,} are read.",
            fix=CUT_FIX,
        )
    if 8 + length > reader.size:
        raise BadCheckpoint(
            reader.path, f"its header of {length:,} bytes is cut: the file has {reader.size:,}.", fix=CUT_FIX
        )
    try:
        header = json.loads(str(reader.read(8, length), "utf-8"), object_pairs_hook=_unique)
    except _Twice as error:
        raise BadCheckpoint(
            reader.path, f"its header names {shown(str(error))!r} twice.", fix=CUT_FIX
        ) from None
    except (ValueError, RecursionError):
        raise BadCheckpoint(reader.path, "its header is no JSON: damaged.", fix=CUT_FIX) from None
    if not isinstance(header, dict):
        raise BadCheckpoint(reader.path, "its header is no JSON object: damaged.", fix=CUT_FIX)
    return header, 8 + length


class _Twice(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return found


def _entry(reader: FileReader, prefix: str, key: str, entry: Any, start: int) -> Entry:
    try:
        short, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        dtype = FROM_SAFETENSORS.get(short) or (short if short in SUB_BYTE else None)
        numbers = [*shape, begin, end]
        if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < MAX_SIDE for n in numbers):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise BadCheckpoint(
            reader.path, f"its header's entry {shown(key)!r} makes no sense: damaged.", fix=CUT_FIX
        ) from None
    if dtype is None:
        raise BadCheckpoint(
            reader.path, f"{shown(key)!r} is of a type {shown(str(short), 40)!r} that nobody knows."
        )
    full = prefix + key
    extent = Extent(reader.path, start + begin, end - begin)
    described = Entry(full, dtype, shape)
    problem = ""
    if end < begin or described.bytes != end - begin:
        problem = f"its {list(shape)} of {dtype} take {described.bytes} bytes, {end - begin} are reserved"
    elif start + end > reader.size:
        problem = f"it would end at byte {start + end}, the file has {reader.size}: cut off"
    stride = contiguous(shape)
    pieces = (Piece((0,) * len(shape), View(extent, 0, stride, shape)),)
    return Entry(full, dtype, shape, pieces, problem=problem)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    stride, step = [], 1
    for side in reversed(shape):
        stride.append(step)
        step *= max(side, 1)
    return tuple(reversed(stride))


def _layout_problems(entries: list[Entry], start: int, size: int) -> list[str]:
    """safetensors allows neither gaps nor overlaps."""
    position = start
    for entry in sorted(entries, key=lambda entry: (entry.pieces[0].view.extent.start, entry.bytes)):
        extent = entry.pieces[0].view.extent
        if extent.start != position:
            what = "overlaps" if extent.start < position else "has a gap before"
            return [f"the data {what} {shown(entry.key)!r}"]
        position = extent.start + max(extent.length, 0)
    if position < size:
        return [f"{size - position} bytes follow the last tensor"]
    return []


def json_table(text: str | None) -> dict[str, str]:
    """A table that phalanx keeps as text in a file's metadata; {} for none."""
    try:
        table = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(table, dict):
        return {}
    return {key: value for key, value in table.items() if isinstance(value, str)}


def _aliases(entries: list[Entry], metadata: Mapping[str, str], prefix: str) -> list[Entry]:
    by_key = {entry.key: entry for entry in entries}
    found = []
    for alias, key in json_table(metadata.get("aliases")).items():
        target = by_key.get(prefix + key)
        if target is not None and prefix + alias not in by_key:
            found.append(Entry(**{**vars(target), "key": prefix + alias, "shared_with": target.key}))
    return found

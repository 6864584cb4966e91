"""What a checkpoint holds, whatever its format: tensors and where their bytes are, and the other values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.tools.ckpt.dtypes import BITS, size_bytes


@dataclass(frozen=True)
class Extent:
    """Bytes of a file.

    Attributes:
        header: True when `start` is that of a zip record's local header, behind which the bytes lie.
        deflated: The bytes are compressed to `stored` bytes.
        crc: The checksum of all its bytes, where the file has one.
    """

    path: Path
    start: int
    length: int
    header: bool = False
    deflated: bool = False
    stored: int = 0
    crc: int | None = None


@dataclass(frozen=True)
class View:
    """A strided part of an extent, counted in elements."""

    extent: Extent
    offset: int
    stride: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that is stored in several."""

    offsets: tuple[int, ...]
    view: View


@dataclass(frozen=True)
class Entry:
    """One tensor.

    Attributes:
        key: Its path through the file's dicts, joined by dots; in a folder of several files with the part in front.
        pieces: Where its values are, one piece for the whole of it as a rule; empty where there are none.
        shared_with: The first key of the same tensor, where two names stand for one.
        storage: Tensors with the same mark share memory in the file.
        problem: Why its values cannot be read.
        note: What is special about it.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    shared_with: str | None = None
    storage: str | None = None
    problem: str = ""
    note: str = ""

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return size_bytes(self.dtype, self.count)

    @property
    def readable(self) -> bool:
        return bool(self.pieces) and not self.problem and self.dtype in BITS


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint, described.

    Attributes:
        path: What was opened.
        format: ``torch-zip``, ``torch-legacy``, ``safetensors``, ``dcp``, ``deepspeed``, ``lightning`` ...
        entries: All tensors, in file order.
        other: Everything that is no tensor, as JSON would hold it, shortened where it is long.
        facts: What the format tells beside that: world size, versions.
        code: Names in pickles that are neither torch's nor plain: loading the file in full would import them.
        root: The description in the pickle of a single torch file.
        storages: Its storages' bytes, by the key that the pickle gives them.
        problems: What is wrong, though the rest could be read.
        files: What it is made of, where that is several files.
    """

    path: Path
    format: str
    entries: list[Entry]
    other: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    root: Any = None
    storages: Mapping[str, Extent] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, shared ones counted once."""
        seen: dict[str, int] = {}
        total = 0
        for entry in self.entries:
            if entry.shared_with is not None:
                continue
            if entry.storage is None:
                total += entry.bytes
            else:
                seen[entry.storage] = max(seen.get(entry.storage, 0), _reach(entry))
        return total + sum(seen.values())


def _reach(entry: Entry) -> int:
    """Bytes of its storage that a tensor uses: fewer than its own size when it is expanded."""
    if not entry.count or not entry.pieces:
        return 0
    view = entry.pieces[0].view
    span = sum((side - 1) * step for side, step in zip(view.shape, view.stride, strict=True)) + 1
    return size_bytes(entry.dtype, min(span, entry.count))

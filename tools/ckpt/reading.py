"""Tensors' values, a few MB at a time and in logical order, whatever way they lie in the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.tools.ckpt.contents import Entry, Extent, View
from phalanx.tools.ckpt.dtypes import NUMPY, item_bytes
from phalanx.tools.ckpt.errors import BadCheckpoint, shown
from phalanx.tools.ckpt.safetensors_files import contiguous
from phalanx.tools.ckpt.zip_reading import FileReader

PIECE_BYTES = 4 << 20
_WHOLE_LIMIT = 2 << 30  # what may be put together in memory when the parts lie criss-cross
_MAX_EXPANSION = 4
Raw = NDArray[np.void]


class ValueReader:
    """Reads entries of a checkpoint; its files stay open until it is closed."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._readers: dict[Path, FileReader] = {}

    def __enter__(self) -> ValueReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def reader(self, path: Path) -> FileReader:
        """The open file at `path`."""
        if path not in self._readers:
            if len(self._readers) > 200:  # sharded by thousands of ranks: stay below the limit on open files
                self._stack.close()
                self._readers.clear()
            self._readers[path] = self._stack.enter_context(FileReader(path))
        return self._readers[path]

    def pieces(self, entry: Entry) -> Iterator[bytes]:
        """The entry's bytes as a tensor without gaps would have them.

        Raises:
            BadCheckpoint: They are not all there.
        """
        if not entry.readable:
            raise BadCheckpoint(
                entry.key, f"its values cannot be read: {entry.problem or entry.note or 'they are not here'}."
            )
        if not entry.count:
            return
        if len(entry.pieces) == 1 and entry.pieces[0].view.shape == entry.shape:
            yield from self._view(entry, entry.pieces[0].view)
        elif _in_rows(entry):
            for piece in sorted(entry.pieces, key=lambda piece: piece.offsets):
                yield from self._view(entry, piece.view)
        else:
            yield self._assembled(entry)

    def _view(self, entry: Entry, view: View) -> Iterator[bytes]:
        if 0 in view.shape:
            return
        width = item_bytes(entry.dtype)
        reader = self.reader(view.extent.path)
        if view.stride == contiguous(view.shape) or _one_long(view):
            yield from _run(reader, view.extent, view.offset * width, _count(view.shape) * width)
            return
        span = sum((side - 1) * step for side, step in zip(view.shape, view.stride, strict=True)) + 1
        if _count(view.shape) > _MAX_EXPANSION * span + (1 << 20):
            raise BadCheckpoint(
                entry.key,
                f"its {_count(view.shape):,} elements are {span:,} in the file, repeated: expanded, not stored.",
            )
        yield from _strided(reader, view, width)

    def _assembled(self, entry: Entry) -> bytes:
        if entry.bytes > _WHOLE_LIMIT:
            raise BadCheckpoint(
                entry.key,
                f"its {len(entry.pieces)} parts lie criss-cross, and {entry.bytes:,} bytes are too many.",
            )
        kind = np.dtype((np.void, item_bytes(entry.dtype)))
        whole: Raw = np.zeros(entry.shape, dtype=kind)
        for piece in entry.pieces:
            data = b"".join(self._view(entry, piece.view))
            place = tuple(
                slice(start, start + side)
                for start, side in zip(piece.offsets, piece.view.shape, strict=True)
            )
            whole[place] = np.frombuffer(data, dtype=kind).reshape(piece.view.shape)
        return whole.tobytes()


def _one_long(view: View) -> bool:
    """Strides of sides of length 1 do not matter."""
    wanted = contiguous(view.shape)
    return all(
        side == 1 or step == want for side, step, want in zip(view.shape, view.stride, wanted, strict=True)
    )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def _run(reader: FileReader, extent: Extent, start: int, length: int) -> Iterator[bytes]:
    """Bytes of an extent that lie in one run."""
    if start + length > extent.length:
        raise BadCheckpoint(reader.path, "a tensor reaches beyond its storage.")
    if not extent.deflated:
        begin = reader.data_start(extent) + start
        for done in range(0, length, PIECE_BYTES):
            yield reader.read(begin + done, min(PIECE_BYTES, length - done))
        return
    position = 0
    for piece in reader.pieces(extent):
        part = piece[max(0, start - position) : max(0, start + length - position)]
        position += len(piece)
        if part:
            yield part
        if position >= start + length:
            return


def _strided(reader: FileReader, view: View, width: int) -> Iterator[bytes]:
    """Elements at steps: the whole storage is mapped, and copied row by row."""
    if view.extent.deflated:
        raw: NDArray[np.uint8] = np.frombuffer(b"".join(reader.pieces(view.extent)), dtype=np.uint8)
    else:
        start = reader.data_start(view.extent)
        reader.read(start + view.extent.length, 0)
        raw = np.memmap(reader.path, dtype=np.uint8, mode="r", offset=start, shape=(view.extent.length,))
    flat = raw[: len(raw) // width * width].view(np.dtype((np.void, width)))
    last = view.offset + sum((side - 1) * step for side, step in zip(view.shape, view.stride, strict=True))
    if last >= len(flat):
        raise BadCheckpoint(reader.path, "a tensor reaches beyond its storage.")
    steps = tuple(step * width for step in view.stride)
    whole = np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, steps, writeable=False)
    yield from _blocks(whole, width)


def _blocks(whole: Raw, width: int) -> Iterator[bytes]:
    """An array's bytes in blocks of a bounded size, split along as many sides as that takes."""
    if whole.size * width <= PIECE_BYTES or whole.ndim == 0:
        yield whole.tobytes()
        return
    row = whole[0].size * width
    if row > PIECE_BYTES:
        for part in whole:
            yield from _blocks(part, width)
        return
    rows = max(1, PIECE_BYTES // max(row, 1))
    for start in range(0, len(whole), rows):
        yield whole[start : start + rows].tobytes()


def _in_rows(entry: Entry) -> bool:
    """Whether the parts are whole blocks of rows, as when each rank holds some: they follow one another."""
    position = 0
    for piece in sorted(entry.pieces, key=lambda piece: piece.offsets):
        if not entry.shape or piece.offsets[0] != position or any(piece.offsets[1:]):
            return False
        if piece.view.shape[1:] != entry.shape[1:]:
            return False
        position += piece.view.shape[0]
    return position == entry.shape[0]


def numbers(data: bytes, dtype: str) -> NDArray[np.generic]:
    """Bytes as numbers that numpy can compare and sum; narrow floats are widened.

    Raises:
        BadCheckpoint: numpy has no such type.
    """
    if dtype in NUMPY:
        return np.frombuffer(data, dtype=NUMPY[dtype])
    if dtype == "bfloat16":
        wide: NDArray[np.uint32] = np.frombuffer(data, dtype="<u2").astype("<u4") << np.uint32(16)
        return wide.view(np.float32)
    if dtype in _FLOAT8:
        return np.take(_float8_table(dtype), np.frombuffer(data, dtype=np.uint8))
    raise BadCheckpoint(shown(dtype), "numbers of this type cannot be compared here.")


# Per type: bits of the exponent, bits of the fraction, bias, how it writes NaN and infinity.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
    "float8_e8m0fnu": (8, 0, 127, "e8m0"),
}
_tables: dict[str, NDArray[np.float32]] = {}


def _float8_table(dtype: str) -> NDArray[np.float32]:
    if dtype not in _tables:
        _tables[dtype] = np.array([_float8(code, *_FLOAT8[dtype]) for code in range(256)], dtype=np.float32)
    return _tables[dtype]


def _float8(code: int, exponent_bits: int, fraction_bits: int, bias: int, form: str) -> float:
    if form == "e8m0":
        return float("nan") if code == 255 else float(2.0 ** (code - bias))
    sign = -1.0 if code & 128 else 1.0
    exponent = code >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = code & ((1 << fraction_bits) - 1)
    full = exponent == (1 << exponent_bits) - 1
    if form == "ieee" and full:
        return float("nan") if fraction else sign * float("inf")
    if (form == "fn" and full and fraction == (1 << fraction_bits) - 1) or (form == "fnuz" and code == 128):
        return float("nan")
    if not exponent:
        return sign * float(fraction * 2.0 ** (1 - bias - fraction_bits))
    return sign * float((1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias))


def aligned(pieces: Iterator[bytes], width: int) -> Iterator[bytes]:
    """The same bytes, each piece a whole number of elements long: one of a compressed storage may end within one."""
    left = b""
    for piece in pieces:
        piece = left + piece if left else piece
        whole = len(piece) // width * width
        left = piece[whole:]
        if whole:
            yield piece[:whole] if left else piece


def paired(first: Iterator[bytes], second: Iterator[bytes], width: int) -> Iterator[tuple[bytes, bytes]]:
    """Two streams of bytes cut at the same places, each a whole number of elements long."""
    one, two = aligned(first, width), aligned(second, width)
    left, right = next(one, b""), next(two, b"")
    while left and right:
        length = min(len(left), len(right))
        yield left[:length], right[:length]
        left = left[length:] or next(one, b"")
        right = right[length:] or next(two, b"")

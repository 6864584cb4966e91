"""A zip archive's table of contents, as torch writes it: read from its end, never unpacked."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.tools.ckpt.contents import Extent
from phalanx.tools.ckpt.errors import CUT_FIX, BadCheckpoint, shown

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
STORED, DEFLATED = 0, 8
MAX_DIRECTORY = 256 << 20
_MAX_RATIO = 200
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Record:
    """A file within an archive."""

    name: str
    method: int
    crc: int
    stored: int  # bytes in the archive
    size: int  # bytes when unpacked
    header: int  # where its local header is in the file
    encrypted: bool = False

    def extent(self, path: Path) -> Extent:
        """Where its bytes are."""
        return Extent(path, self.header, self.size, True, self.method == DEFLATED, self.stored, self.crc)


class FileReader:
    """Positioned reads of one file.

    Raises:
        BadCheckpoint: From its methods, when the file ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._handle).st_size

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    @property
    def handle(self) -> int:
        return self._handle

    def read(self, start: int, length: int) -> bytes:
        if start < 0 or length < 0 or start + length > self.size:
            raise BadCheckpoint(
                self.path, f"ends before byte {start + length} ({self.size} bytes): cut short.", fix=CUT_FIX
            )
        data = os.pread(self._handle, length, start)
        while len(data) < length:
            more = os.pread(self._handle, length - len(data), start + len(data))
            if not more:
                raise BadCheckpoint(self.path, "became shorter while it was read.", fix="wait for its writer")
            data += more
        return data

    def data_start(self, extent: Extent) -> int:
        """Where an extent's first byte is: behind its local header, if it has one."""
        if not extent.header:
            return extent.start
        fields = _LOCAL.unpack(self.read(extent.start, _LOCAL.size))
        if fields[0] != b"PK\x03\x04":
            raise BadCheckpoint(self.path, f"no record begins at byte {extent.start}: damaged.", fix=CUT_FIX)
        return extent.start + _LOCAL.size + int(fields[9]) + int(fields[10])

    def pieces(self, extent: Extent, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """An extent's bytes in order, unpacked, never more than it says to hold."""
        start = self.data_start(extent)
        if extent.deflated:
            yield from self._inflated(start, extent, piece_bytes)
            return
        for done in range(0, extent.length, piece_bytes):
            yield self.read(start + done, min(piece_bytes, extent.length - done))

    def _inflated(self, start: int, extent: Extent, piece_bytes: int) -> Iterator[bytes]:
        unpacker, done, total = zlib.decompressobj(-15), 0, 0
        pending = b""
        try:
            while total < extent.length and not unpacker.eof:
                if not pending:
                    length = min(1 << 20, extent.stored - done)
                    pending = self.read(start + done, length)
                    done += length
                piece = unpacker.decompress(pending, min(piece_bytes, extent.length - total))
                if not piece and not pending:
                    break
                pending = unpacker.unconsumed_tail
                total += len(piece)
                if piece:
                    yield piece
        except zlib.error as error:
            raise BadCheckpoint(
                self.path, f"a compressed record is damaged ({error}).", fix=CUT_FIX
            ) from None
        if total < extent.length:
            raise BadCheckpoint(self.path, "a compressed record is shorter than it says.", fix=CUT_FIX)


def read_directory(reader: FileReader, start: int = 0, end: int | None = None) -> dict[str, Record]:
    """The records of the archive that lies in the file from `start` to `end`, by name.

    Raises:
        BadCheckpoint: There is none, or it is cut or makes no sense.
    """
    end = reader.size if end is None else end
    count, size, offset, directory_end = _find_directory(reader, start, end)
    if size > min(MAX_DIRECTORY, end - start) or directory_end - size < start:
        raise _damaged(reader, "its table of contents is larger than the file")
    begin = directory_end - size
    shift = begin - offset  # where the archive begins in the file, as its own offsets count
    if shift < start:
        raise _damaged(reader, "its table of contents is not where it should be")
    data = reader.read(begin, size)
    records: dict[str, Record] = {}
    position = 0
    for _ in range(count):
        record, position = _record(reader, data, position, shift, begin)
        if record.name in records:
            raise _damaged(reader, f"{shown(record.name)!r} is in it twice")
        records[record.name] = record
    _refuse_bombs(reader, list(records.values()), end - start)
    return records


def _refuse_bombs(reader: FileReader, records: list[Record], length: int) -> None:
    """Records that overlap, or unpack to far more than any checkpoint would: reading them would never end."""
    if sum(record.stored + _LOCAL.size for record in records) > length:
        raise _damaged(reader, "its records overlap")
    unpacked = sum(record.size for record in records)
    if unpacked > _MAX_RATIO * length + (64 << 20):
        raise BadCheckpoint(
            reader.path,
            f"its {length:,} bytes would unpack to {unpacked:,}: a zip bomb. Nothing was unpacked.",
            fix="delete it",
        )


def _damaged(reader: FileReader, what: str) -> BadCheckpoint:
    return BadCheckpoint(reader.path, f"{what}: damaged, or no archive that torch wrote.", fix=CUT_FIX)


def _find_directory(reader: FileReader, start: int, end: int) -> tuple[int, int, int, int]:
    """Number of records, bytes and offset of the table of contents, and where it ends."""
    length = min(end - start, _END.size + 65535)
    tail = reader.read(end - length, length)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or len(tail) - place < _END.size:
        raise BadCheckpoint(
            reader.path,
            f"its table of contents, which comes last, is missing: cut short ({reader.size} bytes).",
            fix=CUT_FIX,
        )
    fields = _END.unpack_from(tail, place)
    count, size, offset = fields[4], fields[5], fields[6]
    position = end - length + place
    locator = position - _LOCATOR.size
    # torch writes the 64-bit end record into small archives as well.
    if locator - _END64.size >= start:
        signature = reader.read(locator, 4)
        fields64 = _END64.unpack(reader.read(locator - _END64.size, _END64.size))
        if signature == b"PK\x06\x07" and fields64[0] == b"PK\x06\x06":
            # The locator's own offset is of no use in an archive within a file.
            position = locator - _END64.size
            count, size, offset = fields64[7], fields64[8], fields64[9]
    return count, size, offset, position


def _record(reader: FileReader, data: bytes, position: int, shift: int, begin: int) -> tuple[Record, int]:
    if position + _CENTRAL.size > len(data):
        raise _damaged(reader, "its table of contents is cut")
    fields = _CENTRAL.unpack_from(data, position)
    if fields[0] != b"PK\x01\x02":
        raise _damaged(reader, "its table of contents makes no sense")
    flags, method, crc, stored, size = fields[5], fields[6], fields[9], fields[10], fields[11]
    name_length, extra_length, comment_length, offset = fields[12], fields[13], fields[14], fields[18]
    position += _CENTRAL.size
    after = position + name_length + extra_length + comment_length
    if after > len(data):
        raise _damaged(reader, "its table of contents is cut")
    name = data[position : position + name_length].decode("utf-8", "replace")
    extra = data[position + name_length : position + name_length + extra_length]
    stored, size, offset = _wide(reader, extra, stored, size, offset)
    header = shift + offset
    if header + _LOCAL.size + stored > begin:
        raise _damaged(reader, f"{shown(name)!r} would reach beyond the data")
    if method == STORED and stored != size:
        raise _damaged(reader, f"{shown(name)!r} has two sizes")
    return Record(name, method, crc, stored, size, header, bool(flags & 1)), after


def _wide(reader: FileReader, extra: bytes, stored: int, size: int, offset: int) -> tuple[int, int, int]:
    """Sizes beyond 4 GB stand in a field of their own."""
    if 0xFFFFFFFF not in (stored, size, offset):
        return stored, size, offset
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == 1:
            numbers = iter(
                struct.unpack_from(f"<{min(length, len(extra) - position) // 8}Q", extra, position)
            )
            try:
                size = next(numbers) if size == 0xFFFFFFFF else size
                stored = next(numbers) if stored == 0xFFFFFFFF else stored
                offset = next(numbers) if offset == 0xFFFFFFFF else offset
            except StopIteration:
                raise _damaged(reader, "its table of contents lacks the sizes of large records") from None
        position += length
    return stored, size, offset

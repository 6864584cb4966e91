"""A zip archive as torch reads it: nothing compressed, every storage aligned so that it can be mapped."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO

ALIGNMENT = 64
_WIDE = 0xFFFFFFFF


@dataclass
class _Written:
    name: bytes
    crc: int
    size: int
    header: int


class ZipWriter:
    """Writes records one after the other; `finish` writes the table of contents."""

    def __init__(self, out: IO[bytes]) -> None:
        self.out = out
        self.records: list[_Written] = []

    def add(self, name: str, content: bytes) -> None:
        """A record that is in memory."""
        self._begin(name, len(content), zlib.crc32(content))
        self.out.write(content)

    def add_known(self, name: str, size: int, crc: int, copy: Callable[[IO[bytes]], None]) -> None:
        """A record whose checksum is known already; `copy` brings its bytes into the file."""
        self._begin(name, size, crc)
        self.out.flush()
        copy(self.out)

    def add_pieces(self, name: str, size: int, pieces: Iterable[bytes]) -> None:
        """A record that comes in pieces; its checksum is made on the way and put in afterwards.

        Raises:
            ValueError: There were more or fewer bytes than `size`.
        """
        record, done = self._begin(name, size, 0), 0
        for piece in pieces:
            record.crc = zlib.crc32(piece, record.crc)
            self.out.write(piece)
            done += len(piece)
        if done != size:
            raise ValueError(f"{name}: {done} bytes came, {size} were announced")
        self.out.flush()
        os.pwrite(self.out.fileno(), struct.pack("<L", record.crc), record.header + 14)

    def _begin(self, name: str, size: int, crc: int) -> _Written:
        record = _Written(name.encode(), crc, size, self.out.tell())
        self.records.append(record)
        wide = struct.pack("<2H2Q", 1, 16, size, size) if size >= _WIDE else b""
        shown = min(size, _WIDE)
        start = record.header + 30 + len(record.name) + len(wide) + 4
        padding = -start % ALIGNMENT
        extra = wide + struct.pack("<2s H", b"FB", padding) + b"Z" * padding
        head = struct.pack(
            "<4s5H3L2H", b"PK\x03\x04", 45, 0x800, 0, 0, 0x21, crc, shown, shown, len(record.name), len(extra)
        )
        self.out.write(head + record.name + extra)
        return record

    def finish(self) -> None:
        """Write the table of contents, with the 64-bit end that large archives need and all readers take."""
        begin = self.out.tell()
        for record in self.records:
            wide = record.size >= _WIDE or record.header >= _WIDE
            shown, place = (_WIDE, _WIDE) if wide else (record.size, record.header)
            extra = struct.pack("<2H3Q", 1, 24, record.size, record.size, record.header) if wide else b""
            self.out.write(
                struct.pack(
                    "<4s6H3L5H2L", b"PK\x01\x02", 45, 45, 0x800, 0, 0, 0x21, record.crc, shown, shown,
                    len(record.name), len(extra), 0, 0, 0, 0, place,
                )
                + record.name
                + extra
            )  # fmt: skip
        size, count = self.out.tell() - begin, len(self.records)
        end64 = self.out.tell()
        self.out.write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, begin))
        self.out.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, end64, 1))
        few = min(count, 0xFFFF)
        self.out.write(
            struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, few, few, min(size, _WIDE), min(begin, _WIDE), 0)
        )

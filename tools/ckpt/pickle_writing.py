"""Descriptions written as a pickle again: what was never run on the way in is not run on the way out either."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

from phalanx.tools.ckpt.pickle_machine import PickleProblem
from phalanx.tools.ckpt.pickle_values import Call, Global, Members, Pairs, Persistent

_MAX_DEPTH = 150
_SHARED_TEXT = 40  # strings up to this length are written once


class PickleWriter:
    """Writes one pickle of protocol 2, which every torch reads.

    Args:
        persistent: Gives a persistent id's parts, as they shall be written.
    """

    def __init__(self, persistent: Callable[[Any], Any] = lambda parts: parts) -> None:
        self.out = io.BytesIO()
        self.persistent = persistent
        self.memo: dict[Any, int] = {}
        self.keep: list[Any] = []  # what is in the memo by id must live as long as the memo
        self.open: set[int] = set()

    def dump(self, value: Any) -> bytes:
        """The pickle of `value`.

        Raises:
            PickleProblem: It is nested too deeply, or contains itself in a way that cannot be written.
        """
        self.out.write(b"\x80\x02")
        self.save(value, 0)
        self.out.write(b".")
        return self.out.getvalue()

    def save(self, value: Any, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise PickleProblem(f"is nested more than {_MAX_DEPTH} deep")
        mark = _mark_of(value)
        if mark in self.memo:
            self._get(self.memo[mark])
            return
        writer = _WRITERS.get(type(value))
        if writer is None:
            raise PickleProblem(f"holds a {type(value).__name__}, which cannot be written")
        writer(self, value, depth + 1)

    def put(self, value: Any) -> None:
        """Remember what is on the stack as `value`."""
        number = len(self.memo)
        self.memo[_mark_of(value)] = number
        self.keep.append(value)
        self.out.write(b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number))

    def _get(self, number: int) -> None:
        self.out.write(b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number))


def _mark_of(value: Any) -> Any:
    """What tells two mentions of one value: its name or text, else its identity."""
    if isinstance(value, Global):
        return ("global", value.full_name)
    if isinstance(value, str):
        return ("text", value) if len(value) <= _SHARED_TEXT else ("id", id(value))
    if value is None or isinstance(value, bool | int | float | bytes) or value == ():
        return None
    return ("id", id(value))


def _none(writer: PickleWriter, value: None, depth: int) -> None:
    writer.out.write(b"N")


def _bool(writer: PickleWriter, value: bool, depth: int) -> None:
    writer.out.write(b"\x88" if value else b"\x89")


def _int(writer: PickleWriter, value: int, depth: int) -> None:
    if 0 <= value < 256:
        writer.out.write(b"K" + bytes([value]))
    elif 0 <= value < 65536:
        writer.out.write(b"M" + struct.pack("<H", value))
    elif -(1 << 31) <= value < 1 << 31:
        writer.out.write(b"J" + struct.pack("<i", value))
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        head = b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))
        writer.out.write(head + data)


def _float(writer: PickleWriter, value: float, depth: int) -> None:
    writer.out.write(b"G" + struct.pack(">d", value))


def _str(writer: PickleWriter, value: str, depth: int) -> None:
    data = value.encode("utf-8", "surrogatepass")
    writer.out.write(b"X" + struct.pack("<I", len(data)) + data)
    writer.put(value)


def _bytes(writer: PickleWriter, value: bytes, depth: int) -> None:
    # Protocol 2 has no opcode for bytes; this is what Python's own pickler writes.
    _call(writer, Call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1")), depth)


def _bytearray(writer: PickleWriter, value: bytearray, depth: int) -> None:
    _call(writer, Call(Global("builtins", "bytearray"), (bytes(value),)), depth)


def _tuple(writer: PickleWriter, value: tuple[Any, ...], depth: int) -> None:
    if id(value) in writer.open:
        raise PickleProblem("has a tuple that contains itself")
    if not value:
        writer.out.write(b")")
        return
    writer.open.add(id(value))
    if len(value) > 3:
        writer.out.write(b"(")
    for entry in value:
        writer.save(entry, depth)
    writer.out.write(b"t" if len(value) > 3 else bytes([0x84 + len(value)]))
    writer.open.discard(id(value))
    writer.put(value)


def _list(writer: PickleWriter, value: list[Any], depth: int) -> None:
    writer.out.write(b"]")
    writer.put(value)
    _appended(writer, value, depth)


def _appended(writer: PickleWriter, items: list[Any], depth: int) -> None:
    if items:
        writer.out.write(b"(")
        for entry in items:
            writer.save(entry, depth)
        writer.out.write(b"e")


def _set(writer: PickleWriter, pairs: list[tuple[Any, Any]], depth: int) -> None:
    if pairs:
        writer.out.write(b"(")
        for key, entry in pairs:
            writer.save(key, depth)
            writer.save(entry, depth)
        writer.out.write(b"u")


def _pairs(writer: PickleWriter, value: Pairs, depth: int) -> None:
    writer.out.write(b"}")
    writer.put(value)
    _set(writer, value.pairs, depth)


def _members(writer: PickleWriter, value: Members, depth: int) -> None:
    name = "frozenset" if value.frozen else "set"
    writer.save(Global("builtins", name), depth)
    writer.save((list(value.items),), depth)
    writer.out.write(b"R")
    writer.put(value)


def _global(writer: PickleWriter, value: Global, depth: int) -> None:
    if "\n" in value.module or "\n" in value.name:
        raise PickleProblem("has a name that cannot be written")
    writer.out.write(b"c" + f"{value.module}\n{value.name}\n".encode("utf-8", "surrogatepass"))
    writer.put(value)


def _persistent(writer: PickleWriter, value: Persistent, depth: int) -> None:
    writer.save(writer.persistent(value.id), depth)
    writer.out.write(b"Q")
    writer.put(value)


def _call(writer: PickleWriter, value: Call, depth: int) -> None:
    if id(value) in writer.open:
        raise PickleProblem("has a value that is needed to make itself")
    writer.open.add(id(value))
    if value.how == "NEWOBJ_EX":
        # Protocol 2 has none: the same object by way of copyreg's function for it.
        writer.save(Global("copyreg", "__newobj_ex__"), depth)
        writer.save((value.func, value.args, value.kwargs), depth)
        writer.out.write(b"R")
    elif value.how == "OBJ":
        writer.out.write(b"(")
        for part in (value.func, *value.args):
            writer.save(part, depth)
        writer.out.write(b"o")
    else:
        writer.save(value.func, depth)
        writer.save(value.args, depth)
        writer.out.write(b"R" if value.how == "REDUCE" else b"\x81")
    writer.open.discard(id(value))
    writer.put(value)
    _appended(writer, value.items, depth)
    _set(writer, value.pairs, depth)
    for state in value.states:
        writer.save(state, depth)
        writer.out.write(b"b")


_WRITERS: dict[type, Callable[[PickleWriter, Any, int], None]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    bytes: _bytes,
    bytearray: _bytearray,
    tuple: _tuple,
    list: _list,
    Pairs: _pairs,
    Members: _members,
    Global: _global,
    Persistent: _persistent,
    Call: _call,
}

"""A walk through what a pickle describes: its tensors by key, and a short form of everything else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from phalanx.tools.ckpt.pickle_machine import PickleProblem
from phalanx.tools.ckpt.pickle_values import Call, Global, Members, Pairs, Persistent
from phalanx.tools.ckpt.torch_values import (
    TensorValue,
    attributes_of,
    dtype_of,
    mapping_of,
    module_entries,
    sizes_of,
    tensor_of,
)

MAX_DEPTH = 100
MAX_KEY_BYTES = 64 << 20  # of all keys together: one long name can stand in front of many
MAX_VISITS = 4_000_000
_SHOWN_ITEMS = 20
_SHOWN_TEXT = 500
_SHOWN_NODES = 5000
_NOTHING = object()


def tensors_in(root: Any) -> Iterator[tuple[str, TensorValue, Any]]:
    """Every tensor with its key, and the description it was read from; containers met on their own path are left out.

    Raises:
        PickleProblem: Values contain one another so often or so deeply that the list would not end.
    """
    visits = key_bytes = 0
    path: set[int] = set()
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    while stack:
        key, value, depth = stack.pop()
        if depth < 0:  # the way back out of a container
            path.discard(id(value))
            continue
        visits += 1
        if visits > MAX_VISITS:
            raise PickleProblem(
                f"holds values within values, more than {MAX_VISITS:,} in all: made to exhaust memory"
            )
        found = tensor_of(value)
        if found is not None:
            yield key, found, value
            continue
        children = _children(value)
        if not children or id(value) in path:
            continue
        if depth >= MAX_DEPTH:
            raise PickleProblem(f"is nested more than {MAX_DEPTH} deep")
        path.add(id(value))
        stack.append((key, value, -1))
        visits += len(children) // 2
        inner = [(name, child) for name, child in reversed(children) if _may_hold(child)]
        key_bytes += sum(len(key) + len(name) for name, _ in inner)
        if key_bytes > MAX_KEY_BYTES:
            raise PickleProblem("has keys of more than 64 MiB in all: made to exhaust memory")
        stack.extend((_joined(key, name), child, depth + 1) for name, child in inner)


def _may_hold(value: Any) -> bool:
    return isinstance(value, Call | Pairs | list | tuple)


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _children(value: Any) -> list[tuple[str, Any]]:
    """Named parts of a container, the last of two entries with one name; [] for anything else."""
    entries = mapping_of(value)
    if entries is not None:
        return list({name_of(key): entry for key, entry in entries}.items())
    if isinstance(value, list | tuple):
        return [(str(number), entry) for number, entry in enumerate(value)]
    if isinstance(value, Call):
        named = [(name_of(key), entry) for key, entry in [*value.pairs, *attributes_of(value)]]
        return named + [(str(number), entry) for number, entry in enumerate(value.items)]
    return []


def name_of(key: Any) -> str:
    """A dict's key as a component of a tensor's key."""
    if isinstance(key, str):
        return key
    if isinstance(key, int) and abs(key) < 1 << 200:
        return str(key)
    if isinstance(key, Global):
        return key.full_name
    return f"({type(key).__name__})"


class _Shortener:
    """Turns descriptions into what JSON holds, tensors left out and long parts cut."""

    def __init__(self) -> None:
        self.nodes = self.visits = 0
        self.path: set[int] = set()

    def of(self, value: Any, depth: int = 0) -> Any:
        self.visits += 1
        if tensor_of(value) is not None:
            return _NOTHING
        if self.visits > MAX_VISITS // 4 or depth > 20:
            return "..."
        simple = _simple(value)
        if simple is not _NOTHING:
            self.nodes += 1
            return simple
        if id(value) in self.path:
            return "..."
        self.path.add(id(value))
        try:
            return self._container(value, depth)
        finally:
            self.path.discard(id(value))

    def _container(self, value: Any, depth: int) -> Any:
        self.nodes += 1
        entries = mapping_of(value)
        if entries is not None and not (isinstance(value, Call) and module_entries(value) is not None):
            return self._mapping(entries, depth)
        if isinstance(value, list | tuple | Members):
            items = value.items if isinstance(value, Members) else value
            return self._sequence(items, depth)
        if isinstance(value, Call):
            return self._call(value, depth)
        return f"<{type(value).__name__}>"

    def _mapping(self, entries: list[tuple[Any, Any]], depth: int) -> Any:
        shown: dict[str, Any] = {}
        left = 0
        for key, entry in entries:
            if self.nodes > _SHOWN_NODES:
                left += tensor_of(entry) is None
                continue
            short = self.of(entry, depth + 1)
            if short is not _NOTHING:
                shown[name_of(key)[:_SHOWN_TEXT]] = short
        if left:
            shown["..."] = f"{left} more"
        return _NOTHING if entries and not shown else shown

    def _sequence(self, items: Any, depth: int) -> Any:
        shown = []
        for item in items[:_SHOWN_ITEMS]:
            if self.nodes > _SHOWN_NODES:
                break
            short = self.of(item, depth + 1)
            if short is not _NOTHING:
                shown.append(short)
        if len(items) > _SHOWN_ITEMS:
            shown.append(f"... {len(items)} in all")
        return _NOTHING if items and not shown else shown

    def _call(self, value: Call, depth: int) -> Any:
        short: dict[str, Any] = {"$type": value.name[:_SHOWN_TEXT] or "unknown"}
        if module_entries(value) is not None:
            return short
        args = self.of(value.args, depth + 1)
        state = self._mapping([*value.pairs, *attributes_of(value)], depth)
        for name, part in (("args", args), ("state", state)):
            if part is not _NOTHING and part:
                short[name] = part
        return short


def _simple(value: Any) -> Any:
    """Values without parts; `_NOTHING` for all others."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 200 else f"<a number of {value.bit_length()} bits>"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= _SHOWN_TEXT else f"{value[:_SHOWN_TEXT]}... {len(value)} letters"
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if isinstance(value, Global):
        dtype = dtype_of(value)
        return dtype or {"$global": value.full_name[:_SHOWN_TEXT]}
    if isinstance(value, Persistent):
        return "<a storage>"
    if isinstance(value, Call) and value.name == "torch.Size":
        return list(sizes_of(value) or ())
    return _NOTHING


def short_form(root: Any) -> Any:
    """Everything but the tensors, as JSON would hold it; {} when there is nothing else."""
    short = _Shortener().of(root)
    return {} if short is _NOTHING else short

"""Facts as JSON and back: what `--json` prints as `facts`, and what `--report` reads again."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from phalanx.tools.doctor.facts import Facts

T = TypeVar("T")
_KNOWN_HINTS: dict[type[Any], dict[str, Any]] = {}


def to_json(facts: Any) -> dict[str, Any]:
    """A dataclass of facts as a JSON object, without what is not known.

    >>> to_json(Facts(env={"A": "1"}))
    {'env': {'A': '1'}}
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        if value is None or value == field.default:  # False and () are answers where the default is None
            continue
        found[field.name] = _plain(value)
    return found


def from_json(data: Any) -> Facts:
    """Facts out of a JSON object; names that are not known and values of the wrong kind are left out.

    >>> from_json({"torch": {"version": "2.6.0", "colour": "red", "arch_list": ["sm_90", 3]}}).torch.arch_list
    ('sm_90',)
    """
    return build(Facts, data)


def build(kind: type[T], data: Any) -> T:
    """An instance of a facts dataclass out of a JSON object."""
    hints = _hints(kind)
    values = {}
    for name, value in data.items() if isinstance(data, Mapping) else ():
        if name in hints:
            fitting = _fitting(hints[name], value)
            if fitting is not None:
                values[name] = fitting
    return kind(**values)


def _hints(kind: type[Any]) -> dict[str, Any]:
    """A dataclass's hints as types; looking them up takes longer than reading the values."""
    if kind not in _KNOWN_HINTS:
        _KNOWN_HINTS[kind] = typing.get_type_hints(kind)
    return _KNOWN_HINTS[kind]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_json(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _fitting(hint: Any, value: Any) -> Any:
    """``value`` as the hint wants it, None where it does not fit."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return _fitting(kinds[0], value) if value is not None else None
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value) if isinstance(value, Mapping) else None
    origin = typing.get_origin(hint)
    if origin is tuple:
        return _fitting_tuple(typing.get_args(hint)[0], value)
    if origin is not None:  # a mapping of texts
        if not isinstance(value, Mapping):
            return None
        return {str(name): str(text) for name, text in value.items() if text is not None}
    return _fitting_scalar(hint, value)


def _fitting_tuple(hint: Any, value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return None
    items = (_fitting(hint, item) for item in value)
    return tuple(item for item in items if item is not None)


def _fitting_scalar(hint: Any, value: Any) -> Any:
    if hint is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if hint is float and isinstance(value, (int, float)):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, hint) else None

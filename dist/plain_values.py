"""Python values as JSON and back, exactly, without pickle: what a checkpoint keeps beside its tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

Sink = Callable[[str, Any], str]


class NotPlainError(ValueError):
    """A value that cannot be kept without pickle; the message names it."""


def encode(value: Any, where: str, keep_tensor: Sink | None = None) -> Any:
    """`value` as something JSON holds exactly; `decode` gives it back.

    Numbers, strings, None, lists, tuples, dicts with any plain keys and Counters come back as they
    were; numpy's and torch's scalars come back as Python numbers::

        >>> encode({"lr": (0.1, float("inf")), 3: None}, "values")
        {'$dict': [['lr', {'$tuple': [0.1, {'$float': 'inf'}]}], [3, None]]}

    Args:
        value: What to keep.
        where: How to call it in an error, such as ``scheduler.state_dict()``.
        keep_tensor: Called with ``(where, tensor)`` to put a tensor elsewhere; returns its key there.

    Raises:
        NotPlainError: It holds something else; the message says where.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        entries = [encode(entry, f"{where}[{number}]", keep_tensor) for number, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"$tuple": entries}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, keep_tensor)
    if keep_tensor is not None and _is_tensor(value):
        return {"$tensor": keep_tensor(where, value)}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return encode(value.item(), where)
    fix = (
        "pass value.tolist()" if hasattr(value, "tolist") else "pass plain numbers, strings, lists and dicts"
    )
    raise NotPlainError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint keeps plain values only, "
        f"so that loading one never runs code from it.\nFix: {fix}"
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, keep_tensor: Sink | None) -> Any:
    simple = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if simple and not isinstance(value, Counter):
        return {
            str.__str__(key): encode(entry, f"{where}[{key!r}]", keep_tensor) for key, entry in value.items()
        }
    entries = [
        [encode(key, f"a key of {where}"), encode(entry, f"{where}[{key!r}]", keep_tensor)]
        for key, entry in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$dict": entries}


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


def decode(value: Any, tensor_of: Callable[[str], Any] | None = None) -> Any:
    """What `encode` was given; `tensor_of` finds a tensor by the key it was kept under.

    >>> decode(encode({"betas": (0.9, 0.99)}, "values"))
    {'betas': (0.9, 0.99)}
    """
    if isinstance(value, list):
        return [decode(entry, tensor_of) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "$float":
            return float(content)
        if kind == "$tuple":
            return tuple(decode(entry, tensor_of) for entry in content)
        if kind == "$tensor" and tensor_of is not None:
            return tensor_of(content)
        if kind in {"$dict", "$counter"}:
            entries = {decode(key): decode(entry, tensor_of) for key, entry in content}
            return Counter(entries) if kind == "$counter" else entries
    return {key: decode(entry, tensor_of) for key, entry in value.items()}

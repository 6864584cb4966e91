"""Sizes and yes/no as people and tools write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s{0,2}([kmgtp]?)(?:i?b|bytes?)?\b", re.I)


def size_bytes(text: object, unit: str = "") -> int | None:
    """Bytes of "64M", "62.79 GB", "1.0G, 87% used"; ``unit`` is for a bare number.

    >>> size_bytes("64M"), size_bytes("8192", "k"), size_bytes("unlimited"), size_bytes("none")
    (67108864, 8388608, -1, None)
    """
    if isinstance(text, bool):
        return None
    if isinstance(text, (int, float)):
        return int(text * _UNITS[unit])
    words = str(text).strip().lower()
    if words.startswith(("unlimited", "infinity", "-1", "max")):
        return -1
    match = _SIZE.search(words)
    if match is None:
        return None
    return int(float(match[1]) * _UNITS[match[2].lower() or unit])


def truth(value: object) -> bool | None:
    """True, "Yes", "enabled"; None where neither.

    >>> truth("Yes"), truth("disabled"), truth("N/A")
    (True, False, None)
    """
    if isinstance(value, bool):
        return value
    word = str(value).strip().strip("'\"`*.,()").lower().split(" ")[0].strip(",;.()")
    if word in ("yes", "true", "on", "enabled", "1", "y", "available"):
        return True
    if word in ("no", "false", "off", "disabled", "0", "n", "unavailable"):
        return False
    return None


def number(value: object) -> int | None:
    """The first whole number in a value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return int(value)
    match = re.search(r"\d{1,15}", str(value))
    return int(match.group()) if match else None

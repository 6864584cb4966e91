"""What an argument may be: checked where it comes in, so that what is wrong is named rather than run into. No torch needed."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any, TypeVar

MOST_INT = (1 << 63) - 1  # what int64 holds, in which positions and counts are computed

T = TypeVar("T")


def require_int(name: str, value: object, at_least: int, at_most: int | None = MOST_INT) -> int:
    """``value`` as an int: an integer, also numpy's or a tensor without dims; a bool is none.

    >>> require_int("epochs", 3, at_least=1)
    3
    >>> require_int("epochs", True, at_least=1)
    Traceback (most recent call last):
        ...
    ValueError: epochs=True: an integer of at least 1 is needed.

    Raises:
        ValueError: It is none, below ``at_least``, or above ``at_most``.
    """
    number = _as_int(value)
    if number is None or number < at_least:
        raise ValueError(f"{name}={short(value)}: an integer of at least {at_least} is needed.")
    if at_most is not None and number > at_most:
        limit = "2**63 - 1" if at_most == MOST_INT else str(at_most)
        raise ValueError(
            f"{name}={short(value)}: an integer of at least {at_least} and at most {limit} is needed."
        )
    return number


def _is_single(value: Any) -> bool:
    """Whether it may be one number: no bool of any kind, and no array with dims, even of one element."""
    dims: Any = getattr(value, "ndim", None)
    return not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")) and not dims


def _as_int(value: Any) -> int | None:
    if not _is_single(value):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def require_real(
    name: str,
    value: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float = math.inf,
    fix: str = "",
) -> float:
    """``value`` as a finite float: a number, also numpy's or a tensor without dims; a bool is none.

    >>> require_real("p", 0.5, at_least=0, at_most=1)
    0.5

    Raises:
        ValueError: It is none, or outside of its range.
    """
    number = _as_real(value)
    fits = number is not None and math.isfinite(number) and number <= at_most
    fits = fits and (at_least is None or number >= at_least) and (above is None or number > above)  # type: ignore[operator]
    if number is None or not fits:
        lower = "" if at_least is None else f" of at least {at_least:g}"
        lower = lower if above is None else f" of more than {above:g}"
        upper = f" and at most {at_most:g}" if at_most < math.inf else ""
        raise ValueError(
            f"{name}={short(value)}: a number{lower}{upper} is needed.{fix and f'{chr(10)}Fix: {fix}'}"
        )
    return number


def _as_real(value: Any) -> float | None:
    if not _is_single(value):
        return None
    plain = isinstance(value, numbers.Real) or hasattr(value, "dtype")
    try:
        return float(value) if plain else None
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # complex, text arrays, beyond what a float holds
        return None


def require_flag(name: str, value: object) -> bool:
    """``value``, which is True or False; text such as "no" would count as True.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise ValueError(f"{name}={short(value)}: neither True nor False.\nFix: {name}=True or {name}=False")


def require_path(name: str, value: object) -> Path:
    """``value`` as a path: text, or an object that stands for a path.

    Raises:
        ValueError: It is none, or empty.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(
            f"{name}={short(value)} names no place in the file system.\nFix: text, such as 'checkpoints', or a Path"
        )
    return Path(text)


def require_mapping(name: str, value: object, fix: str) -> None:
    """Raise unless ``value`` is a mapping.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={short(value)} is no mapping.\nFix: {fix}")


def require_module(name: str, value: object) -> None:
    """Raise unless ``value`` is a module of torch's, whose class this module does not import.

    Raises:
        ValueError: It is none, or a class rather than an object of it.
    """
    if isinstance(value, type) or not callable(getattr(value, "named_parameters", None)):
        made = f", such as {value.__name__}(...)" if isinstance(value, type) else ""
        raise ValueError(
            f"{name}={short(value)} is no module.\nFix: pass the model itself, a torch.nn.Module{made}"
        )


def require_callable(name: str, value: T, fix: str) -> T:
    """``value``, which can be called.

    Raises:
        ValueError: It cannot.
    """
    if not callable(value):
        raise ValueError(f"{name}={short(value)} cannot be called.\nFix: {fix}")
    return value


def short(value: object) -> str:
    """How a message shows a value: in one line, and of an array, a model or a long list only its beginning."""
    try:
        words = repr(value)
    except Exception:  # somebody's __repr__
        words = f"<{type(value).__name__}>"
    most = 1000 if isinstance(value, str | bytes | int | float) else 100
    if not isinstance(value, str | bytes):
        words = " ".join(words.split())
    return words if len(words) <= most else words[: most - 3] + "..."

"""Values of every kind that somebody may pass, and what a parameter takes of them.

A table of a test holds rows ``(call, parameter, takes)``: the call with one argument replaced must raise a ValueError
that says what is allowed, for every value that the parameter does not take.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from operator import index
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

Takes = Callable[[Any], bool]
Row = tuple[Callable[..., Any], str, Takes]

BIG = 10**30
VALUES: list[Any] = [
    None, True, False, -1, 0, 7, BIG, 1.5, -0.5, math.nan, math.inf, -math.inf, 1j,
    "", "no", "2", b"x", [], [1, 2], [None], [-1, 2], {}, {"a": 1}, (1,), object(), print, int, nn.Linear,
    torch.tensor(7), torch.tensor(True), torch.tensor([1.0, 2.0]), torch.zeros(2, 2, dtype=torch.complex64),
    np.int64(7), np.float64(0.25), np.bool_(True), np.array([1, 2]), np.array(["a"]),
]  # fmt: skip


def nothing(value: Any) -> bool:
    """For a parameter that takes none of the values."""
    return False


def whole(least: int = 0, most: int = (1 << 63) - 1) -> Takes:
    """An integer of Python's, numpy's or torch's."""

    def takes(value: Any) -> bool:
        if isinstance(value, (bool, np.bool_)) or getattr(value, "ndim", 0):
            return False
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            return False
        try:
            return least <= index(value) <= most
        except TypeError:
            return False

    return takes


def real(above: float = -math.inf, at_most: float = 1e300) -> Takes:
    """A finite number of Python's, numpy's or torch's."""

    def takes(value: Any) -> bool:
        if isinstance(value, (bool, np.bool_, complex)) or getattr(value, "ndim", 0):
            return False
        if isinstance(value, torch.Tensor):
            return value.dtype != torch.bool and above < float(value) <= at_most
        return isinstance(value, (int, float, np.number)) and above < float(value) <= at_most

    return takes


def flag(value: Any) -> bool:
    """True or False."""
    return isinstance(value, (bool, np.bool_)) or (
        isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.ndim == 0
    )


def or_none(takes: Takes) -> Takes:
    """What ``takes`` takes, and None."""
    return lambda value: value is None or takes(value)


def kind(*kinds: type) -> Takes:
    """Objects of these classes."""
    return lambda value: isinstance(value, kinds) and not isinstance(value, type)


def text(value: Any) -> bool:
    """Text with something in it."""
    return isinstance(value, str) and bool(value)


def any_of(*choices: Takes) -> Takes:
    """What one of them takes."""
    return lambda value: any(takes(value) for takes in choices)


REMEDIES = ("Fix:", "needed", "at least", "or more", "say '", "one without the other")


def refuses(row: Row) -> None:
    """Fail unless every value that the parameter does not take is refused, naming value and remedy."""
    call, parameter, takes = row
    for value in VALUES:
        if takes(value):
            continue
        try:
            call(**{parameter: value})
        except ValueError as error:
            message = str(error)
            assert any(remedy in message for remedy in REMEDIES), (
                f"{parameter}={value!r}: no remedy in {message!r}"
            )
        except Exception as error:
            pytest.fail(f"{parameter}={value!r}: {type(error).__name__}: {error}")
        else:
            pytest.fail(f"{parameter}={value!r} was taken")


def parameters_of(target: Any) -> set[str]:
    """The parameters that a call of ``target`` has, but for ``*values`` and ``**options``."""
    found = inspect.signature(target).parameters.values()
    return {
        parameter.name
        for parameter in found
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name != "self"
    }

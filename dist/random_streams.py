"""The random generators that loading samples draws from: which there are, and where each stands."""

from __future__ import annotations

import functools
import hashlib
import random
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_MAX_OBJECTS = 2000  # looked at: a dataset may hold millions, its generators lie near the top
_MAX_ENTRIES = 64  # of one list or mapping
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_OPAQUE = (str, bytes, bytearray, int, float, complex, np.ndarray, torch.Tensor, ModuleType, type, type(None))
_METHODS = ("__getitem__", "__getitems__", "__iter__", "__call__", "forward")


@dataclass(frozen=True)
class Stream:
    """A generator by the name that its user knows it by.

    Args:
        name: ``numpy's global generator``, or where it was found: ``dataset.transform.rng``.
        generator: Of torch, random or numpy.
    """

    name: str
    generator: Any

    def position(self) -> str:
        """A hash of where the generator stands: equal positions have the same numbers ahead; empty if it does not say."""
        try:
            return hashlib.blake2b(_state(self.generator), digest_size=8).hexdigest()
        except Exception:  # a generator of the user's own making
            return ""


def global_streams() -> list[Stream]:
    """The generators behind ``torch.rand``, ``random.random`` and ``np.random.rand``."""
    return [
        Stream("torch's global generator", torch.default_generator),
        Stream("random's global generator", _owner(random.random)),
        Stream("numpy's global generator", _owner(np.random.rand)),
    ]


def _owner(method: Any) -> Any:
    return method.__self__


def own_streams(roots: Mapping[str, Any]) -> list[Stream]:
    """The generators that objects hold, at any depth, or use as globals of their modules; the global ones left out.

    >>> class Noisy:
    ...     def __init__(self):
    ...         self.rng = np.random.default_rng(0)
    >>> [stream.name for stream in own_streams({"dataset": Noisy()})]
    ['dataset.rng']

    Args:
        roots: Objects (a dataset, a ``collate_fn``) by the name to call them by.
    """
    seen = {id(stream.generator) for stream in global_streams()}
    waiting = deque(roots.items())
    found: list[Stream] = []
    kept: list[Any] = []  # an id belongs to somebody else once its object is gone
    while waiting and len(kept) < _MAX_OBJECTS:
        name, part = waiting.popleft()
        if isinstance(part, _OPAQUE) or id(part) in seen:
            continue
        seen.add(id(part))
        kept.append(part)
        if isinstance(part, _GENERATORS):
            if _can_be_read(part):
                found.append(Stream(name, part))
            continue
        try:
            waiting.extend(_parts(name, part))
        except Exception:  # somebody's object that cannot be looked into holds nothing that we know of
            continue
    return found


def _can_be_read(generator: Any) -> bool:
    if isinstance(generator, torch.Generator):
        return generator.device.type == "cpu"
    return not isinstance(generator, random.SystemRandom)


def _parts(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, Mapping):
        for _, (key, value) in zip(range(_MAX_ENTRIES), part.items(), strict=False):
            yield f"{name}[{key!r}]", value
    elif isinstance(part, (list, tuple, set, frozenset, deque)):
        for place, value in zip(range(_MAX_ENTRIES), part, strict=False):
            yield f"{name}[{place}]", value
    elif isinstance(part, functools.partial):
        yield from ((name, part.func), (f"{name}.args", part.args), (f"{name}.keywords", part.keywords))
    elif isinstance(part, MethodType):
        yield from ((name, part.__self__), (name, part.__func__))
    elif isinstance(part, FunctionType):
        yield from _used_by(part)
    else:
        yield from _attributes(name, part)


def _attributes(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    for attribute, value in list(getattr(part, "__dict__", {}).items()):
        if isinstance(part, nn.Module) and attribute == "_modules":
            yield from ((f"{name}.{child}", module) for child, module in value.items())
        else:
            yield f"{name}.{attribute}", value
    for method in _METHODS:
        function = getattr(type(part), method, None)
        if isinstance(function, FunctionType):
            yield f"{name}.{method}", function


def _used_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function draws from without being given it: closure, defaults, and its module's globals."""
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"{function.__qualname__}.{variable}", cell.cell_contents
    yield f"{function.__qualname__}.defaults", function.__defaults__
    for variable in function.__code__.co_names:
        value = function.__globals__.get(variable)
        ours = isinstance(value, FunctionType) and value.__module__ == function.__module__
        if ours or isinstance(value, _GENERATORS):
            yield f"{function.__module__}.{variable}", value


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return array("Q", words).tobytes() + repr((version, gauss)).encode()
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def _plain(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return b"".join(str(key).encode() + b"=" + _plain(value[key]) + b";" for key in sorted(value))
    return repr(value).encode()

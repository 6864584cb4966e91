"""What a pickle describes, as plain descriptions: nothing here is imported, called or built.

Numbers, strings, bytes, lists and tuples are Python's own. A dict is `Pairs`, never a dict: hashing what a
stranger wrote could be made slow or overflow the stack.
"""

from __future__ import annotations

from typing import Any


class Global:
    """A name that the pickle would have imported."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """A call that the pickle would have made, and what it would have done to the result.

    ``how`` is the pickle's own word: REDUCE calls ``func(*args)``, NEWOBJ ``func.__new__(func, *args)``.
    """

    __slots__ = ("args", "func", "how", "items", "kwargs", "pairs", "states")

    def __init__(self, func: Any, args: Any, how: str = "REDUCE", kwargs: Any = None) -> None:
        self.func, self.args, self.how, self.kwargs = func, args, how, kwargs
        self.items: list[Any] = []  # appended or added afterwards
        self.pairs: list[tuple[Any, Any]] = []  # set as items afterwards
        self.states: list[Any] = []  # handed to __setstate__, or put into __dict__

    @property
    def name(self) -> str:
        return self.func.full_name if isinstance(self.func, Global) else ""


class Pairs:
    """A dict, as the list of what was put into it."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[Any, Any]] | None = None) -> None:
        self.pairs: list[tuple[Any, Any]] = [] if pairs is None else pairs


class Members:
    """A set or frozenset."""

    __slots__ = ("frozen", "items")

    def __init__(self, items: list[Any], frozen: bool) -> None:
        self.items, self.frozen = items, frozen


class Persistent:
    """Something kept outside the pickle, such as a storage."""

    __slots__ = ("id",)

    def __init__(self, persistent_id: Any) -> None:
        self.id = persistent_id

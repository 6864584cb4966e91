"""What a user typed that cannot be done: the one exception for it, and help with finding the right words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageMistake(ValueError):
    """The command line, or a variable it reads, asks for something impossible: exit code 2.

    The message says what was read, what is wrong with it, and what to type instead::

        raise UsageMistake("--nproc-per-node 0: a node needs at least one rank.", fix="--nproc-per-node 1")
    """

    def __init__(self, problem: str, *, fix: str | None = None) -> None:
        super().__init__(problem if fix is None else f"{problem}\nFix: {fix}")


def nearest(word: str, names: Iterable[str], *, count: int = 3) -> list[str]:
    """The names that ``word`` was probably meant to be, best first.

    >>> nearest("mnits", ["cifar", "mnist", "rnn"])
    ['mnist']
    """
    by_lower = {name.lower(): name for name in sorted(names, reverse=True)}
    matches = difflib.get_close_matches(word.lower(), list(by_lower), n=count, cutoff=0.6)
    begun = [name for name in sorted(by_lower) if len(word) > 1 and name.startswith(word.lower())]
    return [by_lower[name] for name in dict.fromkeys([*matches, *begun])][:count]

"""What a user typed that cannot be done: the one exception for it, and help with finding the right words."""

from __future__ import annotations

from collections.abc import Iterable


class UsageMistake(ValueError):
    """The command line, or a variable it reads, asks for something impossible: exit code 2.

    The message says what was read, what is wrong with it, and what to type instead::

        raise UsageMistake("--nproc-per-node 0: a node needs at least one rank.", fix="--nproc-per-node 1")
    """

    def __init__(self, problem: str, *, fix: str | None = None) -> None:
        super().__init__(problem if fix is None else f"{problem}\nFix: {fix}")


class CannotFinish(RuntimeError):
    """phalanx cannot do what was asked, though it was asked in the right way: exit code 3."""

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(f"{problem}\nFix: {fix}")


def nearest(word: str, names: Iterable[str], *, count: int = 3) -> list[str]:
    """The names that ``word`` was probably meant to be, best first.

    >>> nearest("mnits", ["cifar", "mnist", "rnn"])
    ['mnist']
    """
    import difflib  # for a mistake alone: every command would pay for it

    lower = word.lower()
    scores = {name: difflib.SequenceMatcher(None, lower, name.lower()).ratio() for name in names}
    scores |= {
        name: max(score, 0.9)
        for name, score in scores.items()
        if len(word) > 1 and name.lower().startswith(lower)
    }
    best = max(scores.values(), default=0.0)
    close = [name for name, score in scores.items() if score >= max(0.6, best - 0.15)]
    return sorted(close, key=lambda name: (-scores[name], name))[:count]

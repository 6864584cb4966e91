"""What is wrong with a checkpoint that somebody asked about."""

from __future__ import annotations

from pathlib import Path


class BadCheckpoint(ValueError):
    """The file or folder is damaged, hostile or no checkpoint: exit code 1. Nothing of it was run."""

    def __init__(self, path: Path | str, problem: str, *, fix: str | None = None) -> None:
        self.problem = problem
        where = shown(str(path))
        super().__init__(f"{where}: {problem}" if fix is None else f"{where}: {problem}\nFix: {fix}")


CUT_FIX = "use an earlier checkpoint, or copy the file again"


def shown(text: str, limit: int = 300) -> str:
    """Text from a file as a terminal may show it: no control characters, not endless.

    >>> shown("fc\\x1b[31m.weight")
    'fc\\\\x1b[31m.weight'
    """
    clean = "".join(letter if letter.isprintable() else _escaped(letter) for letter in text[: limit + 1])
    return clean if len(text) <= limit else f"{clean[:limit]}..."


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii")

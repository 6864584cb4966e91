"""What a log is broken into: lines with their writer, tracebacks, and what rules found in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Who wrote a line: the file it is in, and the rank, worker or process that its prefix names.
Stream = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a log, its prefixes taken off.

    ``order`` counts lines over everything that is read, ``time`` is seconds since the epoch where the
    line, or one before it in the same file, carries a time stamp.
    """

    text: str
    raw: str
    source: str
    number: int
    order: int
    rank: int | None = None
    label: str = ""
    time: float | None = None

    @property
    def stream(self) -> Stream:
        return (self.source, self.label or ("" if self.rank is None else f"rank {self.rank}"))

    @property
    def place(self) -> str:
        return f"{self.source}:{self.number}" if self.source else f"line {self.number}"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of a Python traceback."""

    file: str
    line: int
    function: str
    code: str = ""


@dataclass
class Traceback:
    """A Python traceback, as one stream printed it."""

    head: Line
    frames: list[Frame] = field(default_factory=list)
    exception: str = ""
    message: list[str] = field(default_factory=list)
    end: Line | None = None
    is_closed: bool = False
    is_harmless: bool = False  # "Exception ignored in", or logged by somebody who went on
    replaced_by: int | None = None  # order of the traceback that an `except` block raised after this one
    source_line: str = ""  # the code that a SyntaxError shows

    @property
    def text(self) -> str:
        """The exception with its message on one line, white space collapsed."""
        return " ".join(" ".join([f"{self.exception}:", *self.message]).split())

    @property
    def order(self) -> int:
        return (self.end or self.head).order


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A rule that fits, where, and what it captured."""

    rule_id: str
    line: Line
    groups: Mapping[str, str]
    traceback: Traceback | None = None
    evidence: tuple[str, ...] = ()

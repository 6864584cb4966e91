"""A plain table for a terminal: aligned columns, cut to its width, coloured where that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CUT = ".."
LAST_COLUMN = 12  # letters that the last one keeps while there are others to leave out
_COLOURS = {
    "": "",
    "bad": "\033[31m",
    "good": "\033[32m",
    "busy": "\033[33m",
    "head": "\033[1m",
    "dim": "\033[2m",
}
_PLAIN = "\033[0m"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column. Where the table is too wide, those with the highest ``spare`` go first; 0 always stays."""

    title: str
    right: bool = False
    spare: int = 0


@dataclass(frozen=True)
class Cell:
    """A text and what it says of the thing: "bad", "good", "busy", "dim", or nothing."""

    text: str
    mood: str = ""


def table_lines(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    width: int | None = None,
    colour: bool = False,
) -> list[str]:
    """The lines of a table, its head first. The last column is cut where it does not fit."""
    kept = list(range(len(columns)))
    widths = [
        max(len(column.title), *(len(row[i].text) for row in rows), 0) for i, column in enumerate(columns)
    ]
    last_floor = min(widths[-1], LAST_COLUMN)
    while width is not None and _total(kept, widths, last_floor) > width:
        spare = max(kept, key=lambda i: (columns[i].spare, i))
        if not columns[spare].spare:
            break
        kept.remove(spare)
    if width is not None and kept[-1] == len(columns) - 1:
        room = width - _total(kept, widths, 0)
        widths[-1] = max(min(widths[-1], room), len(CUT) + 1)
    head = [Cell(column.title, "head") for column in columns]
    return [_line(columns, kept, widths, row, width, colour) for row in (head, *rows)]


def _total(kept: Sequence[int], widths: Sequence[int], last: int) -> int:
    return sum(widths[i] + 2 for i in kept[:-1]) + (last if kept[-1] == len(widths) - 1 else widths[kept[-1]])


def _line(
    columns: Sequence[Column],
    kept: Sequence[int],
    widths: Sequence[int],
    row: Sequence[Cell],
    width: int | None,
    colour: bool,
) -> str:
    parts = []
    for i in kept:
        text = cut(row[i].text, widths[i])
        padded = text.rjust(widths[i]) if columns[i].right else text.ljust(widths[i])
        parts.append(Cell(padded.rstrip() if i == kept[-1] else padded, row[i].mood))
    line = "  ".join(paint(cell.text, cell.mood, colour) for cell in parts)
    plain = "  ".join(cell.text for cell in parts)
    if width is not None and len(plain) > width:
        return cut(plain, width)  # even what must stay is too wide
    return line.rstrip()


def cut(text: str, width: int) -> str:
    """A text of at most ``width`` letters; dots show that there was more.

    >>> cut("python train.py", 11), cut("train", 11)
    ('python tr..', 'train')
    """
    return text if len(text) <= width else text[: max(0, width - len(CUT))] + CUT[: max(0, width)]


def paint(text: str, mood: str, colour: bool) -> str:
    """The text in its colour."""
    return f"{_COLOURS[mood]}{text}{_PLAIN}" if colour and mood and text.strip() else text

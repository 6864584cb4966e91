"""Who wrote a line: prefixes of launchers, log shippers and loggers, taken off one after another."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from phalanx.tools.explain.events import Line

_ANSI = re.compile(r"\x1b(?:\[[0-?]{0,40}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

#: What can stand before the text of a line. `rank`, `label` and `time` are what a prefix may tell; each
#: takes one space after it at most, so that the indentation of a traceback stays.
_PREFIXES = [
    re.compile(pattern)
    for pattern in (
        r"\[(?:rank|default|Rank)[ :_]{0,2}(?P<rank>\d{1,6})\]:? ?",  # torchrun, phalanx, Lightning
        r"\[(?P<label>\d{1,3},(?P<rank>\d{1,6}))\]<(?:stdout|stderr|stddiag)>: ?",  # mpirun --tag-output
        r"\[(?P<rank>\d{1,6})\]<(?:stdout|stderr)>: ?",  # horovodrun
        r"(?:rank|RANK|Rank|proc|worker) ?(?P<rank>\d{1,6}): ?(?=[\[A-Z ]|$)",
        r" {0,2}(?P<rank>\d{1,6}): (?! *$)(?!\d+ \|)",  # srun --label
        r"\[\d{1,3},\d{1,6}\]: ?",
        r"(?P<label>[A-Za-z][\w.]{0,60}-\d{1,5}|(?:\d{1,3}\.){3}\d{1,3}): (?=\S| {2})",  # pdsh, DeepSpeed
        r"\((?P<label>[\w.<>-]{1,80}(?: pid=\d+)(?:, ip=[\d.]+)?)\) ?",  # Ray
        r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?) (?:std(?:out|err) [FP] )?",
        r"\[?(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?:Z|[+-]\d\d:?\d\d)?\]?[: ]{0,2}(?:- )?",
        r"\[?\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\]?[: ]{0,2}",
        r"\[\d\d:\d\d:\d\d\]:? ?",
        r"\[(?P<pid>\d{2,8})\] (?=\[rank)",
        r"\[?[EWIF]\d{3,4} \d\d:\d\d:\d\d(?:\.\d{1,9})?(?: +\d+)?(?: [\w./-]{1,120}:\d+)?\] ?",  # glog
        r"\[[EWIFC](?: [\w./-]{1,120}:\d+)?\] ?",  # c10d of torch 1.x and 2.0
        r"\[(?:INFO|WARNING|WARN|ERROR|CRITICAL|DEBUG)\]:? ?",
        r"(?:INFO|WARNING|ERROR|CRITICAL|DEBUG):(?=\S)(?!root:\s*$)",
        r"(?:std(?:err|out)|STDERR|STDOUT): ?",
        r"(?:> ?){1,4}(?=\S| {2})",  # quoted in an issue or a mail
        r" {2}\| (?=\S| {2})",  # the last lines in a report of `phalanx run`
        r"\d{1,6}[|:│] (?=\S| {2})",
    )
]
#: A progress bar that another message was printed behind.
_BAR = re.compile(r"[^|\n]{0,120}\d+%\|[^|\n]{0,400}\|[^\[\n]{0,80}\[[^\]\n]{0,120}\](?=[\[A-Za-z(<])")
_TIME_INSIDE = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_GLOG_TIME = re.compile(r"\[?[EWIF](\d\d?)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,6})")
_RANK_INSIDE = re.compile(
    r"\[(?:PG [^\]]{0,80} )?[Rr]ank[: ]+(\d{1,6})\]|^\[Rank (\d{1,6})\]|\[Rank_(\d{1,6})\]"
)


def decode(data: bytes) -> str:
    """Bytes of a log as text: UTF-8, else Latin-1, which every byte is."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return _CONTROL.sub("", text)


def time_of(text: str) -> float | None:
    """Seconds since the epoch (as if in UTC) of the first full time stamp in a line.

    >>> time_of("2024-05-01 12:00:00,500 - INFO") == time_of("2024-05-01T12:00:00.500Z x")
    True
    """
    found = _TIME_INSIDE.search(text[:200])
    try:
        if found:
            moment = datetime.fromisoformat(f"{found[1]} {found[2]}").replace(tzinfo=timezone.utc)
            return moment.timestamp() + float(f"0.{found[3] or 0}")
        found = _GLOG_TIME.search(text[:200])
        if found:  # without a year: any will do, within one log
            month, day, hour, minute, second = (int(found[n]) for n in range(1, 6))
            moment = datetime(2024, month, day, hour, minute, second, tzinfo=timezone.utc)
            return moment.timestamp() + float(f"0.{found[6]}")
    except ValueError:
        return None
    return None


def split_prefix(text: str) -> tuple[str, int | None, str]:
    """The text after its prefixes, the rank they name, and the label of its writer.

    >>> split_prefix("[rank3]:   File 'a'")
    ("  File 'a'", 3, '')
    >>> split_prefix("worker-0: [2024-05-01 12:00:00,123] [INFO] x")
    ('x', None, 'worker-0')
    """
    rank: int | None = None
    label = ""
    bar = _BAR.match(text)
    if bar:
        text = text[bar.end() :]
    for _ in range(6):
        for prefix in _PREFIXES:
            found = prefix.match(text)
            if found and found.end():
                break
        else:
            break
        groups = found.groupdict()
        if groups.get("rank") and rank is None:
            rank = int(groups["rank"])
        label = label or groups.get("label") or ""
        text = text[found.end() :]
    return text, rank, label


def make_line(
    data: bytes, *, source: str, number: int, order: int, rank: int | None, time: float | None
) -> Line:
    """A line from its bytes; ``rank`` is the one that the file belongs to, ``time`` the newest before it."""
    raw = decode(data).rstrip()
    text, own_rank, label = split_prefix(raw)
    if own_rank is None:
        inside = _RANK_INSIDE.search(text[:200])
        own_rank = int(next(group for group in inside.groups() if group)) if inside else rank
    return Line(
        text=text,
        raw=raw,
        source=source,
        number=number,
        order=order,
        rank=own_rank,
        label=label,
        time=time_of(raw) or time,
    )

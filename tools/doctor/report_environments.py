"""Several environments in one report: the one that is complained about, without those that work."""

from __future__ import annotations

import re

from phalanx.tools.doctor.report_labels import key_of, split_label

# collect_env's first lines; an environment reaches from one to where the next one's heading begins.
_FIRST = ("pytorchversion",)
_FOLLOWS = ("isdebugbuild", "cudausedtobuildpytorch", "rocmusedtobuildpytorch", "os")
_LOOKS_ABOVE = 8
_GOOD = re.compile(
    r"\b(?:work(?:s|ing|ed)|good|fine|ok(?:ay)?|success\w{0,5}|healthy|before|old(?:er)?|previous|passes|reference|expected)\b",
    re.I,
)
_BAD = re.compile(
    r"\b(?:(?:not|n.t|doesn.t|isn.t|stopped|no longer) work\w{0,3}|non-?working|broken?|fail(?:s|ed|ing|ure)?|bad|error|crash\w{0,3}|hang\w{0,3}|"
    r"problem\w{0,6}|after|new(?:er)?|wrong|faulty|slow(?:er)?|unavailable)\b",
    re.I,
)


def without_working_ones(lines: list[str]) -> list[str]:
    """The lines without the environments that a report shows as working, where it shows several.

    >>> lines = "Works:\\nPyTorch version: 2.4.0\\nIs debug build: No\\nFails:\\nPyTorch version: 2.5.0\\nIs debug build: No".split("\\n")
    >>> without_working_ones(lines)
    ['Works:', 'Fails:', 'PyTorch version: 2.5.0', 'Is debug build: No']
    """
    starts = _starts(lines)
    if len(starts) < 2:
        return lines
    ends = [_end(lines, start, stop) for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True)]
    scores = [_score(lines, start, end, starts) for start, end in zip(starts, ends, strict=True)]
    chosen = scores.index(max(scores))
    dropped = {
        number
        for position, (start, end) in enumerate(zip(starts, ends, strict=True))
        if position != chosen
        for number in range(start, end)
    }
    return [line for number, line in enumerate(lines) if number not in dropped]


def _starts(lines: list[str]) -> list[int]:
    found = []
    for number, line in enumerate(lines):
        if "version" not in line.lower() or _key(line) not in _FIRST:
            continue
        if any(_key(other) in _FOLLOWS for other in lines[number + 1 : number + 4]):
            found.append(number)
    return found[:20]


def _key(line: str) -> str:
    pair = split_label(line)
    return key_of(pair[0]) if pair else ""


def _end(lines: list[str], start: int, stop: int) -> int:
    """Where an environment ends: after its last labelled or listed line, so that prose below it stays."""
    last = start
    for number in range(start, stop):
        if split_label(lines[number]) or re.match(r"\s{0,6}(?:\[(?:pip|conda)|/usr/|GPU \d)", lines[number]):
            last = number
    return last + 1


def _score(lines: list[str], start: int, end: int, starts: list[int]) -> int:
    """How much an environment looks like the one at fault: by its heading, and by what it says itself."""
    earliest = max([0, start - _LOOKS_ABOVE, *(other + 1 for other in starts if other < start)])
    score = 0
    for line in reversed([line for line in lines[earliest:start] if line.strip()][-3:]):
        bad, good = bool(_BAD.search(line)), bool(_GOOD.search(line))
        if len(line) < 160 and (bad or good) and not split_label(line):
            score += 4 if bad else -4
            break
    for line in lines[start:end]:
        if _key(line) == "iscudaavailable":
            score += 2 if re.search(r"false|no\b|n/a", line, re.I) else -1
            break
    return score

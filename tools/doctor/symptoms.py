"""Words that a cause leaves in error messages and in people's reports of them.

Data, matched against lower-cased text. Gaps are bounded and no quantifier is nested, so a search stays
linear in the text. Weights: 90 and up the message names the cause, 70 to 89 it normally means it, 60 to 69 a
reader would say so, below that a hint. What facts say goes before any of it, see the checks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """A pattern, what it points at and how strongly.

    Args:
        also: Another pattern that must be somewhere in the text, or several.
        unless: A pattern that takes the symptom back.
    """

    id: str
    weight: int
    pattern: str
    also: str | tuple[str, ...] = ""
    unless: str = ""


@dataclass(frozen=True)
class Sighting:
    """A symptom that was seen, and the line it was seen in."""

    weight: int
    line: str


def sightings(messages: tuple[str, ...], cause: str, told: tuple[str, ...] = ()) -> tuple[Sighting, ...]:
    """What in the messages points at a cause, strongest first.

    Args:
        told: What of them a person wrote: where that is short, it is read for a retelling as well.
    """
    return _all_sightings(messages, told).get(cause, ())


def matters(line: str) -> bool:
    """Whether a line shows any symptom."""
    return bool(_any_symptom().search(_plain(line)))


def mentions(messages: tuple[str, ...], pattern: str) -> bool:
    """Whether a pattern (in lower case) is anywhere in the messages."""
    return _compiled(pattern).search(_joined(messages)) is not None


_SAYS_NOTHING = re.compile(r"[:=]\s{0,60}(?:n/a|could not collect|none|null|no|false)\s{0,8}$", re.I)
_HINT = 50  # the weight of words alone
_SHORT = 2_000  # characters of a text that is read as a person's few sentences


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Kept here, since there are more patterns than the re module keeps."""
    return re.compile(pattern)


@functools.lru_cache(maxsize=8)
def _joined(messages: tuple[str, ...]) -> str:
    return _plain("\n".join(messages))


_SYMBOL = re.compile(r"undefined symbols?[: ]{1,3}(?:called |named |of )?['`\"]?")


def _plain(text: str) -> str:
    """Lower case, and one way to write what people write in several. Lines stay where they are."""
    return _SYMBOL.sub("undefined symbol: ", text.lower())


@functools.lru_cache(maxsize=1)
def _any_symptom() -> re.Pattern[str]:
    from phalanx.tools.doctor.symptom_table import SYMPTOMS

    return re.compile("|".join(f"(?:{symptom.pattern})" for symptom in SYMPTOMS))


@functools.lru_cache(maxsize=8)
def _all_sightings(messages: tuple[str, ...], told: tuple[str, ...]) -> dict[str, tuple[Sighting, ...]]:
    from phalanx.tools.doctor.symptom_table import SYMPTOMS

    found: dict[str, list[Sighting]] = {}
    if messages:
        _look_for(SYMPTOMS, messages, found)
    told = tuple("" if _SAYS_NOTHING.search(line) else line for line in told)
    if told and sum(map(len, told)) <= _SHORT:
        _read_retelling(told, found)
    return {cause: _strongest(seen) for cause, seen in found.items()}


def _look_for(
    symptoms: Iterable[Symptom], messages: tuple[str, ...], found: dict[str, list[Sighting]]
) -> None:
    text = _joined(messages)
    for symptom in symptoms:
        match = _compiled(symptom.pattern).search(text)
        if match is None:
            continue
        others = (symptom.also,) if isinstance(symptom.also, str) else symptom.also
        if not all(_compiled(pattern).search(text) for pattern in others if pattern):
            continue
        if symptom.unless and _compiled(symptom.unless).search(text):
            continue
        found.setdefault(symptom.id, []).append(Sighting(symptom.weight, _line_at(messages, text, match)))


def _read_retelling(told: tuple[str, ...], found: dict[str, list[Sighting]]) -> None:
    """What a person's few sentences say; and where nothing was seen at all, what their words hint at."""
    from phalanx.tools.doctor.symptom_lexicon import likely_cause
    from phalanx.tools.doctor.symptoms_retold import RETOLD

    _look_for(RETOLD, told, found)
    if all(sighting.weight < _HINT for seen in found.values() for sighting in seen):
        hint = likely_cause(_joined(told))
        if hint:
            found.setdefault(hint, []).append(Sighting(_HINT, _summary(told)))


def _summary(messages: tuple[str, ...]) -> str:
    """The longest line: what a person wrote, rather than a fact."""
    return " ".join(max(messages, key=len, default="").split())[:300]


def _line_at(messages: tuple[str, ...], text: str, match: re.Match[str]) -> str:
    """The message that was matched, as it was written."""
    number = text.count("\n", 0, match.start())
    written = "\n".join(messages).split("\n")
    line = written[number] if number < len(written) else match.group()
    return " ".join(line.split())[:300]


def _strongest(seen: Iterable[Sighting]) -> tuple[Sighting, ...]:
    lines: dict[str, Sighting] = {}
    for sighting in sorted(seen, key=lambda sighting: -sighting.weight):
        lines.setdefault(sighting.line, sighting)
    return tuple(lines.values())

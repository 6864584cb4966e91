"""Findings made in one way: from facts that prove a cause, from symptoms that point at it, or from both."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.reading import seen

ENOUGH_TO_FAIL = 60
ENOUGH_TO_WARN = 40
REFUTED = 45  # what a symptom loses where facts speak against the cause


def fail(cause: str, title: str, evidence: Iterable[str], fix: Iterable[str], weight: int = 85) -> Finding:
    """Something that breaks a job."""
    return Finding(cause, "fail", title, _lines(evidence), _lines(fix), weight)


def warn(cause: str, title: str, evidence: Iterable[str], fix: Iterable[str], weight: int = 45) -> Finding:
    """Something that may break a job, or slows it."""
    return Finding(cause, "warn", title, _lines(evidence), _lines(fix), weight)


def fine(cause: str, title: str, *evidence: str) -> Finding:
    """Looked at, and right."""
    return Finding(cause, "ok", title, _lines(evidence), (), 50)


def symptom_weight(facts: Facts, cause: str) -> int:
    """How strongly the messages point at a cause, 0 where they do not."""
    found = seen(facts, cause)
    return found[0].weight if found else 0


def symptom_lines(facts: Facts, cause: str) -> tuple[str, ...]:
    """The messages that point at a cause, at most three."""
    lines = (sighting.line for sighting in seen(facts, cause))
    return tuple(line for line in lines if not line.startswith("("))[:3]


def suspected(
    facts: Facts,
    cause: str,
    title: str,
    fix: Iterable[str],
    *,
    refuted: bool = False,
    cap: int = 100,
    evidence: Iterable[str] = (),
) -> Finding | None:
    """A finding that rests on messages alone, weaker where facts speak against it."""
    weight = min(symptom_weight(facts, cause), cap) - (REFUTED if refuted else 0)
    lines = (*symptom_lines(facts, cause), *evidence)
    if weight >= ENOUGH_TO_FAIL:
        return fail(cause, title, lines, fix, weight)
    return warn(cause, title, lines, fix, weight) if weight >= ENOUGH_TO_WARN else None


def proven(
    facts: Facts, cause: str, title: str, evidence: Iterable[str], fix: Iterable[str], weight: int = 88
) -> Finding:
    """A failure that facts prove; a message that says the same makes it the more certain."""
    told = symptom_weight(facts, cause)
    lines = (*evidence, *symptom_lines(facts, cause))
    return fail(cause, title, lines, fix, min(99, max(weight, told) + (3 if told else 0)))


def _lines(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for line in lines if line))

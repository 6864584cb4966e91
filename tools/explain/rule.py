"""What a rule is: a row of data that names a cause by the words it leaves in a log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: ``cause``: it starts a failure. ``symptom``: it may be the cause where nothing better is known, such as a
#: timeout. ``consequence``: another rank's failure, seen from here; never named where a cause is.
#: ``warning``: it does no harm by itself, but is the cause if the run fails and nothing else explains it.
Kind = Literal["cause", "symptom", "consequence", "warning"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One cause, one way in which logs show it.

    Args:
        id: The diagnosis.
        when: Lower-case text without digits; one of them is in every line that can fit. This is what makes
            reading gigabytes cheap: no pattern is tried on a line without it.
        patterns: Regular expressions, searched for in the line (and, for a traceback, in its last part as a
            whole); the first that fits counts. Named groups are what is captured.
        unless: Expressions that must not fit the same line.
        cause: Sentences with ``{group}`` in them; the first whose groups were all captured is used.
        fix: What to type or change, best first.
        look: What else is worth a look.
        kind: See `Kind`.
        weight: Of several rules that fit one failure the heaviest is the most specific.
        beats: Diagnoses that are only another view of this one.
        refine: Name of a function of `refinements` that decides between siblings of this id by what was
            captured and by the rest of the log.
        exception: Set where only an exception's own line may fit, and no other text.
    """

    id: str
    when: tuple[str, ...]
    patterns: tuple[str, ...]
    cause: tuple[str, ...]
    fix: tuple[str, ...]
    unless: tuple[str, ...] = ()
    look: tuple[str, ...] = ()
    kind: Kind = "cause"
    weight: int = 50
    beats: tuple[str, ...] = ()
    refine: str = ""
    exception: bool = False
    _compiled: list[re.Pattern[str]] = field(default_factory=list, repr=False, compare=False)
    _barred: list[re.Pattern[str]] = field(default_factory=list, repr=False, compare=False)

    def match(self, text: str) -> dict[str, str] | None:
        """What was captured from the text; None where the rule does not fit."""
        if not self._compiled:  # at first use: compiling all rules would cost more than reading a small log
            self._barred.extend(re.compile(pattern, re.IGNORECASE) for pattern in self.unless)
            self._compiled.extend(re.compile(pattern, re.IGNORECASE) for pattern in self.patterns)
        for pattern in self._compiled:
            found = pattern.search(text)
            if found and not any(barred.search(text) for barred in self._barred):
                return {name: value for name, value in found.groupdict().items() if value is not None}
        return None

    def may_fit(self, raw: str) -> bool:
        """Whether it can fit a line whose prefixes are still there."""
        return any(pattern.startswith("^") or "|^" in pattern for pattern in self.patterns) or (
            self.match(raw) is not None
        )

    def in_words(self, groups: Mapping[str, str]) -> str:
        """The cause, with what was captured."""
        for sentence in self.cause:
            try:
                return sentence.format_map(groups)
            except KeyError:
                continue
        return self.cause[-1]


def fill(lines: tuple[str, ...], groups: Mapping[str, str]) -> list[str]:
    """Lines with what was captured; one that needs more than was captured is left out.

    >>> fill(("pip install {module}", "ulimit -n {wanted}"), {"module": "apex"})
    ['pip install apex']
    """
    filled = []
    for line in lines:
        try:
            filled.append(line.format_map(groups))
        except (KeyError, IndexError, ValueError):
            continue
    return filled

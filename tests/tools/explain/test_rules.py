"""Rules are data: what their table has to keep to, so that reading stays fast and linear."""

from __future__ import annotations

import re

import pytest

from phalanx.tools.explain.log_facts import FACTS, SIGNS
from phalanx.tools.explain.refinements import refinements
from phalanx.tools.explain.rule import Rule, fill
from phalanx.tools.explain.rules import BY_ID, RULES, candidates, index, key_of


def test_ids_are_unique_and_well_formed() -> None:
    names = [rule.id for rule in RULES]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in BY_ID)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_is_whole(rule: Rule) -> None:
    assert rule.when
    assert rule.patterns
    assert rule.fix
    for pattern in (*rule.patterns, *rule.unless):
        re.compile(pattern)
    assert not rule.refine or rule.refine in refinements()
    assert set(rule.beats) <= {*BY_ID, "broken-pipe"}
    assert rule.cause[-1].format_map(_Anything())
    assert fill((rule.fix[-1],), _Anything())


class _Anything(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "x"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_no_pattern_can_run_on(rule: Rule) -> None:
    """`.*` between two texts costs the square of a line's length; bounded repeats do not."""
    for pattern in (*rule.patterns, *rule.unless):
        bare = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "[]", pattern)  # without what is inside of brackets
        assert not re.search(r"(?<!\\)\.[*+]", bare), pattern
        assert not re.search(r"\[\^\\n\][*+]", pattern), pattern


@pytest.mark.parametrize(
    "entry", [*RULES, *FACTS, SIGNS], ids=lambda entry: getattr(entry, "id", None) or entry.name
)
def test_lines_of_an_entry_can_be_found(entry: Rule) -> None:
    """Shapes of lines leave digits out, and lines are compared in lower case: so do the texts of `when`."""
    for text in entry.when:
        assert text == text.lower()
        assert not re.search(r"\d", text), text
        key = key_of(text) or text.encode()
        assert key in text.encode()
        assert entry in candidates(text.encode(), index())


def test_common_words_are_no_keys() -> None:
    healthy = b"epoch 3 step 17 loss 0.5 acc 0.9 lr 0.1 batch size rank world time data train eval samples per second".split()
    assert [key for key in index() if key in healthy] == []

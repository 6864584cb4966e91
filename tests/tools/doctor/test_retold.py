"""Machines as people retell them: the right cause first from a sentence and loose facts, no failure on working ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.tools.doctor.checks import diagnose
from phalanx.tools.doctor.findings import Report
from phalanx.tools.doctor.report_text import facts_from_text
from phalanx.tools.doctor.symptom_lexicon import LEXICON, likely_cause
from phalanx.tools.doctor.symptoms import sightings
from tests.tools.doctor.reports_retold import HEALTHY, MACHINES, RETOLD, TROUBLES


def _report(said: str, facts: dict[str, Any]) -> Report:
    return diagnose(
        facts_from_text(json.dumps({"facts": facts, **({"symptom": said} if said else {})})).facts
    )


def _first(report: Report) -> str:
    return report.root_cause.id if report.root_cause else "none"


def test_a_retelling_has_the_right_cause_first() -> None:
    wrong = [
        f"{cause}: {said or facts} -> {got}"
        for cause, said, facts in RETOLD
        if (got := _first(_report(said, facts))) != cause
    ]
    assert len(wrong) <= 0.05 * len(RETOLD), wrong


def test_every_cause_is_retold() -> None:
    assert {cause for cause, _, _ in RETOLD} >= set(LEXICON)


@pytest.mark.parametrize(("said", "facts"), HEALTHY)
def test_another_trouble_on_a_working_machine_is_no_cause(said: str, facts: dict[str, Any]) -> None:
    assert _first(_report(said, facts)) == "none"


@pytest.mark.parametrize("facts", MACHINES)
def test_no_trouble_fails_a_working_machine(facts: dict[str, Any]) -> None:
    """Words that causes use, about programs: at the most a warning, and that seldom."""
    reports = {said: _report(said, facts) for said in TROUBLES}
    assert [said for said, report in reports.items() if report.verdict == "fail"] == []
    named = [said for said, report in reports.items() if report.root_cause and report.root_cause.weight >= 50]
    assert len(named) <= 0.25 * len(TROUBLES), named


def test_words_alone_never_fail() -> None:
    """A hint of the lexicon warns, with what was said as evidence."""
    report = _report("the choice of GPU inside main() changes nothing, all GPUs are still seen", {})
    assert report.root_cause is not None
    assert (report.root_cause.id, report.root_cause.status) == ("cuda-visible-devices-set-too-late", "warn")
    assert any("changes nothing" in line for line in report.root_cause.evidence)


def test_a_long_log_is_not_read_as_a_retelling() -> None:
    sentence = "the choice of GPU inside main() changes nothing, all GPUs are still seen"
    assert sightings((), "cuda-visible-devices-set-too-late", (sentence,))
    log = tuple(f"step {step}: loss {step / 7:.4f}, {step} samples per second" for step in range(100))
    assert not sightings((), "cuda-visible-devices-set-too-late", (*log, sentence))


def test_a_subject_alone_is_not_enough() -> None:
    for words in ("numpy", "torchvision and torch", "two gpus", "docker", "windows", ""):
        assert likely_cause(words) is None, words

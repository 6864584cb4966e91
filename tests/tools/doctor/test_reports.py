"""Pasted reports: the right cause first on broken machines, no failure on healthy ones."""

from __future__ import annotations

import json

import pytest

from phalanx.tools.doctor.checks import diagnose
from phalanx.tools.doctor.facts_json import from_json, to_json
from phalanx.tools.doctor.findings import Report
from phalanx.tools.doctor.report_text import facts_from_text
from tests.tools.doctor import cases, report_forms, reports_faulty, reports_healthy


def _report(text: str) -> Report:
    return diagnose(facts_from_text(text).facts)


def _first(report: Report) -> str:
    return report.root_cause.id if report.root_cause else "none"


def _said(report: Report) -> str:
    return "; ".join(f"{finding.id} {finding.status} {finding.weight}" for finding in report.findings[:4])


@pytest.mark.parametrize(("cause", "text"), reports_faulty.REPORTS)
def test_the_cause_of_a_pasted_report_comes_first(cause: str, text: str) -> None:
    report = _report(text)
    assert _first(report) == cause, _said(report)
    assert report.findings[0].evidence
    assert report.findings[0].fix


@pytest.mark.parametrize("text", reports_healthy.REPORTS)
def test_a_healthy_machine_never_fails(text: str) -> None:
    report = _report(text)
    assert report.verdict != "fail", _said(report)


def test_at_least_95_percent_of_the_cases_have_the_right_cause_first() -> None:
    """Loose facts with what their owner said, as JSON and as text."""
    for form in (cases.as_json, cases.as_text):
        wrong = [
            f"{case.cause}: {_said(report)}"
            for case in cases.FAULTY
            if _first(report := _report(form(case))) != case.cause
        ]
        assert len(wrong) <= 0.05 * len(cases.FAULTY), wrong


@pytest.mark.parametrize("case", cases.HEALTHY)
@pytest.mark.parametrize("form", [cases.as_json, cases.as_text])
def test_a_healthy_case_never_fails(case: cases.Case, form: cases.Form) -> None:
    assert _report(form(case)).verdict != "fail"


@pytest.mark.parametrize(
    "disguise",
    [
        report_forms.quoted,
        report_forms.windows,
        report_forms.coloured,
        report_forms.indented,
        report_forms.odd_colons,
        report_forms.no_colons,
        report_forms.fenced,
        lambda text: report_forms.quoted(report_forms.quoted(text)),
        lambda text: report_forms.windows(report_forms.fenced(text)),
    ],
)
def test_the_same_report_in_other_clothes_gives_the_same_facts(disguise: cases.Disguise) -> None:
    text = report_forms.collect_env(
        "2.6.0+cu126", "12.6", True, gpus=("NVIDIA GeForce RTX 5090",) * 2, driver="570.124.04"
    )
    plain, dressed = facts_from_text(text).facts, facts_from_text(disguise(text)).facts
    assert dressed.torch == plain.torch
    assert dressed.driver == plain.driver
    assert [gpu.name for gpu in dressed.gpus or ()] == ["NVIDIA GeForce RTX 5090"] * 2
    assert _first(diagnose(dressed)) == "arch-not-in-build"


@pytest.mark.parametrize("lines", range(3, 40, 4))
def test_a_report_cut_short_loses_facts_and_gains_no_failure(lines: int) -> None:
    text = report_forms.collect_env("2.4.0+cu121", "12.1", True, gpus=("NVIDIA A10",), driver="535.104.12")
    assert _report(report_forms.cut(text, lines)).verdict != "fail"


def test_what_was_found_and_what_was_lacking_is_said() -> None:
    read = facts_from_text("PyTorch version: 2.4.0+cu121\nIs CUDA available: False\n")
    assert "torch version" in read.found
    assert "NVIDIA driver" in read.lacked
    assert not set(read.found) & set(read.lacked)


def test_doctors_own_json_is_read_again() -> None:
    text = report_forms.collect_env("2.1.0+cu121", "12.1", False, gpus=("NVIDIA A10",), driver="450.80.02")
    report = _report(text)
    again = _report(json.dumps(report.to_json()))
    assert again.facts == report.facts
    assert [finding.id for finding in again.findings] == [finding.id for finding in report.findings]
    assert from_json(json.loads(json.dumps(to_json(report.facts)))) == report.facts


def test_nvidia_smi_gives_modes_and_memory() -> None:
    facts = facts_from_text(
        report_forms.smi("470.82.01", "11.4", "Tesla V100", "Tesla V100", mode="E. Process")
    ).facts
    assert facts.driver is not None
    assert facts.gpus is not None
    assert (facts.driver.version, facts.driver.cuda) == ("470.82.01", "11.4")
    assert [gpu.compute_mode for gpu in facts.gpus] == ["exclusive", "exclusive"]
    assert facts.gpus[0].memory_total_bytes == 24576 << 20


def test_a_conclusion_in_the_report_is_no_fact() -> None:
    text = json.dumps(
        {
            "torch_version": "2.4.0",
            "diagnosis": "gpu-ecc-error",
            "cause": "uncorrectable ECC error",
            "fix": "RMA",
        }
    )
    assert _first(_report(text)) == "none"


def test_a_symptom_at_either_end_of_a_long_log_is_read() -> None:
    steps = "\n".join(
        f"step {step} loss 0.{step} while the model of run {chr(97 + step % 26)} trains"
        for step in range(20_000)
    )
    for text in (
        "Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n" + steps,
        steps + "\nNVRM: Xid (PCI:0000:3b:00): 79, fallen off the bus.",
    ):
        report = _report(text)
        assert _first(report) == "gpu-lost"
        assert len(report.facts.messages) < 1_000

"""Two environments in one report: the one at fault is judged."""

from __future__ import annotations

import pytest

from phalanx.tools.doctor.checks import diagnose
from phalanx.tools.doctor.report_environments import without_working_ones
from phalanx.tools.doctor.report_text import facts_from_text
from tests.tools.doctor.report_forms import collect_env

_WORKS = collect_env("2.3.1+cu121", "12.1", True, gpus=("NVIDIA A10",), driver="535.104.12")
_BROKEN = collect_env("2.9.0+cu130", "13.0", False, gpus=("NVIDIA A10",), driver="535.104.12")


@pytest.mark.parametrize(
    "text",
    [
        f"### Working environment\n{_WORKS}\n### Broken environment\n{_BROKEN}",
        f"### Not working\n{_BROKEN}\n### Working\n{_WORKS}",
        f"Before the update:\n\n{_WORKS}\n\nAfter the update CUDA is gone:\n\n{_BROKEN}",
        f"{_BROKEN}\nand on the other machine\n{_WORKS}",
        f"{_WORKS}\n{_BROKEN}",
    ],
)
def test_the_broken_one_is_judged(text: str) -> None:
    facts = facts_from_text(text).facts
    assert facts.torch is not None
    assert (facts.torch.version, facts.torch.cuda_available) == ("2.9.0+cu130", False)
    root = diagnose(facts).root_cause
    assert root is not None
    assert root.id == "driver-too-old"


def test_headings_decide_where_both_see_the_gpu() -> None:
    hangs = collect_env("2.5.1+cu124", "12.4", True, gpus=("NVIDIA A10",) * 2, driver="550.90.07")
    for text in (f"Hangs:\n{hangs}\nWorks:\n{_WORKS}", f"Works:\n{_WORKS}\nHangs:\n{hangs}"):
        facts = facts_from_text(text).facts
        assert facts.torch is not None
        assert facts.torch.version == "2.5.1+cu124"
        assert facts.gpus is not None
        assert len(facts.gpus) == 2


def test_one_environment_and_prose_stay_whole() -> None:
    lines = f"It fails here:\n{_BROKEN}\nThanks for looking.".split("\n")
    assert without_working_ones(lines) == lines


def test_prose_between_environments_stays() -> None:
    text = f"Works:\n{_WORKS}\nError 803: system has unsupported display driver / cuda driver combination\nBroken:\n{_BROKEN}"
    root = diagnose(facts_from_text(text).facts).root_cause
    assert root is not None
    assert root.id == "driver-library-mismatch"

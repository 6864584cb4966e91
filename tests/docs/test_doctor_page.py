"""docs/doctor.md says what the command takes and prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from phalanx.launch.doctor_command import doctor_command
from phalanx.tools.doctor.ids import KNOWN_IDS
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "doctor.md").read_text()


def snippet(name: str) -> str:
    (found,) = re.findall(rf"```text {name}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_the_report_is_answered_as_shown(tmp_path: Path) -> None:
    report = tmp_path / "collect_env.txt"
    report.write_text(snippet("report"))
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", "--report", str(report)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert snippet("answer") in done.stdout


def test_every_option_is_in_the_table() -> None:
    table = PAGE.partition("## Options")[2]
    assert {option.opts[0] for option in doctor_command.params} == set(re.findall(r"`(--[a-z-]+)", table))


def test_ids_that_are_shown_exist() -> None:
    shown = set(re.findall(r"^(?:FAIL|WARN) .*\[([a-z0-9-]+)\]$", PAGE, re.MULTILINE))
    assert shown
    assert shown <= KNOWN_IDS


def test_lines_keep_to_the_width() -> None:
    assert [line for line in PAGE.splitlines() if len(line) > 140] == []

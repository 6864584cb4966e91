"""`phalanx recipes`: the list, and copies that run by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.entry import command
from phalanx.launch.targets import recipes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_list_has_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(recipes())
    assert all(len(line.split()) > 3 for line in lines)


def test_a_copy_is_the_page_itself_and_shows_its_help(folder: Path) -> None:
    assert command(["recipes", "copy", "mnist", "mine.py"]) == 0
    assert (folder / "mine.py").read_bytes() == recipes()["mnist"].path.read_bytes()
    done = subprocess.run([sys.executable, "mine.py", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--epochs" in done.stdout


def test_a_folder_gets_the_recipes_file_name(folder: Path) -> None:
    assert command(["recipes", "copy", "mnist", "."]) == 0
    assert (folder / "mnist.py").exists()


def test_nothing_is_overwritten_without_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text("precious")
    assert command(["recipes", "copy", "mnist", "mine.py"]) == 2
    assert capsys.readouterr().err == (
        "phalanx recipes: 'mine.py' exists already; it would be lost.\nFix: another name, or --force\n"
    )
    assert (folder / "mine.py").read_text() == "precious"
    assert command(["recipes", "copy", "--force", "mnist", "mine.py"]) == 0
    assert (folder / "mine.py").read_text() != "precious"


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["recipes", "copy", "mnist", "no/such/mine.py"]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err

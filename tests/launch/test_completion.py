"""The Tab key: scripts for three shells, and the words that they ask for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.entry import command
from phalanx.launch.targets import recipes


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_is_accepted_by_its_shell(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "_PHALANX_COMPLETE" in text
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed: its script was not parsed")
    (tmp_path / "script").write_text(text)
    subprocess.run([program, "-n", str(tmp_path / "script")], check=True)


def test_torchruns_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", "--print-completion", "bash"]) == 0
    assert "_PHALANX_COMPLETE" in capsys.readouterr().out


def words(line: str, folder: Path) -> list[str]:
    """What bash is told for ``line``, whose last word is being typed."""
    typed = line.split(" ")
    environ = {"_PHALANX_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(typed) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx"],
        env={**os.environ, **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_commands_options_recipes_and_files(tmp_path: Path) -> None:
    assert words("phalanx r", tmp_path) == ["plain,run", "plain,recipes"]
    assert words("phalanx run --no", tmp_path) == [
        "plain,--no-python",
        "plain,--no-preload",
        "plain,--node-rank",
    ]
    assert words("phalanx run mn", tmp_path) == ["plain,mnist", "file,mn"]
    assert f"plain,{min(recipes())}" in words("phalanx run ", tmp_path)

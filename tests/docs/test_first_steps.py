"""The tutorial's script before and after: both run, little changes, the first's checkpoint starts the second."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from phalanx.recipes.datasets import DIGITS_FILE
from phalanx.recipes.idx_files import FILE_NAMES, write_idx
from tests.conftest import ROOT
from tests.ranks import RankRunner

pytest.importorskip("torchvision", reason="the tutorial's script reads its data with torchvision")

FOLDER = ROOT / "docs" / "first-steps"
BEFORE, AFTER = FOLDER / "before.py", FOLDER / "after.py"
TEST_ITEMS = 101  # a prime: a sample that counts twice, or not at all, shows in the accuracy


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with data/MNIST/raw, made of the digits that come along, at MNIST's size."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    with np.load(DIGITS_FILE) as file:
        images = file["images"].repeat(3, axis=1).repeat(3, axis=2) * 15
        labels = file["labels"]
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    parts = {"train": slice(0, 1000), "t10k": slice(-TEST_ITEMS, None)}
    for name in FILE_NAMES:
        part = parts[name.split("-")[0]]
        write_idx(raw / name, (labels if "labels" in name else images)[part])
    return tmp_path


def _run_alone(script: Path, workplace: Path, epochs: int) -> str:
    done = subprocess.run(
        [sys.executable, script, "--epochs", str(epochs)],
        cwd=workplace,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_as_rank(rank: int, world_size: int, script: str, workplace: str, epochs: int) -> str:
    os.chdir(workplace)
    sys.argv = [script, "--epochs", str(epochs)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(script, run_name="__main__")
    return out.getvalue()


def _accuracies(out: str) -> dict[int, tuple[float, float]]:
    """Epoch -> validation and test accuracy in percent."""
    found = re.findall(
        r"^epoch (\d+): validation accuracy ([\d.]+)%, test accuracy ([\d.]+)%$", out, re.MULTILINE
    )
    assert len(found) == len(out.splitlines()), out
    return {int(epoch): (float(validation), float(test)) for epoch, validation, test in found}


def _is_share_of(percent: float, items: int) -> bool:
    right = percent / 100 * items
    return abs(right - round(right)) < 0.01


def test_the_manual_shows_the_very_difference() -> None:
    before, after = (path.read_text().splitlines(keepends=True) for path in (BEFORE, AFTER))
    shown = re.search(r"```diff\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown.group(1) == "".join(difflib.unified_diff(before, after, "before.py", "after.py", n=1))


def test_about_a_dozen_lines_change() -> None:
    """As many as the manual says: thirteen new ones, indentation aside."""
    before, after = (
        [line.strip() for line in path.read_text().splitlines() if line.strip()] for path in (BEFORE, AFTER)
    )
    lines = list(difflib.ndiff(before, after))
    new, gone = (sum(line.startswith(sign) for line in lines) for sign in ("+ ", "- "))
    assert (new, gone) == (13, 14)


def test_the_first_scripts_checkpoint_starts_the_second(run_ranks: RankRunner, workplace: Path) -> None:
    first = _accuracies(_run_alone(BEFORE, workplace, epochs=1))
    assert list(first) == [1]
    assert first[1][1] > 60
    outputs = run_ranks(_run_as_rank, str(AFTER), str(workplace), 2, world_size=2)
    assert outputs[1] == ""  # one rank speaks
    second = _accuracies(outputs[0])
    assert list(second) == [2]  # epoch 1 was the first script's
    assert second[2][1] > first[1][1] - 5
    validation, test = second[2]
    assert _is_share_of(validation, 100)
    assert _is_share_of(test, TEST_ITEMS)
    # From its own checkpoints now, on another number of ranks.
    third = _accuracies(_run_alone(AFTER, workplace, epochs=3))
    assert list(third) == [3]
    assert (workplace / "checkpoints").is_dir()


def test_the_second_script_needs_no_first(run_ranks: RankRunner, workplace: Path) -> None:
    outputs = run_ranks(_run_as_rank, str(AFTER), str(workplace), 2, world_size=2)
    accuracies = _accuracies(outputs[0])
    assert list(accuracies) == [1, 2]
    assert accuracies[2][1] > 60

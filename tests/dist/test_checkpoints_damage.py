"""A damaged checkpoint is named and the one before it used; a write that fails leaves what was there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.dist import checkpoint_files as files
from phalanx.dist import checkpoint_writing
from phalanx.dist.checkpoints import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointsError,
)
from tests.dist.checkpoint_runs import Run


def flip(path: Path, place: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writing, "PAUSE_S", 0.01)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("how", ["flipped bit", "cut", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, name: str, how: str
) -> None:
    run = Run(tmp_path)
    run.train(4, save_each=2)
    path = tmp_path / "step-4" / name
    if how == "flipped bit":
        flip(path)
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    assert len(run.checkpoints.verify()) == 1
    other = Run(tmp_path)
    with pytest.warns(CheckpointWarning, match=f"step-4 .*{name}.*Using step-2"):
        restored = other.checkpoints.restore()
    assert restored.path == tmp_path / "step-2"
    assert len(restored.damaged) == 1
    other.train(4, save_each=2)
    assert other.checkpoints.verify() == [], "the damaged one is replaced when its step comes round again"
    assert other.weights() == run.weights()


def test_when_all_checkpoints_are_damaged_the_run_does_not_start_over(tmp_path: Path) -> None:
    Run(tmp_path).train(0)
    run = Run(tmp_path)
    run.train(4, save_each=2)
    for step in (2, 4):
        flip(tmp_path / f"step-{step}" / "model.safetensors")
    with pytest.raises(DamagedCheckpointsError, match="all 2 checkpoints are damaged"):
        Run(tmp_path).checkpoints.restore(else_from=run.model.state_dict())


def test_a_write_that_fails_twice_is_tried_a_third_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    write_json, failures = files.write_json, [errno.EIO, errno.ESTALE]

    def shaky(path: Path, value: Any) -> files.FileRecord:
        if failures:
            raise OSError(failures.pop(), "a hiccup")
        return write_json(path, value)

    monkeypatch.setattr(files, "write_json", shaky)
    run.train(1)
    path = run.checkpoints.save()
    assert files.find_problems(path) == []
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-1"]


@pytest.mark.parametrize(("number", "tries"), [(errno.EIO, 3), (errno.ENOSPC, 1)])
def test_a_write_that_goes_on_failing_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, tries: int
) -> None:
    run = Run(tmp_path)
    run.train(2, save_each=2)
    calls = []

    def failing(path: Path, value: Any) -> files.FileRecord:
        calls.append(path)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "write_json", failing)
    run.train(3)
    with pytest.raises(CheckpointError, match=rf"{os.strerror(number)}(?s:.*)intact \(newest: .*step-2\)"):
        run.checkpoints.save()
    assert len(calls) == tries
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-2"]
    assert run.checkpoints.verify() == []

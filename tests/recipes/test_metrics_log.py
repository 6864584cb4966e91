"""Lines that a resumed run does not double, and a log without TensorBoard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from phalanx.dist import Progress
from phalanx.recipes.metrics_log import MetricsLog
from phalanx.recipes.runs import RunFolder, read_metrics


def _write(log: MetricsLog, *keys: tuple[str, int, int]) -> None:
    for split, epoch, step in keys:
        log.write(split, epoch, step, {"loss": 0.5, "accuracy": 0.25})


def _keys(path: Path) -> list[tuple[str, int, int]]:
    return [(line["split"], line["epoch"], line["step"]) for line in read_metrics(path)]


def test_a_line_is_a_json_object_and_out_at_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    log = MetricsLog(run, Progress())
    log.write("train", 1, 20, {"loss": 0.5, "accuracy": 0.25})
    text = run.metrics.read_text()
    assert text.endswith("\n")
    assert json.loads(text) == {"split": "train", "epoch": 1, "step": 20, "loss": 0.5, "accuracy": 0.25}
    log.write("train", 1, 40, {"loss": float("nan"), "accuracy": 0.1})  # JSON has no nan
    log.write("validation", 1, 40, {"loss": float("nan"), "accuracy": float("nan")})  # nothing was held out
    log.close()
    assert [line["loss"] for line in read_metrics(run.metrics)] == [0.5, None]
    assert list((tmp_path / "tensorboard").glob("events.*"))


STEPS = [("train", 1, 5), ("train", 1, 10), ("validation", 1, 10), ("train", 2, 15), ("train", 2, 20)]


@pytest.mark.parametrize(
    ("progress", "kept"),
    [
        (Progress(), 0),
        (Progress(epoch=0, step_in_epoch=7, step=7), 1),
        (Progress(epoch=0, step_in_epoch=10, step=10), 2),  # saved before the epoch's validation
        (Progress(epoch=1, step_in_epoch=0, step=10), 3),
        (Progress(epoch=1, step_in_epoch=5, step=15), 4),
        (Progress(epoch=2, step_in_epoch=0, step=20), 6),
    ],
)
def test_lines_from_after_the_checkpoint_are_cut(tmp_path: Path, progress: Progress, kept: int) -> None:
    run = RunFolder(tmp_path)
    lines = [*STEPS, ("validation", 2, 20), ("test", 2, 20)]
    log = MetricsLog(run, Progress())
    _write(log, *lines)
    log.close()
    with run.metrics.open("a") as file:
        file.write('{"split": "tr')  # a kill in the middle of a line
    log = MetricsLog(run, progress)
    assert _keys(run.metrics) == lines[:kept]
    _write(log, ("test", 9, 99))
    log.close()
    assert _keys(run.metrics) == [*lines[:kept], ("test", 9, 99)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = MetricsLog(RunFolder(tmp_path), Progress(), writes=False)
    _write(log, *STEPS)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_the_log_is_written_and_a_word_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = MetricsLog(RunFolder(tmp_path), Progress())
    _write(log, *STEPS)
    log.close()
    assert _keys(tmp_path / "metrics.jsonl") == STEPS
    assert "pip install 'phalanx[recipes]'" in capsys.readouterr().out

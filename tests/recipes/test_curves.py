"""The picture of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.dist import Progress
from phalanx.recipes.curves import draw_curves
from phalanx.recipes.metrics_log import MetricsLog
from phalanx.recipes.runs import RunFolder


def test_curves_are_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(RunFolder(tmp_path), Progress())
    for split, epoch, step in [("train", 1, 5), ("validation", 1, 10), ("train", 2, 20), ("test", 2, 20)]:
        log.write(split, epoch, step, {"loss": 0.5, "accuracy": 0.25})
    log.write("train", 2, 21, {"loss": float("inf"), "accuracy": 0.1})
    log.close()
    assert draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", "title")
    assert "matplotlib" in capsys.readouterr().out

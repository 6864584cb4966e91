"""What the loops share: exact evaluation, records that a resumed run does not double, a quiet display."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from phalanx.dist import Progress, ShardLoader
from phalanx.recipes.runs import RunFolder, read_metrics
from phalanx.recipes.settings import SettingsError
from phalanx.recipes.training import Display, Ledger, MetricsLog, draw_curves, evaluate, from_rank_zero
from tests.ranks import RankRunner


class _Scores(nn.Module):
    """Says class 1 where the input is positive, and counts the samples it has seen."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([-x, x], dim=1)


def _data(items: int) -> TensorDataset:
    x = torch.linspace(-3, 5, items)
    return TensorDataset(x, (torch.arange(items) % 3 > 0).long())


def _evaluate(rank: int, world_size: int, items: int, batch: int) -> tuple[float, float]:
    from phalanx.dist import init_world

    init_world()
    return evaluate(_Scores(), ShardLoader(_data(items), global_batch_size=batch))


@pytest.mark.parametrize(("items", "batch"), [(37, 10), (1, 4)])
def test_evaluation_counts_every_sample_once_on_any_number_of_ranks(
    run_ranks: RankRunner, items: int, batch: int
) -> None:
    x, labels = _data(items).tensors
    outputs = _Scores()(x)
    loss = nn.functional.cross_entropy(outputs, labels).item()
    accuracy = (outputs.argmax(1) == labels).float().mean().item()
    for world_size in (1, 3):
        for found in run_ranks(_evaluate, items, batch, world_size=world_size):
            assert found == (pytest.approx(loss, rel=1e-5), pytest.approx(accuracy, abs=1e-7))


def test_evaluation_leaves_the_mode_as_it_was() -> None:
    model = _Scores()
    evaluate(model, ShardLoader(_data(5), global_batch_size=2))
    assert model.training
    evaluate(model.eval(), ShardLoader(_data(5), global_batch_size=2))
    assert not model.training


def _refuse_on_rank_zero(rank: int, world_size: int, problem: str) -> object:
    from phalanx.dist import init_world

    init_world()

    def make() -> int:
        if problem:
            raise SettingsError(problem)
        return rank + 7

    try:
        return from_rank_zero(make)
    except SettingsError as error:
        return str(error)


def test_rank_zeros_word_is_everybodys(run_ranks: RankRunner) -> None:
    assert run_ranks(_refuse_on_rank_zero, "", world_size=2) == [7, 7]
    assert run_ranks(_refuse_on_rank_zero, "no", world_size=2) == ["no", "no"]


def _write(log: MetricsLog, *keys: tuple[str, int, int]) -> None:
    for split, epoch, step in keys:
        log.write(split, epoch, step, 0.5, 0.25)


def _keys(path: Path) -> list[tuple[str, int, int]]:
    return [(line["split"], line["epoch"], line["step"]) for line in read_metrics(path)]


def test_a_line_is_a_json_object_and_out_at_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    log = MetricsLog(run, Progress())
    log.write("train", 1, 20, 0.5, 0.25)
    text = run.metrics.read_text()
    assert text.endswith("\n")
    assert json.loads(text) == {"split": "train", "epoch": 1, "step": 20, "loss": 0.5, "accuracy": 0.25}
    log.write("train", 1, 40, float("nan"), 0.1)  # JSON has no nan
    log.write("validation", 1, 40, float("nan"), float("nan"))  # nothing was held out
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


def test_curves_are_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(RunFolder(tmp_path), Progress())
    _write(log, *STEPS, ("test", 2, 20))
    log.write("train", 2, 21, float("inf"), 0.1)
    log.close()
    assert draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", "title")
    assert "matplotlib" in capsys.readouterr().out


def test_the_ledger_survives_a_line_that_was_cut_short(tmp_path: Path) -> None:
    loader = ShardLoader(_data(10), global_batch_size=4, micro_batch_size=2, shuffle=True)
    path = tmp_path / "ledger" / "rank-0.jsonl"
    for _ in range(2):
        ledger = Ledger(str(path.parent), rank=0)
        for _ in loader:
            ledger.note(loader)
        ledger.close()
        with path.open("a") as file:
            file.write('{"epoch": 0, "st')
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [(line["epoch"], line["step"], line["positions"]) for line in lines] == [
        (0, 1, [0, 1, 2, 3]), (0, 2, [4, 5, 6, 7]), (0, 3, [8, 9]),
        (1, 4, [0, 1, 2, 3]), (1, 5, [4, 5, 6, 7]), (1, 6, [8, 9]),
    ]  # fmt: skip


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal()])
def test_a_bar_is_for_terminals_only(stream: io.StringIO) -> None:
    loader = ShardLoader(_data(10), global_batch_size=2, shuffle=True)
    with Display(25, speaks=True, stream=stream) as display:
        for epoch in range(25):
            assert len(list(display.watch(loader, epoch))) == 5
            display.epoch_done(epoch, 0.5, 0.75)
    text = stream.getvalue()
    assert "epoch 25/25  validation loss 0.5000, accuracy 75.00%" in text
    assert "samples/s" in text
    if stream.isatty():
        assert "\x1b[" in text
    else:
        assert not set("\r\x1b") & set(text)
        assert len(text.splitlines()) == 9  # about ten lines, however many epochs
    assert display.train_s > 0


def test_ranks_other_than_0_show_nothing() -> None:
    loader = ShardLoader(_data(10), global_batch_size=2, shuffle=True)
    stream: Any = _Terminal()
    with Display(1, speaks=False, stream=stream) as display:
        list(display.watch(loader, 0))
        display.epoch_done(0, 0.5, 0.75)
    assert stream.getvalue() == ""

"""The rnn recipe: forecasts better than the naive one, and text whose streams keep their state on any number of ranks."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.recipes import rnn
from phalanx.recipes.rnn import RnnSettings
from phalanx.recipes.runs import read_metrics
from tests.ranks import RankRunner
from tests.recipes.job import assert_equal_runs, run_job, weights

AIRLINE = RnnSettings(epochs=3, log_every_steps=2)
TEXT = RnnSettings(
    data="text", text_file="text.txt", epochs=2, global_batch_size=8, segment=10, hidden=12, sample=20, log_every_steps=3,
    checkpoint_every_steps=4,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = ["all", "ranks", "go", "side", "by", "side", "and", "none", "is", "left", "behind"]
    lines = [" ".join(words[i % (3 + i % 7) :: 1 + i % 3]) for i in range(80)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return tmp_path


def _train(
    rank: int,
    world_size: int,
    folder: str,
    settings: RnnSettings,
    changes: dict[str, Any],
    stop_at: int | None = None,
) -> str:
    return run_job(rnn.train, settings, folder, changes, stop_at)


@pytest.mark.slow
def test_the_forecast_beats_the_naive_one(run_ranks: RankRunner, tmp_path: Path) -> None:
    outputs = run_ranks(_train, str(tmp_path), AIRLINE, {"epochs": 40}, world_size=2)
    assert "one month ahead: RMSE" in outputs[0]
    assert outputs[1] == ""
    (line,) = [line for line in read_metrics(tmp_path / "runs/rnn/metrics.jsonl") if line["split"] == "test"]
    assert line["rmse"] < 42.5  # the month a year before: 42.6
    assert line["rmse_all_at_once"] < 95.7  # the last known year again: 95.8
    assert {path.name for path in (tmp_path / "runs/rnn").iterdir()} == {
        "checkpoints", "config.yaml", "curves.png", "forecast.png", "memory.json", "metrics.jsonl", "tensorboard",
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings", [AIRLINE, TEXT, dataclasses.replace(TEXT, lines=True)], ids=["airline", "text", "lines"]
)
def test_with_virtual_ranks_the_run_is_the_same_on_any_number_of_ranks(
    run_ranks: RankRunner, folder: Path, settings: RnnSettings
) -> None:
    for world_size in (1, 2):
        changes = {"virtual_ranks": 4, "output_dir": f"run-{world_size}", "dropout": 0.2}
        (out, *_) = run_ranks(_train, str(folder), settings, changes, world_size=world_size)
        assert "refused" not in out
    assert_equal_runs(folder / "run-1", folder / "run-2")


def test_a_run_cut_short_on_two_ranks_ends_on_one_as_if_it_had_not(
    run_ranks: RankRunner, folder: Path
) -> None:
    """Within an epoch: the streams' states come from the checkpoint, wherever their streams are read now."""
    both = {"virtual_ranks": 2}
    run_ranks(_train, str(folder), TEXT, both | {"output_dir": "whole"}, world_size=1)
    outputs = run_ranks(_train, str(folder), TEXT, both | {"output_dir": "cut"}, 7, world_size=2)
    assert outputs[0].endswith("cut short\n")
    (out,) = run_ranks(_train, str(folder), TEXT, both | {"output_dir": "cut"}, world_size=1)
    assert "going on with the run in cut" in out
    assert_equal_runs(folder / "whole", folder / "cut")


def _train_forgetting(rank: int, world_size: int, folder: str) -> str:
    from phalanx.recipes.stream_states import StreamStates

    StreamStates.load = lambda self, states: None  # type: ignore[method-assign]
    return _train(rank, world_size, folder, TEXT, {"output_dir": "cut"})


def test_a_state_that_is_not_handed_on_would_be_seen(run_ranks: RankRunner, folder: Path) -> None:
    """The test above can fail: a restored run with zeros in place of its states ends otherwise."""
    run_ranks(_train, str(folder), TEXT, {"output_dir": "whole"}, world_size=1)
    run_ranks(_train, str(folder), TEXT, {"output_dir": "cut"}, 7, world_size=1)
    run_ranks(_train_forgetting, str(folder), world_size=1)
    whole, cut = weights(folder / "whole"), weights(folder / "cut")
    assert any(not torch.equal(tensor, cut[name]) for name, tensor in whole.items())


def test_a_text_is_learnt_and_a_sample_written(run_ranks: RankRunner, folder: Path) -> None:
    (out,) = run_ranks(_train, str(folder), TEXT, {"epochs": 25, "hidden": 32}, world_size=1)
    lines = [
        line["bits_per_character"]
        for line in read_metrics(folder / "runs/rnn/metrics.jsonl")
        if line["split"] == "validation"
    ]
    assert lines[-1] < 0.7 * lines[0]
    assert "gzip needs" in out
    assert "test bits per character" in out
    sample = out.split("---\n")[1].rstrip("\n")
    assert 15 <= len(sample) <= 20


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--window", "5"], "--window 5: 13 to 60 is needed"),
        (["--train-months", "20"], "--train-months 20: 25 to 132 is needed"),
        (["--temperature", "0"], "--temperature 0.0: above 0 is needed"),
        (["--data", "text", "--text-file", "none.txt"], "--text-file none.txt cannot be read"),
        (["--data", "text", "--text-file", "text.txt", "--segment", "9999"], "too few for 32 streams"),
        (["--data", "text", "--text-file", "text.txt", "--lines", "--global-batch-size", "500"], "fewer than --global"),
        (["--strategy", "nonsense"], "strategy='nonsense'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as caught:
        rnn.main(words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err
    assert not (folder / "runs/rnn/checkpoints").exists()


def test_help_explains_each_setting_and_starts_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.recipes.rnn", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    for field in dataclasses.fields(RnnSettings):
        assert "--" + field.name.replace("_", "-") in done.stdout
    assert list(tmp_path.iterdir()) == []

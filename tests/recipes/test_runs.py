"""The run's folder: nothing is overwritten, a cut-short run goes on by itself, also after a restart."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from phalanx.recipes.mnist import MnistSettings
from phalanx.recipes.runs import RunFolder, choose_run, is_finished, newest_run, open_run, read_metrics
from phalanx.recipes.settings import SettingsError, read_yaml, training_settings

SETTINGS = {"data": "digits", "epochs": 3, "seed": 0}


def _open(output_dir: str | None, settings: dict[str, Any] = SETTINGS, **options: Any) -> RunFolder:
    return open_run(output_dir, settings, recipe="mnist", environ=options.pop("environ", {}), **options)


def _finish(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(json.dumps({"split": "test", "epoch": 3, "step": 9}) + "\n")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_first_run_has_the_plain_name_and_holds_its_settings() -> None:
    run = _open(None)
    assert run.path == Path("runs/mnist")
    assert read_yaml(run.path / "config.yaml") == SETTINGS
    assert run.notes == ()


def test_a_finished_run_is_never_touched() -> None:
    _finish(_open(None).path)
    second = _open(None)
    assert second.path == Path("runs/mnist-2")
    _finish(second.path)
    assert _open(None).path == Path("runs/mnist-3")


def test_a_run_cut_short_goes_on_if_it_is_the_same() -> None:
    first = _open(None)
    (first.path / "checkpoints").mkdir()
    again = _open(None)
    assert again.path == first.path
    assert "going on" in again.notes[0]
    other = _open(None, SETTINGS | {"seed": 1})
    assert other.path == Path("runs/mnist-2")
    assert _open(None).path == first.path  # a restart of the first finds it below a newer one
    assert _open(None, resume=False).path == Path("runs/mnist-3")


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_launchers_restart_goes_on_even_when_told_to_start_anew(name: str) -> None:
    for output_dir in (None, "here"):
        path = _open(output_dir, resume=False, environ={name: "0"}).path
        assert _open(output_dir, resume=False, environ={name: "1"}).path == path
        assert [entry.name for entry in path.parent.glob("*old*")] == []


def test_two_jobs_at_once_get_two_folders() -> None:
    with ThreadPoolExecutor(8) as pool:
        settings = [SETTINGS | {"seed": seed} for seed in range(8)]
        paths = [run.path for run in pool.map(lambda values: _open(None, values), settings)]
    assert len(set(paths)) == 8
    for path, values in zip(paths, settings, strict=True):
        assert read_yaml(path / "config.yaml") == values
    assert {entry.name for entry in Path("runs").iterdir()} == {path.name for path in paths}


def test_a_named_folder_goes_on_with_the_same_settings() -> None:
    first = _open("my/run")
    (first.path / "checkpoints").mkdir()
    assert _open("my/run").path == first.path
    _finish(first.path)
    again = _open("my/run")
    assert again.path == first.path
    assert "finished" in again.notes[0]


def test_a_named_folder_may_be_trained_for_more_epochs() -> None:
    _open("run")
    again = _open("run", SETTINGS | {"epochs": 5})
    assert "3 epochs" in again.notes[0]
    assert read_yaml(Path("run/config.yaml"))["epochs"] == 5
    with pytest.raises(SettingsError, match="epochs"):  # fewer would be another run
        _open("run", SETTINGS | {"epochs": 4})


def test_a_named_folder_with_other_settings_is_refused_naming_them() -> None:
    _open("run")
    with pytest.raises(SettingsError) as caught:
        _open("run", SETTINGS | {"seed": 4, "data": "fake"})
    text = str(caught.value)
    for word in (
        "seed (0 there, 4 asked for)",
        "data (digits there, fake asked for)",
        "--no-resume",
        "run/config.yaml",
    ):
        assert word in text
    assert read_yaml(Path("run/config.yaml")) == SETTINGS


def test_starting_anew_keeps_the_earlier_run_aside() -> None:
    _finish(_open("run").path)
    for number in (1, 2):
        again = _open("run", resume=False)
        assert f"run.old-{number}" in again.notes[0]
        assert not is_finished(again.path)
    assert is_finished(Path("run.old-1"))


def test_a_folder_that_is_no_run_is_not_taken_over() -> None:
    Path("file").write_text("")
    with pytest.raises(SettingsError, match="is a file"):
        _open("file")
    Path("strange/checkpoints").mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"no config\.yaml"):
        _open("strange")


def test_a_test_takes_the_newest_run_that_has_a_checkpoint() -> None:
    with pytest.raises(SettingsError, match="no run with a checkpoint in runs/mnist"):
        newest_run(None, recipe="mnist")
    first = _open(None).path
    _finish(first)
    (first / "checkpoints").mkdir()
    _open(None)  # newer, without a checkpoint
    settings = MnistSettings(test_only=True)
    assert choose_run(settings, recipe="mnist").path == first
    with pytest.raises(SettingsError, match="elsewhere"):
        choose_run(MnistSettings(test_only=True, output_dir="elsewhere"), recipe="mnist")


def test_where_a_run_is_kept_is_not_what_it_trains() -> None:
    settings = MnistSettings().resolved("digits")
    elsewhere = MnistSettings(
        output_dir="x", num_workers=2, micro_batch_size=8, ledger="y", strategy="ddp"
    ).resolved("digits")
    assert training_settings(settings) == training_settings(elsewhere)
    assert training_settings(settings) != training_settings(MnistSettings(lr=1.0).resolved("digits"))


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"split": "train", "step": 1}\n{"split": "va')
    assert read_metrics(path) == [{"split": "train", "step": 1}]
    assert read_metrics(tmp_path / "none") == []

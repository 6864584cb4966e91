"""The cifar recipe: files in CIFAR's format, single and ddp, cut short and resumed on another number of ranks."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.recipes import cifar, cifar_files
from phalanx.recipes.cifar import CifarSettings
from phalanx.recipes.runs import read_metrics
from tests.ranks import RankRunner
from tests.recipes.job import assert_equal_runs, run_job

SMALL = CifarSettings(
    data_dir="data", epochs=2, global_batch_size=16, width=4, lr=0.05, log_every_steps=2, checkpoint_every_steps=2
)  # fmt: skip


def write_cifar(folder: Path, name: str = "cifar10", items: int = 10, protocol: int = 2) -> Path:
    """Small batches as the University of Toronto's archive has them: dark images are of class 0, light ones of 1."""
    layout = cifar_files.LAYOUTS[name]
    target = folder / layout.folder
    target.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for file in (*layout.train, layout.test):
        labels = random.integers(0, 2, items).tolist()
        data = random.integers(0, 100, (items, 3072)) + 150 * np.array(labels)[:, None]
        content = {"data": data.astype(np.uint8), layout.labels: labels, "filenames": ["a.png"] * items}
        (target / file).write_bytes(pickle.dumps(content, protocol=protocol))
    names = {layout.names: [f"class {number}" for number in range(layout.classes)]}
    (target / layout.names_file).write_bytes(pickle.dumps(names, protocol=protocol))
    return target


def _train(
    rank: int, world_size: int, folder: str, changes: dict[str, Any], stop_at: int | None = None
) -> str:
    return run_job(cifar.train, SMALL, folder, changes, stop_at)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_run_leaves(run_ranks: RankRunner, tmp_path: Path, world_size: int) -> None:
    write_cifar(tmp_path / "data")
    (out, *others) = run_ranks(_train, str(tmp_path), {"epochs": 4}, world_size=world_size)
    assert others == [""] * (world_size - 1)
    assert "CIFAR10 in data/cifar-10-batches-py: 45 images to train on, 5 held out, 10 to test" in out
    run = tmp_path / "runs" / "cifar"
    assert {path.name for path in run.iterdir()} - {"mistakes.png"} == {
        "checkpoints", "config.yaml", "confusion.png", "curves.png", "memory.json", "metrics.jsonl", "tensorboard",
    }  # fmt: skip
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if line["split"] == "train"] == [2, 4, 6, 8, 10, 12]
    assert [line["epoch"] for line in lines if line["split"] == "validation"] == [1, 2, 3, 4]
    assert f"test accuracy {lines[-1]['accuracy']:.2%}" in out
    if world_size == 1:
        (again,) = run_ranks(_train, str(tmp_path), {"epochs": 4, "test_only": True}, world_size=1)
        assert f"test accuracy {lines[-1]['accuracy']:.2%}" in again


def test_dark_and_light_are_told_apart(run_ranks: RankRunner, tmp_path: Path) -> None:
    write_cifar(tmp_path / "data", items=24)
    run_ranks(_train, str(tmp_path), {"epochs": 5, "validation_fraction": 0.0}, world_size=1)
    lines = read_metrics(tmp_path / "runs/cifar/metrics.jsonl")
    assert lines[-1]["accuracy"] > 0.9
    assert lines[-1]["split"] == "test"


def test_with_virtual_ranks_the_run_is_the_same_on_any_number_of_ranks(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    write_cifar(tmp_path / "data")
    changes = {"virtual_ranks": 4, "augment": "trivial", "epochs": 1}
    for world_size in (1, 2, 4):
        folder = {"output_dir": f"run-{world_size}"}
        (out, *_) = run_ranks(_train, str(tmp_path), changes | folder, world_size=world_size)
        assert "test accuracy" in out
    for world_size in (2, 4):
        assert_equal_runs(tmp_path / "run-1", tmp_path / f"run-{world_size}")


def test_a_run_cut_short_on_two_ranks_ends_on_one_as_if_it_had_not(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    write_cifar(tmp_path / "data")
    both = {"virtual_ranks": 2, "balanced": True, "augment": "rand"}
    run_ranks(_train, str(tmp_path), both | {"output_dir": "whole"}, world_size=1)
    outputs = run_ranks(_train, str(tmp_path), both | {"output_dir": "cut"}, 5, world_size=2)
    assert outputs[0].endswith("cut short\n")
    (out,) = run_ranks(_train, str(tmp_path), both | {"output_dir": "cut"}, world_size=1)
    assert "going on with the run in cut" in out
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_cifar_100_with_resnet18_and_without_a_file_of_names(run_ranks: RankRunner, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "data", "cifar100", items=16)
    (folder / "meta").unlink()
    changes = {"data": "cifar100", "model": "resnet18", "epochs": 1, "augment": "auto", "cutout": 0}
    (out,) = run_ranks(_train, str(tmp_path), changes, world_size=1)
    assert "test accuracy" in out


def test_balanced_draws_rare_classes_as_often() -> None:
    from phalanx.recipes.color_images import ColorImages

    labels = torch.tensor([0] * 90 + [1] * 10)
    part = torch.zeros(100, 3, 32, 32, dtype=torch.uint8), labels
    images = ColorImages(part, part, part, ("a", "b"), (0.5,) * 3, (0.5,) * 3, "here")
    drawn = {}
    for balanced in (False, True):
        settings = dataclasses.replace(SMALL, balanced=balanced).resolved()
        loader, _, _ = cifar.loaders(settings, images)
        drawn[balanced] = sum(int((labels == 1).sum()) for _ in range(4) for _, labels in loader)
    assert drawn[False] == 40
    assert 150 < drawn[True] < 250


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--width", "0"], "--width 0: 1 to 1024 is needed"),
        (["--momentum", "1"], "--momentum 1.0: at least 0, below 1 is needed"),
        (["--optimizer", "adam"], "Fix: give --lr as well, such as 0.001"),
        (["--cutout", "40"], "--cutout 40: 0 to 32 is needed"),
        (["--data", "cifar10", "--data-dir", "none"], "are neither in none/cifar-10-batches-py nor in none"),
        (["--compile", "--virtual-ranks", "2"], "leave out one of them"),
        (["--strategy", "nonsense"], "strategy='nonsense'"),
        (["--test-only"], "there is no run with a checkpoint"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    write_cifar(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cifar.main(words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


def test_help_explains_each_setting_and_starts_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.recipes.cifar", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    for field in dataclasses.fields(CifarSettings):
        assert "--" + field.name.replace("_", "-") in done.stdout
    assert list(tmp_path.iterdir()) == []

"""The resnet recipe: a folder of images, single and ddp, cut short and resumed on another number of ranks."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.recipes import resnet
from phalanx.recipes.resnet import ResnetSettings
from phalanx.recipes.runs import read_metrics
from phalanx.recipes.schedules import factor_for
from tests.ranks import RankRunner
from tests.recipes.job import assert_equal_runs, run_job

pytest.importorskip("torchvision", reason="the recipe's networks are torchvision's")

SMALL = ResnetSettings(
    arch="shufflenet_v2_x0_5", epochs=2, global_batch_size=8, lr=0.02, warmup_epochs=1, crop=32, test_crop=32,
    test_resize=36, log_every_steps=1, checkpoint_every_steps=1,
)  # fmt: skip


def write_folder(folder: Path, items: int = 6) -> None:
    """Dark cats and light dogs, as JPEG and PNG of several sizes."""
    from PIL import Image

    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for name, least in (("cat", 0), ("dog", 150)):
            (folder / part / name).mkdir(parents=True)
            for number in range(items):
                size = (40 + 9 * number, 70, 3)
                pixels = random.integers(least, least + 100, size).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.{('jpg', 'png')[number % 2]}")


def _train(
    rank: int, world_size: int, folder: str, changes: dict[str, Any], stop_at: int | None = None
) -> str:
    return run_job(resnet.train, SMALL, folder, changes, stop_at)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_run_leaves(run_ranks: RankRunner, tmp_path: Path, world_size: int) -> None:
    write_folder(tmp_path / "data")
    changes = {"sync_bn": world_size > 1, "ema_decay": 0.9, "augment": "trivial", "erase": 0.5}
    (out, *others) = run_ranks(_train, str(tmp_path), changes, world_size=world_size)
    assert others == [""] * (world_size - 1)
    assert "shufflenet_v2_x0_5 on 12 images of 2 classes" in out
    run = tmp_path / "runs" / "resnet"
    assert {path.name for path in run.iterdir()} - {"mistakes.png"} == {
        "checkpoints", "config.yaml", "confusion.png", "curves.png", "memory.json", "metrics.jsonl", "tensorboard",
    }  # fmt: skip
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 3, 4]
    assert f"test accuracy {lines[-1]['accuracy']:.2%}" in out


def test_with_virtual_ranks_the_run_is_the_same_on_any_number_of_ranks(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    write_folder(tmp_path / "data")
    # 64 pixels: of 32 the last maps have one place, and batch norm refuses a virtual rank with one image.
    sides = {"crop": 64, "test_crop": 64, "test_resize": 64}
    changes = {"virtual_ranks": 4, "mixup": 0.2, "cutmix": 1.0, "ema_decay": 0.9, **sides}
    for world_size in (1, 2, 4):
        folder = {"output_dir": f"run-{world_size}"}
        (out, *_) = run_ranks(_train, str(tmp_path), changes | folder, world_size=world_size)
        assert "test accuracy" in out
    for world_size in (2, 4):
        assert_equal_runs(tmp_path / "run-1", tmp_path / f"run-{world_size}")


def test_a_run_cut_short_on_two_ranks_ends_on_one_as_if_it_had_not(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    write_folder(tmp_path / "data")
    both = {"virtual_ranks": 2, "ema_decay": 0.9}
    run_ranks(_train, str(tmp_path), both | {"output_dir": "whole"}, world_size=1)
    outputs = run_ranks(_train, str(tmp_path), both | {"output_dir": "cut"}, 3, world_size=2)
    assert outputs[0].endswith("cut short\n")
    (out,) = run_ranks(_train, str(tmp_path), both | {"output_dir": "cut"}, world_size=1)
    assert "going on with the run in cut" in out
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_weights_of_a_file_with_other_classes_and_a_heat_map_after(
    run_ranks: RankRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.recipes import class_maps, classifiers

    write_folder(tmp_path / "data")
    torch.manual_seed(0)
    torch.save(classifiers.plain(SMALL.arch, 1000).state_dict(), tmp_path / "w.pth")
    (out,) = run_ranks(_train, str(tmp_path), {"weights": "w.pth", "lr": 1e-9, "epochs": 1}, world_size=1)
    assert "w.pth: " in out
    assert "2 of another shape" in out
    trained = class_maps.load(tmp_path / "runs/resnet")
    theirs = torch.load(tmp_path / "w.pth")
    ours = trained.model.state_dict()
    assert torch.allclose(ours["network.conv1.0.weight"], theirs["conv1.0.weight"], atol=1e-6)
    image = class_maps.read_image(tmp_path / "data/val/cat/0.jpg", trained.side, 3)
    found = class_maps.class_map(trained, image)
    assert found.heat.shape == (32, 32)
    assert trained.classes == ("cat", "dog")


def test_presets_schedules() -> None:
    """v1: a tenth after each third of the run; v2: up along a line in five epochs, then along a cosine."""
    v1 = factor_for(ResnetSettings(preset="v1").resolved(), 10)
    assert [round(v1(10 * epoch), 3) for epoch in (0, 29, 30, 60, 89)] == [1, 1, 0.1, 0.01, 0.01]
    v2 = factor_for(ResnetSettings(preset="v2", epochs=105).resolved(), 2)
    assert [round(v2(step), 2) for step in (0, 5, 10, 110, 210)] == [0.01, 0.51, 1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--weights", "DEFAULT", "--init", "xavier"], "the weights would begin anew"),
        (["--arch", "resnet20"], "--arch resnet20: torchvision has no such classifier"),
        (["--data-dir", "none"], "none/train has no folders of classes"),
        (["--test-crop", "300"], "--test-resize 256: at least --test-crop, 300 is needed"),
        (["--compile", "--virtual-ranks", "2"], "leave out one of them"),
        (["--weights", "none.pth"], "--weights none.pth"),
        (["--erase", "2"], "--erase 2.0: 0 to 1 is needed"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    write_folder(tmp_path / "data", items=1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        resnet.main(words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


def test_help_explains_each_setting_and_starts_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.recipes.resnet", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    for field in dataclasses.fields(ResnetSettings):
        assert "--" + field.name.replace("_", "-") in done.stdout
    assert list(tmp_path.iterdir()) == []

"""The recipe: the same job on one rank and several, cut short and resumed to the bit, its records and its test."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.recipes import mnist
from phalanx.recipes.mnist import MnistSettings, network
from phalanx.recipes.runs import read_metrics
from tests.ranks import RankRunner
from tests.recipes.job import assert_equal_runs, run_job
from tests.recipes.test_datasets import write_images

SHORT = MnistSettings(data="digits", epochs=2, checkpoint_every_steps=6, log_every_steps=5)


def _train(
    rank: int, world_size: int, folder: str, changes: dict[str, Any], stop_at: int | None = None
) -> str:
    return run_job(mnist.train, SHORT, folder, changes, stop_at)


def _ledger(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(epoch, step) -> the positions of all ranks, the last note of a step counting."""
    found: dict[tuple[int, int], dict[str, list[int]]] = {}
    for path in folder.glob("rank-*.jsonl"):
        for text in path.read_text().splitlines():
            if text.endswith("}"):
                line = json.loads(text)
                found.setdefault((line["epoch"], line["step"]), {})[path.name] = line["positions"]
    return {key: sorted(chain.from_iterable(ranks.values())) for key, ranks in found.items()}


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (2, 2)])
def test_a_run_cut_short_within_an_epoch_ends_as_one_that_was_not(
    run_ranks: RankRunner, tmp_path: Path, world_size: int, workers: int
) -> None:
    whole = {"output_dir": "whole", "num_workers": workers}
    run_ranks(_train, str(tmp_path), whole, world_size=world_size)
    cut = {"output_dir": "cut", "num_workers": workers, "ledger": "ledger"}
    for stop_at in (9, 30)[workers // 2 :]:
        outputs = run_ranks(_train, str(tmp_path), cut, stop_at, world_size=world_size)
        assert outputs[0].endswith("cut short\n")
    outputs = run_ranks(_train, str(tmp_path), cut, world_size=world_size)
    assert "going on with the run in cut" in outputs[0]
    assert outputs[1:] == [""] * (world_size - 1)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")
    positions = _ledger(tmp_path / "ledger")
    assert sorted(step for _, step in positions) == list(range(1, 43))
    for epoch in (0, 1):
        taken = chain.from_iterable(positions[key] for key in positions if key[0] == epoch)
        assert sorted(taken) == list(range(1293))


def test_what_a_run_leaves(run_ranks: RankRunner, tmp_path: Path) -> None:
    (out,) = run_ranks(_train, str(tmp_path), {"epochs": 3}, world_size=1)
    run = tmp_path / "runs" / "mnist"
    assert {path.name for path in run.iterdir()} == {
        "checkpoints", "config.yaml", "confusion.png", "curves.png", "memory.json", "metrics.jsonl", "mistakes.png",
        "tensorboard",
    }  # fmt: skip
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(5, 61, 5))
    assert [(line["epoch"], line["step"]) for line in lines if line["split"] == "validation"] == [
        (1, 21),
        (2, 42),
        (3, 63),
    ]
    assert lines[-1]["split"] == "test"
    assert all(set(line) == {"split", "epoch", "step", "loss", "accuracy"} for line in lines[:-1])
    assert sum(map(sum, lines[-1]["confusion"])) == 360
    assert lines[-1]["accuracy"] > 0.85
    assert f"test accuracy {lines[-1]['accuracy']:.2%}" in out
    for path in ("curves.png", "metrics.jsonl", "checkpoints/step-63"):
        assert f"runs/mnist/{path}" in out
    assert "UCI handwritten digits" in out
    assert not set("\r\x1b") & set(out)
    (again,) = run_ranks(_train, str(tmp_path), {"test_only": True}, world_size=1)
    assert f"test accuracy {lines[-1]['accuracy']:.2%}" in again
    assert "step-63" in again
    assert read_metrics(run / "metrics.jsonl") == lines
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mnist"}


def test_a_finished_run_can_be_trained_further(run_ranks: RankRunner, tmp_path: Path) -> None:
    for epochs in (1, 2):
        (out,) = run_ranks(_train, str(tmp_path), {"epochs": epochs, "output_dir": "run"}, world_size=1)
    assert "was for 1 epochs and goes on to 2" in out
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["epoch"] for line in lines if line["split"] != "train"] == [1, 2, 2]


def test_samples_and_keys_of_a_step_are_free_of_the_number_of_ranks(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    ledgers = []
    for world_size in (1, 3):
        changes = {"output_dir": f"run-{world_size}", "ledger": f"ledger-{world_size}", "epochs": 1}
        run_ranks(_train, str(tmp_path), changes, world_size=world_size)
        ledgers.append(_ledger(tmp_path / f"ledger-{world_size}"))
    assert ledgers[0] == ledgers[1]
    losses = [
        read_metrics(tmp_path / f"run-{world_size}" / "metrics.jsonl")[0]["loss"] for world_size in (1, 3)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.2)  # dropout and batch norm see other rows


@pytest.mark.parametrize("data", ["digits", "fake"])
def test_virtual_ranks_write_the_same_lines_to_the_last_digit(
    run_ranks: RankRunner, tmp_path: Path, data: str
) -> None:
    changes = {"data": data, "virtual_ranks": 4, "micro_batch_size": 9, "epochs": 1}
    for world_size in (1, 2, 4):
        folder = {"output_dir": f"run-{world_size}"}
        run_ranks(_train, str(tmp_path), changes | folder, world_size=world_size)
    text = (tmp_path / "run-1" / "metrics.jsonl").read_text()
    assert {line["split"] for line in read_metrics(tmp_path / "run-1" / "metrics.jsonl")} == {
        "train", "validation", "test",
    }  # fmt: skip
    for world_size in (2, 4):
        assert (tmp_path / f"run-{world_size}" / "metrics.jsonl").read_text() == text
        assert_equal_runs(tmp_path / "run-1", tmp_path / f"run-{world_size}")


def test_accumulation_takes_the_same_steps(run_ranks: RankRunner, tmp_path: Path) -> None:
    changes = {"epochs": 1, "dropout": 0.0, "ledger": "ledger", "output_dir": "run"}
    run_ranks(_train, str(tmp_path), changes | {"micro_batch_size": 8}, world_size=2)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 21, 21]
    assert [len(taken) for _, taken in sorted(_ledger(tmp_path / "ledger").items())] == [64] * 20 + [13]


def test_made_up_images_only_by_name(run_ranks: RankRunner, tmp_path: Path) -> None:
    (out,) = run_ranks(_train, str(tmp_path), {"data": "fake", "epochs": 1}, world_size=1)
    assert "made-up images" in out
    assert read_metrics(tmp_path / "runs" / "mnist" / "metrics.jsonl")[-1]["accuracy"] > 0.9


def test_files_on_disk_are_trained_on_and_no_validation_is_fine(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    write_images(tmp_path / "here")
    changes = {
        "data": "auto",
        "data_dir": "here",
        "epochs": 1,
        "validation_fraction": 0.0,
        "augment": "shift",
    }
    (out,) = run_ranks(_train, str(tmp_path), changes, world_size=1)
    assert "MNIST in here: 40 images to train on, 10 to test" in out
    assert [line["split"] for line in read_metrics(tmp_path / "runs" / "mnist" / "metrics.jsonl")] == ["test"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "mnist"}, ["MNIST/raw", "--download"]),
        ({"strategy": "dpp"}, ["'ddp'"]),
        ({"precision": "fp8"}, ["fp8", "bf16"]),
        ({"test_only": True}, ["no run with a checkpoint"]),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(
    run_ranks: RankRunner, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    outputs = run_ranks(_train, str(tmp_path), changes, world_size=2)
    for out in outputs:
        assert out.startswith("refused: ")
        for word in words:
            assert word in out


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_damaged_checkpoints_are_one_message(run_ranks: RankRunner, tmp_path: Path, damage: str) -> None:
    run_ranks(_train, str(tmp_path), {"epochs": 2, "output_dir": "run"}, world_size=1)
    files = sorted(
        (tmp_path / "run" / "checkpoints").glob("*/model.safetensors"), key=lambda path: len(str(path))
    )
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content if damage == "flipped" else content[:-1])
    (out,) = run_ranks(_train, str(tmp_path), {"epochs": 3, "output_dir": "run"}, world_size=1)
    assert out.startswith("refused: ")
    assert "damaged" in out
    assert "run/checkpoints" in out


@pytest.mark.parametrize("side", [8, 28, 32])
def test_the_network_takes_every_image_size(side: int) -> None:
    outputs = network(side, classes=10, dropout=0.1)(torch.randn(3, 1, side, side))
    assert outputs.shape == (3, 10)

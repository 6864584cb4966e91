"""Stopping where the validation loss stays: the best weights are kept and tested, also by a run that was cut short."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from phalanx.recipes import early_stop, mnist
from phalanx.recipes.mnist import MnistSettings
from phalanx.recipes.runs import read_metrics
from tests.ranks import RankRunner
from tests.recipes.job import assert_equal_runs, run_job

#: A learning rate that soon does harm, so that the loss rises again within a few epochs.
WILD = MnistSettings(
    data="digits",
    epochs=30,
    patience=2,
    lr=0.02,
    schedule="constant",
    checkpoint_every_steps=8,
)


def _train(
    rank: int, world_size: int, folder: str, changes: dict[str, Any], stop_at: int | None = None
) -> str:
    return run_job(mnist.train, WILD, folder, changes, stop_at)


def _best(run: Path) -> Path:
    (found,) = (run / "best").glob("step-*")
    return found


def test_the_examples() -> None:
    assert doctest.testmod(early_stop).failed == 0


def test_it_stops_and_tests_the_best(run_ranks: RankRunner, tmp_path: Path) -> None:
    (out,) = run_ranks(_train, str(tmp_path), {"output_dir": "whole"}, world_size=1)
    lines = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if line["split"] == "validation"]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert len(losses) == best + 1 + 2 < 30  # two epochs were no better
    assert f"kept epoch {best + 1}: validation loss {losses[best]:.4f}, no better for 2 epochs" in out
    assert _best(tmp_path / "whole").name == f"step-{21 * (best + 1)}"
    assert lines[-1]["split"] == "test"
    assert lines[-1]["step"] == 21 * (best + 1)

    # Cut short in two places, on another number of ranks too, it stops at the same epoch with the same weights.
    for ranks, stop_at in ((1, 21 * (best + 1) + 10), (1, 21 * (best + 2) + 3), (1, None)):
        run_ranks(_train, str(tmp_path), {"output_dir": "cut"}, stop_at, world_size=ranks)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")
    ours, theirs = (load_file(_best(tmp_path / name) / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    # The same command once more, and --test-only, test the best again and train nothing.
    for changes in ({}, {"test_only": True}):
        (again,) = run_ranks(_train, str(tmp_path), {"output_dir": "whole", **changes}, world_size=1)
        assert f"kept epoch {best + 1}" in again
        assert f"test accuracy {lines[-1]['accuracy']:.2%}" in again


def test_ranks_stop_together(run_ranks: RankRunner, tmp_path: Path) -> None:
    outputs = run_ranks(_train, str(tmp_path), {"output_dir": "two", "virtual_ranks": 2}, world_size=2)
    run_ranks(_train, str(tmp_path), {"output_dir": "one", "virtual_ranks": 2}, world_size=1)
    assert "no better for 2 epochs" in outputs[0]
    assert_equal_runs(tmp_path / "one", tmp_path / "two")

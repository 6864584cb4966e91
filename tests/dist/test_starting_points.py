"""A run starts from a tutorial's file, from bare weights, or says why it cannot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.dist.checkpoints import (
    CheckpointWarning,
    OptimizerMismatchError,
    Restored,
)
from phalanx.dist.state_dict import PickledCodeError
from tests.dist.checkpoint_runs import OPTIMIZERS, Run


def tutorial(tmp_path: Path, kind: str = "adam") -> tuple[Path, Run]:
    """What a tutorial's script leaves behind, and the run that it left it in."""
    run = Run(tmp_path / "tutorial", kind)
    run.train(8)
    content = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "epoch": 2,
        "best": 0.75,
    }
    torch.save(content, tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt", run


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_tutorials_dict_starts_the_run_where_it_stopped(tmp_path: Path, kind: str) -> None:
    path, run = tutorial(tmp_path, kind)
    other = Run(tmp_path / "c", kind)
    restored = other.checkpoints.restore(else_from=path)
    assert (restored.epoch, restored.step, restored.path, restored.values) == (2, 8, None, {"best": 0.75})
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    run.train(11)
    other.train(11)
    assert other.weights() == run.weights()
    other.checkpoints.save()
    assert Run(tmp_path / "c", kind).checkpoints.restore(else_from=path).step == 11, "the folder comes first"


def test_bare_weights_start_a_run_from_its_beginning(tmp_path: Path) -> None:
    _, run = tutorial(tmp_path)
    other = Run(tmp_path / "c")
    assert other.checkpoints.restore(else_from=run.model.state_dict()) == Restored()
    assert other.weights() == run.weights()
    assert not other.optimizer.state
    run.checkpoints.save()
    other = Run(tmp_path / "d")
    other.checkpoints.restore(else_from=tmp_path / "tutorial" / "step-8")
    assert other.weights() == run.weights()


def test_a_starting_point_that_is_not_there_is_a_fresh_start_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(CheckpointWarning, match=r"checkpoint\.pt.*nothing there"):
        assert Run(tmp_path / "c").checkpoints.restore(else_from=tmp_path / "checkpoint.pt") == Restored()


def test_a_tutorials_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, _ = tutorial(tmp_path, "sgd")
    with pytest.raises(OptimizerMismatchError, match="momentum_buffer, which Adam cannot use"):
        Run(tmp_path / "c", "adam").checkpoints.restore(else_from=path)
    content = torch.load(path, weights_only=True)
    content["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(OptimizerMismatchError, match=r"saved with 3 parameters .* has 4"):
        Run(tmp_path / "c", "sgd").checkpoints.restore(else_from=content)


def test_a_starting_point_with_pickled_code_is_refused_without_running_it(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was-run"),)

    torch.save({"model": {}, "config": Payload()}, tmp_path / "evil.pt")
    with pytest.raises(PickledCodeError, match=r"posix\.mkdir"):
        Run(tmp_path / "c").checkpoints.restore(else_from=tmp_path / "evil.pt")
    assert not (tmp_path / "was-run").exists()

"""Optimizers, schedulers and loss scales come back by parameter name, or the error says what does not fit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.dist.checkpoints import (
    CheckpointManager,
    CheckpointWarning,
    OptimizerMismatchError,
)
from tests.dist.checkpoint_runs import Run, manager


def test_optimizer_state_keeps_its_precision_and_the_parameters_layout(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(3, 4, 3).to(torch.bfloat16, memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn_like(parameter, dtype=torch.float32),
            "exp_avg_sq": torch.rand_like(parameter, dtype=torch.float32),
        }
    manager(tmp_path, model, optimizer).save()
    other, resumed = make()
    manager(tmp_path, other, resumed).restore()
    for name, parameter in model.named_parameters():
        there = resumed.state[other.get_parameter(name)]
        for entry, value in optimizer.state[parameter].items():
            assert torch.equal(there[entry], value)
            assert there[entry].dtype == value.dtype
            assert there[entry].stride() == value.stride()


def test_an_optimizer_with_lists_and_numbers_in_its_state_comes_back(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.LBFGS, steps: int) -> list[float]:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = (model(torch.ones(1, 3)) - 2).pow(2).sum()
            value.backward()
            return value

        return [optimizer.step(loss).item() for _ in range(steps)]

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    run(model, optimizer, 2)
    manager(tmp_path, model, optimizer).save()
    other = nn.Linear(3, 1)
    resumed = torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=2)
    manager(tmp_path, other, resumed).restore()
    assert run(other, resumed, 3) == run(model, optimizer, 3)


def test_an_optimizer_of_another_model_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not one of the model's"):
        manager(tmp_path, nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1))


def test_other_optimized_parameters_are_named_or_start_fresh_on_request(tmp_path: Path) -> None:
    def make(*layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": list(model[layer].parameters()), "lr": 0.1 + layer} for layer in layers]
        return model, torch.optim.Adam(groups)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    model, optimizer = make(0, 1)
    step(model, optimizer)
    manager(tmp_path, model, optimizer).save()
    other, resumed = make(1, 2)
    checkpoints = manager(tmp_path, other, resumed)
    with pytest.raises(
        OptimizerMismatchError, match=r"without saved state: '2.weight', '2.bias'\n.*'0.weight', '0.bias'"
    ):
        checkpoints.restore()
    assert not resumed.state
    checkpoints.restore(partial_optimizer=True)
    assert torch.equal(resumed.state[other[1].weight]["exp_avg"], optimizer.state[model[1].weight]["exp_avg"])
    assert other[2].weight not in resumed.state
    assert torch.equal(other[2].weight, model[2].weight)
    assert [group["lr"] for group in resumed.param_groups] == [1.1, 2.1]


def test_groups_in_another_order_get_their_own_options(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(layer.parameters()), "lr": 0.5 + number} for number, layer in enumerate(model)]
    manager(tmp_path, model, torch.optim.SGD(groups)).save()
    resumed = torch.optim.SGD([{"params": list(layer.parameters()), "lr": 9.0} for layer in reversed(model)])
    manager(tmp_path, model, resumed).restore()
    assert [group["lr"] for group in resumed.param_groups] == [1.5, 0.5]
    with pytest.raises(OptimizerMismatchError, match="different 'lr'"):
        manager(tmp_path, model, torch.optim.SGD(model.parameters(), lr=9.0)).restore()


def test_another_optimizer_is_refused_and_adam_may_become_adamw(tmp_path: Path) -> None:
    run = Run(tmp_path, "adam")
    run.train(2, save_each=2)
    with pytest.raises(OptimizerMismatchError, match="optimizer is Adam, this run's is SGD"):
        Run(tmp_path, "sgd").checkpoints.restore()
    assert Run(tmp_path, "adamw").checkpoints.restore().step == 2


def test_a_scheduler_that_was_not_saved_starts_afresh_with_a_warning(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    manager(tmp_path, model).save()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(CheckpointWarning, match="no scheduler state"):
        manager(tmp_path, model, optimizer, scheduler=scheduler).restore()


@pytest.mark.parametrize(
    "make", ["StepLR", "MultiStepLR", "OneCycleLR", "SequentialLR", "LambdaLR", "ReduceLROnPlateau"]
)
def test_schedulers_of_torch_come_back(tmp_path: Path, make: str) -> None:
    from torch.optim import lr_scheduler as s

    model = nn.Linear(1, 1)

    def build() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        makers: dict[str, Any] = {
            "StepLR": lambda: s.StepLR(optimizer, 2),
            "MultiStepLR": lambda: s.MultiStepLR(optimizer, [2, 4]),
            "OneCycleLR": lambda: s.OneCycleLR(optimizer, 0.5, total_steps=9),
            "SequentialLR": lambda: s.SequentialLR(
                optimizer, [s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.5)], [3]
            ),
            "LambdaLR": lambda: s.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
            "ReduceLROnPlateau": lambda: s.ReduceLROnPlateau(optimizer, patience=0),
        }
        return optimizer, makers[make]()

    def advance(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        optimizer.step()
        scheduler.step(*([1.0] if make == "ReduceLROnPlateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's SequentialLR warns about itself
        optimizer, scheduler = build()
        for _ in range(3):
            advance(optimizer, scheduler)
        manager(tmp_path, model, optimizer, scheduler=scheduler).save()
        other, resumed = build()
        manager(tmp_path, model, other, scheduler=resumed).restore()
        assert [advance(other, resumed) for _ in range(4)] == [
            advance(optimizer, scheduler) for _ in range(4)
        ]


def test_the_loss_scale_of_fp16_comes_back(tmp_path: Path) -> None:
    from phalanx.dist.parallel import parallelize

    def make() -> tuple[CheckpointManager, Any]:
        model, optimizer, engine = parallelize(nn.Linear(2, 2), torch.optim.Adam, precision="fp16")
        return manager(tmp_path, model, optimizer), engine

    checkpoints, engine = make()
    state = engine.export()
    state["scaler"]["scale"] = 1024.0
    engine.load(state)
    checkpoints.save()
    other, resumed = make()
    other.restore()
    assert resumed.export()["scaler"]["scale"] == 1024.0

"""How weights begin and move: the settings' checks, optimizers, initialisations."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from torch import nn

from phalanx.recipes import optimizers
from phalanx.recipes.mnist import MnistSettings, network
from phalanx.recipes.optimizers import initialise, optimizer_for
from phalanx.recipes.recurrent import Recurrent
from phalanx.recipes.rnn import RnnSettings
from phalanx.recipes.settings import SettingsError


def test_the_examples() -> None:
    assert doctest.testmod(optimizers).failed == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optimizer": "sgd"}, "--optimizer sgd without --lr.*meant for adam"),
        ({"schedule": "cosine", "gamma": 0.5}, "--gamma 0.5 with --schedule cosine: it would have no effect"),
        ({"gamma": 1.5, "schedule": "step"}, "--gamma 1.5: above 0, below 1 is needed"),
        ({"step_epochs": 3}, "--step-epochs 3 with --schedule one-cycle"),
        ({"schedule": "multistep", "milestones": "30,20"}, "--milestones 30,20: rising epochs"),
        ({"schedule": "multistep", "milestones": "a"}, "--milestones a: rising epochs"),
        ({"schedule": "plateau", "validation_fraction": 0.0}, "plateau: this run has no validation loss"),
        ({"patience": 3, "validation_fraction": 0.0}, "--patience 3: this run has no validation loss"),
        ({"patience": 0}, "--patience 0: at least 1 is needed"),
        ({"lr": 0.0}, "--lr 0.0: above 0 is needed"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs -1.0: at least 0"),
    ],
)
def test_what_cannot_be_is_one_message(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        MnistSettings(**settings).check()


def test_passengers_have_nothing_to_wait_for() -> None:
    with pytest.raises(SettingsError, match="Fix: leave it out, or --data text"):
        RnnSettings(patience=2).check()
    RnnSettings(patience=2, data="text").check()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("rmsprop", torch.optim.RMSprop),
    ],
)  # fmt: skip
def test_optimizers_by_name(name: Any, kind: type) -> None:
    settings = MnistSettings(optimizer=name, lr=0.25, weight_decay=0.5, momentum=0.75)
    settings.check()
    made = optimizer_for(settings)([nn.Parameter(torch.zeros(2))])
    assert type(made) is kind
    (group,) = made.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.5)
    assert group.get("momentum", 0.75) == 0.75
    assert group.get("nesterov", True)


def test_sgd_without_momentum() -> None:
    made = optimizer_for(MnistSettings(optimizer="sgd", lr=0.1, momentum=0.0))([nn.Parameter(torch.zeros(2))])
    assert not made.param_groups[0]["nesterov"]


def test_the_default_changes_nothing() -> None:
    torch.manual_seed(0)
    model = network(8, 10, 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    initialise(model, "default")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("name", "spread"), [("xavier", (2 / 528) ** 0.5), ("kaiming", (2 / 400) ** 0.5)])
def test_the_spread_of_a_linear_layer(name: str, spread: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(400, 128)
    bias = layer.bias.clone()
    initialise(layer, name)
    assert float(layer.weight.detach().std()) == pytest.approx(spread, rel=0.02)
    assert torch.equal(layer.bias, bias)


def test_the_spread_of_a_convolution() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 128, 3)
    initialise(layer, "kaiming")
    assert float(layer.weight.detach().std()) == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)


@pytest.mark.parametrize("cell", ["hand", "rnn", "lstm", "gru"])
def test_each_gate_is_orthogonal(cell: Any) -> None:
    torch.manual_seed(0)
    model = Recurrent(cell, 16, 16)
    initialise(model, "orthogonal")
    matrices = [value for name, value in model.named_parameters() if "weight" in name]
    assert len(matrices) == 2
    for gate in (gate for matrix in matrices for gate in matrix.chunk(len(matrix) // 16)):
        assert torch.allclose(gate @ gate.T, torch.eye(16), atol=1e-5)

"""GradientGate: gradients weighted at a model's outputs, each once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.dist.engines.gradient_gate import GradientGate


class _Nested(nn.Module):
    """Gives a tensor, and another that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        return {"hidden": hidden, "rest": [self.second(hidden), (None, 3)]}


def _gradients(model: nn.Module, weight: float, factor: float = 1.0) -> list[Tensor]:
    gate = GradientGate(model)
    gate.weight = weight
    out = model(torch.ones(2, 3))
    out["rest"][0].mul_(2.0)  # the user may write into an output
    ((out["hidden"].sum() + out["rest"][0].square().sum()) * factor).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_every_gradient_is_weighted_once() -> None:
    torch.manual_seed(0)
    model = _Nested()
    plain = _gradients(copy.deepcopy(model), 1.0)
    for mine, expected in zip(_gradients(copy.deepcopy(model), 0.25), plain, strict=True):
        torch.testing.assert_close(mine, expected * 0.25)
    for mine in _gradients(copy.deepcopy(model), 0.0, float("nan")):
        assert mine.count_nonzero() == 0
        assert not mine.isnan().any()


def test_the_weight_is_that_of_the_backward_and_a_closed_gate_refuses() -> None:
    model = nn.Linear(1, 1)
    gate = GradientGate(model)
    out = model(torch.ones(1, 1))
    gate.weigh(3.0)
    out.sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 3.0
    gate.open, gate.refusal = False, "not like this"
    with pytest.raises(RuntimeError, match="not like this"):
        model(torch.ones(1, 1)).sum().backward()
    with torch.no_grad():
        model(torch.ones(1, 1))


class _Opaque:
    def __init__(self, y: Tensor) -> None:
        self.y = y


class _Hides(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return _Opaque(super().forward(x))


def test_outputs_that_cannot_be_weighted_are_told() -> None:
    model = _Hides(1, 1)
    gate = GradientGate(model)
    model(torch.ones(1, 1)).y.sum().backward()  # a weight of 1 needs nothing
    with pytest.raises(RuntimeError, match=r"of a class of its own.*\nFix: return tensors"):
        gate.weigh(0.5)
    with pytest.raises(RuntimeError, match="of a class of its own"):
        model(torch.ones(1, 1))

"""Small models and weights for tests of state dicts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.dist.state_dict import match_state_dict


def weights(*keys: str, shape: tuple[int, ...] = (2, 3)) -> dict[str, Tensor]:
    """A tensor of its own per key: all equal in shape, so that shapes give nothing away."""
    return {key: torch.full(shape, float(number)) for number, key in enumerate(keys, 1)}


def pairs(source: dict[str, Tensor], target: dict[str, Tensor] | list[str], **options: Any) -> dict[str, str]:
    """Target key to the source key whose tensor it got; complete on both sides."""
    match = match_state_dict(source, target, **options)
    assert match.missing == []
    assert match.unexpected == []
    names = {id(value): key for key, value in source.items()}
    return {key: names[id(value)] for key, value in match.state_dict.items()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.fc = nn.Linear(2, 3)


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

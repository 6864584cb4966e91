"""Residual networks for images of 32 x 32, and the mean over an image and its mirror image."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _convolution(inputs: int, outputs: int, *, pool: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)]
    if pool:  # before batch norm and activation: they have a quarter of the work
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(_convolution(channels, channels), _convolution(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolutions(x)  # type: ignore[no-any-return]


class FastResNet(nn.Module):
    """Eight convolutions in three stages, two of them residual, a global maximum and a linear layer.

    After David Page's network of DAWNBench (2018, "How to train your ResNet"): shallow and wide, learnt in a
    dozen epochs.

    >>> tuple(FastResNet(classes=10, width=8)(torch.zeros(2, 3, 32, 32)).shape)
    (2, 10)

    Args:
        classes: Outputs.
        width: Channels of the first convolution; the last has eight times as many.
    """

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(3, width),
            _convolution(width, 2 * width, pool=True),
            _Residual(2 * width),
            _convolution(2 * width, 4 * width, pool=True),
            _convolution(4 * width, 8 * width, pool=True),
            _Residual(8 * width),
        )
        self.classify = nn.Linear(8 * width, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        largest = F.adaptive_max_pool2d(self.features(images), 1).flatten(1)
        return 0.125 * self.classify(largest)  # type: ignore[no-any-return]  # small at first: no class is sure of itself


class _Basic(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2015) with a stem for small images: one 3 x 3 convolution and no pooling.

    Args:
        classes: Outputs.
        width: Channels of the first stage; 64 in the paper.
    """

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        stages: list[nn.Module] = [_convolution(3, width)]
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            stages += [_Basic(inputs, outputs, stride), _Basic(outputs, outputs, 1)]
            inputs = outputs
        self.features = nn.Sequential(*stages)
        self.classify = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


def network(model: str, classes: int, width: int) -> nn.Module:
    """fast or resnet18, laid out in memory as convolutions like it."""
    made = FastResNet(classes, width) if model == "fast" else ResNet18(classes, width)
    return made.to(memory_format=torch.channels_last)


class FlipMean(nn.Module):
    """For tests: the mean of what a model says of an image and of its mirror image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return (self.model(images) + self.model(images.flip(-1))) / 2  # type: ignore[no-any-return]

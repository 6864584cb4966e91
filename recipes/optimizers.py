"""The optimizers that a recipe's settings name, and how its weights begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from phalanx.recipes.optimization import OptimizationSettings


def optimizer_for(settings: OptimizationSettings) -> Callable[[Any], Optimizer]:
    """What makes the settings' optimizer from parameters or groups of them, as `phalanx.dist.parallelize` wants it."""
    common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay or 0.0}
    name, momentum = settings.optimizer_name, settings.momentum
    if name == "sgd":  # torch refuses Nesterov's momentum of 0
        return partial(SGD, momentum=momentum, nesterov=settings.nesterov and momentum > 0, **common)
    if name == "rmsprop":
        return partial(RMSprop, momentum=momentum, **common)
    return partial({"adam": Adam, "adamw": AdamW}[name], **common)


def initialise(model: nn.Module, name: str) -> None:
    """Begin the weights of linear, convolutional and recurrent layers anew, in place; biases and norms stay.

    >>> layer = nn.Linear(8, 8)
    >>> initialise(layer, "orthogonal")
    >>> torch.allclose(layer.weight @ layer.weight.T, torch.eye(8), atol=1e-5)
    True

    Args:
        name: ``xavier`` (Glorot and Bengio 2010, uniform), ``kaiming`` (He et al. 2015, normal, for ReLU, by the outputs),
            ``orthogonal`` (Saxe et al. 2014), or ``default``, which changes nothing.
    """
    if name == "default":
        return
    fill = {"xavier": _xavier, "kaiming": _kaiming, "orthogonal": _orthogonal}[name]
    with torch.no_grad():
        for weight in _weights(model):
            fill(weight)


def _weights(model: nn.Module) -> Iterable[torch.Tensor]:
    """Matrices and kernels; of a recurrent layer each gate's matrix, which are stacked in one."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            for name, weight in module.named_parameters(recurse=False):
                if "weight" in name:
                    yield from weight.chunk(weight.shape[0] // module.hidden_size)
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            yield module.weight


def _xavier(weight: torch.Tensor) -> torch.Tensor:
    return nn.init.xavier_uniform_(weight)


def _orthogonal(weight: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = nn.init.orthogonal_(weight)
    return made


def _kaiming(weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim == 2:
        return nn.init.normal_(weight, 0.0, math.sqrt(2 / weight.shape[1]))
    return nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")

"""The user's optimizer, made to hold the parameters that the engine trains."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import SGD, Optimizer

from phalanx.dist.engines.setting import MakeOptimizer


def ready_optimizer(model: nn.Module, optimizer: Optimizer | MakeOptimizer | None) -> Optimizer:
    """The optimizer over the model's own parameters.

    Raises:
        ValueError: It has state, or parameters that are not the model's: steps would change nothing; or it is no optimizer,
            nor a function that returns one.
    """
    made = optimizer if isinstance(optimizer, Optimizer) else None
    if optimizer is None and not any(param.requires_grad for param in model.parameters()):
        return SGD(model.parameters(), lr=0.0)  # there is nothing to step
    if made is not None and made.state:
        raise ValueError(
            "parallelize: the optimizer has state already, which ranks may not share and which is not moved with the model.\n"
            "Fix: pass a fresh one, or its class (some, as Adagrad, begin with state); CheckpointManager.restore() puts a "
            "saved state in"
        )
    if made is None and optimizer is not None and callable(optimizer) and not _is_module(optimizer):
        made = optimizer(model.parameters())
    if not isinstance(made, Optimizer):
        raise ValueError(
            f"parallelize: {type(optimizer).__name__} is no optimizer and no function that returns one.\n"
            "Fix: pass Adam(model.parameters()), or Adam itself"
        )
    own = {id(param) for param in model.parameters()}
    foreign = [param for group in made.param_groups for param in group["params"] if id(param) not in own]
    if foreign:
        shapes = ", ".join(str(tuple(param.shape)) for param in foreign[:4])
        raise ValueError(
            f"parallelize: {len(foreign)} of the optimizer's parameters are not the model's (shapes {shapes}).\n"
            "Its steps would not change the model's weights.\n"
            "Fix: build the optimizer from this model's parameters, or pass a function such as Adam"
        )
    return made


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module))


def point_at(optimizer: Optimizer, successors: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let the optimizer hold the ``successors`` of its parameters, in the same groups and order.

    The object stays the same, so schedulers and hooks that know it go on.

    Raises:
        ValueError: It keeps parameters elsewhere as well (LBFGS does), which would stay the old ones.
    """
    for group in optimizer.param_groups:
        group["params"] = [successors.get(param, param) for param in group["params"]]
    held = [name for name, value in vars(optimizer).items() if _holds(value, successors)]
    if held:
        raise ValueError(
            f"parallelize: {type(optimizer).__name__} keeps parameters in {', '.join(held)}, besides its groups: it would go on with "
            "ones that the model no longer has.\n"
            "Fix: pass a function that makes it, lambda params: "
            f"{type(optimizer).__name__}(params, ...)"
        )


def _holds(value: object, successors: Mapping[nn.Parameter, nn.Parameter]) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, nn.Parameter) and item in successors for item in value
    )

"""Parameters and gradients as a whole, wherever a strategy keeps them, for the record of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.dist.wrappers import canonical_name, wrapper_paths


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by canonical name."""
    added = set(wrapper_paths(model))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield canonical_name(name, added), tensor


def whole_copy(tensor: Tensor) -> Tensor:
    """A tensor's value on the CPU. Of what ranks share out: collective, and every rank comes by here in the same order."""
    if is_shared_out(tensor):
        return _copy(_gathered(tensor))
    return _copy(tensor)


def whole_gradient(param: Tensor) -> Tensor | None:
    """A parameter's gradient, reduced over ranks; None when it has none. Collective as `whole_copy` is."""
    if not is_shared_out(param):
        return None if param.grad is None else _copy(param.grad)
    if not param.requires_grad:
        return None
    from deepspeed.utils import safe_get_full_grad

    gradient = safe_get_full_grad(param)
    return None if gradient is None else _copy(gradient)


def is_shared_out(tensor: Tensor) -> bool:
    """Whether ZeRO has the parameter: in parts, or its fp32 value in parts."""
    return hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping")


def watch_steps(engine: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around each update of a DeepSpeed engine.

    The hooks of its optimizer are of no use: it is stepped group by group, before the weights are those of the next step.
    """
    step = engine.step

    @wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        updates = engine.is_gradient_accumulation_boundary()
        if updates:
            before()
        result = step(*args, **kwargs)
        if updates:
            after()
        return result

    engine.step = watched


def shares_state_out(model: nn.Module) -> bool:
    """Whether it is a DeepSpeed engine at one of ZeRO's stages 1 to 3."""
    stage = getattr(model, "zero_optimization_stage", None)
    return callable(stage) and stage() > 0


def _gathered(param: Tensor) -> Tensor:
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    if param.requires_grad:
        whole: Tensor = safe_get_full_fp32_param(param)
        return whole
    if not hasattr(param, "ds_id"):
        return param
    with zero.GatheredParameters([param]):
        return param.detach().clone()


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.cpu().clone(memory_format=torch.contiguous_format)

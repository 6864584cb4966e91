"""What flows back into a model through its outputs, weighted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class GradientGate:
    """Multiplies the gradients that enter a model at its outputs, and with them those of all its parameters.

    Where parameters cannot be hooked one by one, as they come and go (FSDP, ZeRO), and where ranks exchange gradients inside
    the backward (SyncBN, whose sums need every rank's on one scale), this is the place to weigh a rank's samples.
    Outputs may be nested tuples, lists, dicts and whatever else is registered with torch's pytree. ::

        gate = GradientGate(model)
        gate.weight = 0.0                 # this rank's batch is a stand-in
        loss_fn(model(x), y).backward()   # gradients are exact zeros, even if the loss is NaN

    The weight is that at the time of the backward.

    Args:
        model: As the loop calls it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weight = 1.0
        self.open = True  # closed, a backward is refused
        self.refusal = "this model's backward goes through its engine"
        self.found = True  # the last forward had outputs to hold on to
        # Not compiled: a trace would fix the weight of the batch it saw.
        model.register_forward_hook(torch.compiler.disable(self._after))  # type: ignore[no-untyped-call]

    def weigh(self, weight: float) -> None:
        """Set the weight of the backward to come.

        Raises:
            RuntimeError: The model's outputs are of a kind that cannot be weighted.
        """
        self.weight = weight
        if weight != 1 and not self.found:
            raise RuntimeError(
                "the model's output holds no tensor that can be found (it is of a class of its own): this rank's samples "
                "cannot be weighted by their number.\n"
                "Fix: return tensors, tuples, lists or dicts from forward, or register the class with "
                "torch.utils._pytree.register_pytree_node"
            )

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        self.found = False
        gated = tree_map(self._gated, output)
        if self.weight != 1:
            self.weigh(self.weight)
        return gated

    def _gated(self, item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.requires_grad:
            return item
        self.found = True
        # A tensor of its own: one output may be computed from another, and would be weighted twice.
        return _Passage.apply(item, self)

    def weighted(self, gradient: Tensor) -> Tensor:
        """The gradient that goes on into the model.

        Raises:
            RuntimeError: The gate is closed.
        """
        if not self.open:
            raise RuntimeError(self.refusal)
        if self.weight == 1:
            return gradient
        if self.weight == 0:
            return torch.zeros_like(gradient)  # not times 0: a NaN of a stand-in batch would stay
        return gradient * self.weight


class _Passage(torch.autograd.Function):
    """The same values outside; its gradient goes in through the gate.

    Neither a view nor a hook on one: those are lost when the user writes into the output (``logits.div_(2)``).
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gate: GradientGate) -> Tensor:
        ctx.gate = gate
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.gate.weighted(gradient), None

"""One process: the model as it is."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist.engines.engine import CountingLoader, StepInfo
from phalanx.dist.engines.optimizers import ready_optimizer
from phalanx.dist.engines.precision import Precision, autocast_forward, make_scaler
from phalanx.dist.engines.setting import DDP_OPTIONS, MakeOptimizer, Setting
from phalanx.dist.keys import reseed
from phalanx.dist.wrappers import unwrap

# Those of ddp, without effect: the same call works on one rank and on several.
OPTIONS = DDP_OPTIONS


class SingleEngine:
    """Training in one process. ``loss.backward(); optimizer.step()`` works as well, fp16 apart.

    Clipping sits in a hook of the optimizer's step, so that the plain loop has it too.

    Args:
        model: On its device already; it is returned as it is.
        optimizer: Of the model's parameters.
        device: The model's.
        precision: ``bf16`` and ``fp16`` run the forward under autocast.
        max_grad_norm: Clip the total norm of the gradients to this before each update.
        loader: Tells how the samples of a step are spread.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        device: torch.device,
        precision: Precision = "fp32",
        max_grad_norm: float | None = None,
        loader: CountingLoader | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.precision = precision
        self.max_grad_norm = max_grad_norm
        self.loader = loader
        self._scaler = make_scaler(precision, device)
        self._grad_norm: float | None = None
        self._stepping = False  # inside our own step()
        self._has_gradients = False  # backward() has run since the last step
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        autocast_forward(model, precision, device)
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    @contextlib.contextmanager
    def micro_step(self, key: int | None = None, *, last: bool | None = None) -> Iterator[None]:
        """See `Engine.micro_step`."""
        if key is not None:
            reseed(key)
        with self._reduction(self._is_last(last)):
            yield

    def backward(self, loss_sum: Tensor, global_count: int) -> None:
        """See `Engine.backward`."""
        if loss_sum.numel() != 1:
            raise ValueError(
                f"engine.backward() takes one number, the sum of the losses, not a tensor of shape {tuple(loss_sum.shape)}.\n"
                "Fix: use reduction='sum'"
            )
        if not global_count > 0:
            raise ValueError(
                f"engine.backward(): global_count={global_count}; it is the number of samples of the step over all ranks.\n"
                "Fix: pass loader.global_count"
            )
        self._has_gradients = True
        self._backward(loss_sum, global_count)

    def step(self) -> StepInfo:
        """See `Engine.step`."""
        self._stepping, self._grad_norm = True, None
        try:
            skipped = self._update()
        finally:
            self._stepping = False
        self.optimizer.zero_grad(set_to_none=True)
        self._has_gradients = False
        return StepInfo(grad_norm=self._grad_norm, skipped=skipped)

    def export(self) -> dict[str, Any]:
        """See `Engine.export`. Tensors are the live ones: copy or write them before the next step."""
        state = {"model": self.unwrap().state_dict(), "optimizer": self.optimizer.state_dict()}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """See `Engine.load`.

        Raises:
            RuntimeError: Inside a step: gradients of the old weights would be applied to the new ones.
        """
        self._refuse_within_a_step()
        self.unwrap().load_state_dict(state["model"])
        self.optimizer.load_state_dict(
            copy.deepcopy(state["optimizer"])
        )  # torch keeps the tensors it is given
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])

    def unwrap(self) -> nn.Module:
        """See `Engine.unwrap`."""
        return unwrap(self.model)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """fp16's loss scale, which a checkpoint keeps; None in other precisions."""
        return self._scaler

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and its update is still to come, so that nothing may be saved or loaded."""
        return self._has_gradients or bool(getattr(self, "_in_step", False))

    # ---- what other engines change

    def _reduction(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of a micro step, which reduces gradients if it is the last."""
        return contextlib.nullcontext()

    def _backward(self, loss_sum: Tensor, global_count: int) -> None:
        self._scaled(loss_sum / global_count).backward()  # type: ignore[no-untyped-call]

    def _check_gradients(self) -> None:
        """Raise when an update now would be wrong."""

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""

    def _clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their total norm is at most ``max_norm``; the norm they had."""
        return nn.utils.clip_grad_norm_(self._params, max_norm, error_if_nonfinite=False)

    # ---- shared

    def _refuse_within_a_step(self) -> None:
        if self._has_gradients:
            raise RuntimeError(
                "engine.load() inside a step: gradients of the old weights would update the new ones.\n"
                "Fix: load before the step's first backward, or after engine.step()"
            )

    def _is_last(self, last: bool | None) -> bool:
        if last is not None:
            return last
        return self.loader is None or self.loader.is_last_micro

    def _scaled(self, loss: Tensor) -> Tensor:
        if self._scaler is None:
            return loss
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def _update(self) -> bool:
        """Step the optimizer; whether fp16 left the step out."""
        if self._scaler is None:
            self.optimizer.step()
            return False
        self._scaler.unscale_(self.optimizer)
        scale = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        skipped = self._scaler.get_scale() < scale
        if skipped:
            self._after_update(self.optimizer, (), {})  # the optimizer did not run, nor its hooks
        return skipped

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._scaler is not None and not self._stepping:
            raise RuntimeError(
                "precision='fp16' with a plain optimizer.step(): the loss was not scaled, small gradients are lost.\n"
                "Fix: engine.backward(loss_sum, global_count) and engine.step(), or precision='bf16'"
            )
        if self.loader is not None and not self.loader.is_last_micro:
            raise RuntimeError(
                "optimizer.step() before the step's last micro batch: its samples would be spread over several updates.\n"
                "Fix: `if loader.is_last_micro: engine.step()` with engine.micro_step() and engine.backward(), "
                "or leave micro_batch_size out"
            )
        self._check_gradients()
        if self.max_grad_norm is not None:
            norm = self._clip(self.max_grad_norm)
            if self._stepping:
                self._grad_norm = float(norm)


def build(
    model: nn.Module, optimizer: Optimizer | MakeOptimizer | None, setting: Setting
) -> tuple[nn.Module, Optimizer, SingleEngine]:
    """See `Builder.build`."""
    ready = ready_optimizer(model, optimizer)
    return model, ready, SingleEngine(model, ready, **setting.common)

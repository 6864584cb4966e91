"""DistributedDataParallel, with gradients weighted by samples."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from phalanx.dist.engines.engine import CountingLoader
from phalanx.dist.engines.precision import Precision
from phalanx.dist.engines.single import SingleEngine

OPTIONS = (
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)
CHECKED_STEPS = 3  # whether every parameter takes part shows in the first steps


class DDPEngine(SingleEngine):
    """Training on several ranks, each with the whole model.

    *Weights.* DDP averages over ranks, which is off as soon as ranks have different numbers of samples. Here each bucket
    is multiplied by this rank's share of the step's samples and summed. With a ``loader`` the share is ``step_local_count /
    global_count`` and the loop's loss is the mean over this rank's samples; without one it is ``1 /
    world_size``, as in plain DDP. A rank with a stand-in batch contributes zeros, whatever its loss was.

    *Buffers* (batch norm's running statistics) are rank 0's: after each optimizer step the others take them over, rather
    than in each forward as DDP does, which breaks two forwards before one backward. ``broadcast_buffers=False`` leaves
    each rank its own.

    Args:
        model: A DistributedDataParallel, or a wrapper such as `torch.compile` around one.
        ddp: That DistributedDataParallel.
        sync_buffers: Whether ranks take over rank 0's buffers after each step.
        options: Those of `SingleEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        *,
        device: torch.device,
        precision: Precision = "fp32",
        max_grad_norm: float | None = None,
        loader: CountingLoader | None = None,
        sync_buffers: bool = True,
    ) -> None:
        super().__init__(
            model, optimizer, device=device, precision=precision, max_grad_norm=max_grad_norm, loader=loader
        )
        self.reductions = 0  # buckets all-reduced so far
        self._ddp = ddp
        self._group: dist.ProcessGroup = ddp.process_group
        self._world_size = dist.get_world_size(self._group)
        self._ours = False  # inside our own backward(): the loss was divided already
        self._kept: dict[Tensor, Tensor] | None = (
            None  # a stand-in's real gradients, from earlier micro batches
        )
        self._reduced = False  # since the last update
        self._checked = 0
        self._buffers = [buffer for buffer in ddp.module.buffers() if buffer.numel()] if sync_buffers else []
        # A lambda: DDP compares a hook's annotations with types, and postponed ones are text.
        ddp.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))

    def _reduction(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def _backward(self, loss_sum: Tensor, global_count: int) -> None:
        stands_in = self.loader is not None and self.loader.local_count == 0
        syncs = bool(self._ddp.require_backward_grad_sync)
        if stands_in and not syncs:
            return  # nothing to add, and nobody waits
        if stands_in:
            # What earlier micro batches left must survive, and a NaN of the stand-in must not reach it.
            self._kept = {param: param.grad.clone() for param in self._params if param.grad is not None}
        self._ours = True
        try:
            # Mean over ranks below: shares that add up to 1 keep gradients that are reduced already as they are.
            loss = loss_sum * (self._world_size / global_count)
            self._scaled(loss).backward()  # type: ignore[no-untyped-call]
        finally:
            self._ours, self._kept = False, None

    def _share(self) -> float:
        """This rank's part of the sum; all ranks' add up to 1."""
        loader = self.loader
        if self._ours or loader is None or loader.global_count == 0:
            return 1.0 / self._world_size
        return loader.step_local_count / loader.global_count

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: this bucket's gradients times this rank's share, summed over ranks."""
        self.reductions += 1
        self._reduced = True
        buffer = bucket.buffer()
        share = self._share()
        if self._kept is not None:
            buffer.zero_()
            for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if param in self._kept:
                    view.copy_(self._kept[param])
        if share == 0:
            buffer.zero_()  # not times 0: a NaN of a stand-in batch would stay
        elif share != 1:
            buffer.mul_(share)
        if self._world_size == 1:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(_first)
        return future

    def _check_gradients(self) -> None:
        """Raise when gradients were never reduced, or (in the first steps) when parameters got none."""
        if self._checked < CHECKED_STEPS:
            self._check_unused()
        if not self._reduced and any(param.grad is not None for param in self._params):
            raise RuntimeError(
                "optimizer.step() with gradients that were not reduced over the ranks: their weights would drift apart.\n"
                "Either no micro step was the last one, all were in no_sync(), or the forward was called on the module "
                "inside (model.module(x)).\n"
                "Fix: call the model that parallelize returned, and let the step's last micro_step have last=True"
            )
        self._reduced = False

    def _check_unused(self) -> None:
        if self._ddp.find_unused_parameters or self._ddp.static_graph:
            return
        trainable = [
            (name, param) for name, param in self._ddp.module.named_parameters() if param.requires_grad
        ]
        unused = [name for name, param in trainable if param.grad is None]
        if len(unused) == len(trainable):
            return  # no backward yet
        self._checked += 1
        if unused:
            names = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
            raise RuntimeError(
                f"{len(unused)} of {len(trainable)} parameters got no gradient: {names}.\n"
                "DDP waits for every parameter: the buckets with these were never reduced, and the next forward fails.\n"
                "Fix: leave them out of the model or set requires_grad=False, or "
                "parallelize(..., find_unused_parameters=True)"
            )

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._buffers or self._world_size == 1:
            return
        # One broadcast of bytes, whatever the dtypes.
        views = [buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in self._buffers]
        flat = torch.cat(views)
        dist.broadcast(flat, src=dist.get_global_rank(self._group, 0), group=self._group)
        if dist.get_rank(self._group) == 0:
            return
        start = 0
        for buffer in self._buffers:
            end = start + buffer.numel() * buffer.element_size()
            # A copy, since a view of another dtype needs an aligned start.
            buffer.copy_(flat[start:end].clone().view(buffer.dtype).view(buffer.shape))
            start = end


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that ``model`` is, or wraps at its top; None when there is none."""
    while not isinstance(model, DistributedDataParallel):
        inner = model._modules.get("_orig_mod")
        if inner is None:
            return None
        model = inner
    return model

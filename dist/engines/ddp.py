"""DistributedDataParallel, with gradients weighted by samples."""

from __future__ import annotations

import contextlib
import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from phalanx.dist.engines import single
from phalanx.dist.engines.buffers import SharedBuffers, take_from_rank_zero
from phalanx.dist.engines.compression import check_compression, compress
from phalanx.dist.engines.gradient_gate import GradientGate
from phalanx.dist.engines.optimizers import ready_optimizer
from phalanx.dist.engines.ranks import RanksEngine
from phalanx.dist.engines.setting import DDP_OPTIONS, Common, MakeOptimizer, Setting
from phalanx.dist.engines.single import SingleEngine
from phalanx.dist.sync_batch_norm import has_sync_batch_norm

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

OPTIONS = DDP_OPTIONS
CHECKED_STEPS = 3  # whether every parameter takes part shows in the first steps


class DDPEngine(RanksEngine):
    """Training on several ranks, each with the whole model.

    *Weights.* DDP averages over ranks, which is off as soon as ranks have different numbers of samples. With a ``loader`` the
    loop's loss is the mean over this rank's samples, and gradients are weighted by ``step_local_count / global_count``:
    in steps where shares differ, hooks on the parameters multiply each gradient before DDP averages. A rank with a
    stand-in batch contributes zeros, whatever its loss was. (With SyncBN they are weighted at the model's outputs, see
    `GradientGate`.) Where all ranks have as many samples there is nothing to do, and DDP's
    own all-reduce is left as it is.

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
        sync_buffers: bool = True,
        **common: Unpack[Common],
    ) -> None:
        group: dist.ProcessGroup = ddp.process_group
        buffers = SharedBuffers(ddp.module, group) if sync_buffers else None
        super().__init__(model, optimizer, world_size=dist.get_world_size(group), buffers=buffers, **common)
        self._ddp = ddp
        self._weight = 1.0  # what the hooks below multiply gradients with
        self._hooks: list[RemovableHandle] = []  # attached while the weight is not 1
        self._reduces = False  # a forward since the last update was one whose backward reduces
        self._checked = 0
        # SyncBN sums gradients over ranks inside the backward: weights must be on them before.
        self._gate = GradientGate(model) if has_sync_batch_norm(ddp.module) else None
        self._watch_forwards(ddp)

    def _reduction(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def _backward(self, loss_sum: Tensor, global_count: int) -> None:
        stands_in = self._stands_in()
        if stands_in and not self._ddp.require_backward_grad_sync:
            return  # nothing to add, and nobody waits
        self._weigh(0.0 if stands_in else 1.0)
        # DDP averages. Gradients that are reduced already (of another loss in this step) stay as they are.
        loss = loss_sum * (self._world_size / global_count)
        self._scaled(loss).backward()  # type: ignore[no-untyped-call]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._reduces = self._reduces or bool(self._ddp.require_backward_grad_sync)
        weight = self._plain_weight()
        if weight is not None:
            self._weigh(weight)

    def _weigh(self, weight: float) -> None:
        """Multiply this rank's gradients by ``weight`` from now on, relative to DDP's average over ranks."""
        if self._gate is not None:
            self._gate.weigh(weight)
            return
        self._weight = weight
        if weight == 1:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        elif not self._hooks:
            trainable = [param for param in self._ddp.module.parameters() if param.requires_grad]
            self._hooks = [param.register_hook(self._weighted) for param in trainable]

    def _weighted(self, gradient: Tensor) -> Tensor:
        if self._weight == 0:
            return torch.zeros_like(gradient)  # not times 0: a NaN of a stand-in batch would stay
        return gradient * self._weight

    def _check_gradients(self) -> None:
        """Raise when gradients were never reduced, or (in the first steps) when parameters got none."""
        if self._checked < CHECKED_STEPS:
            self._check_unused()
        if not self._reduces and any(param.grad is not None for param in self._params):
            raise RuntimeError(
                "optimizer.step() with gradients that were not reduced over the ranks: their weights would drift apart.\n"
                "Either no micro step was the last one, all were in no_sync(), or the forward was called on the module "
                "inside (model.module(x)).\n"
                "Fix: call the model that parallelize returned, and let the step's last micro_step have last=True"
            )
        self._reduces = False

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


def build(
    model: nn.Module, optimizer: Optimizer | MakeOptimizer | None, setting: Setting
) -> tuple[nn.Module, Optimizer, SingleEngine]:
    """See `Builder.build`; in one process without a group, and for a frozen model, the plain model."""
    if not dist.is_initialized():
        return single.build(model, optimizer, setting)
    ready = ready_optimizer(model, optimizer)
    ddp = find_ddp(model)
    if ddp is None and not any(param.requires_grad for param in model.parameters()):
        logger.info("parallelize: no parameter of the model is trainable, so it is not wrapped")
        take_from_rank_zero([*model.parameters(), *model.buffers()])
        return model, ready, SingleEngine(model, ready, **setting.common)
    options = dict(setting.options)
    compression = options.pop("compression", None)
    sync_buffers = options.pop("broadcast_buffers", True)
    if compression is not None:
        check_compression(compression, setting.precision)
    if ddp is None:
        refuse_sync_batch_norm_on_cpu(model, setting.device)
        model = ddp = _wrap(model, setting.device, options)
    else:
        sync_buffers = False  # its maker has set what DDP does in each forward
    if compression is not None:
        compress(ddp, compression)
    engine = DDPEngine(model, ddp, ready, sync_buffers=sync_buffers, **setting.common)
    return model, ready, engine


def _wrap(model: nn.Module, device: torch.device, options: dict[str, Any]) -> DistributedDataParallel:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    no_buffers = (
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    )  # torch < 2.14
    options = {"gradient_as_bucket_view": True, no_buffers: False, **options}
    if device.type == "cuda":
        options["device_ids"] = [device]
    # Rank 0's weights and buffers go to every rank here. Later the engine sends the buffers, see DDPEngine.
    wrapped = DistributedDataParallel(model, **options)
    if no_buffers == "broadcast_buffers":
        take_from_rank_zero(model.buffers())
    return wrapped


def refuse_sync_batch_norm_on_cpu(model: nn.Module, device: torch.device) -> None:
    """Raise when torch's SyncBatchNorm, which has kernels for GPUs only, would meet the CPU."""
    if device.type != "cpu":
        return
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names:
        raise ValueError(
            f"SyncBatchNorm ({', '.join(names[:4])}) works on GPUs only, and this rank is on the CPU.\n"
            "Fix: leave convert_sync_batchnorm out and use parallelize(..., sync_batch_norm=True), which works anywhere"
        )


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that ``model`` is, or wraps at its top; None when there is none."""
    while not isinstance(model, DistributedDataParallel):
        inner = model._modules.get("_orig_mod")
        if inner is None:
            return None
        model = inner
    return model

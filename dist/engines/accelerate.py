"""Hugging Face Accelerate: its Accelerator prepares model and optimizer, the rest stays ours."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist.engines.buffers import SharedBuffers, take_from_rank_zero
from phalanx.dist.engines.ddp import refuse_sync_batch_norm_on_cpu
from phalanx.dist.engines.gradient_gate import GradientGate
from phalanx.dist.engines.optimizers import ready_optimizer
from phalanx.dist.engines.precision import Precision
from phalanx.dist.engines.ranks import RanksEngine
from phalanx.dist.engines.setting import Common, MakeOptimizer, Setting
from phalanx.dist.engines.single import SingleEngine
from phalanx.dist.wrappers import unwrap

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

OPTIONS = ("accelerator",)
_WRAPPERS = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp", "MEGATRON_LM": "ddp"}


class AccelerateEngine(RanksEngine):
    """Training by an Accelerator, under ``accelerate launch`` as under any other launcher.

    ::

        model, optimizer, engine = parallelize(model, Adam, "accelerate", loader=loader)
        engine.accelerator.print("rank 0 alone prints this")

    Model and optimizer are prepared. The loader and the user's scheduler are not: Accelerate would shard batches once more, and
    step the scheduler once for each process. Accumulation is the engine's. A plain loop is right in fp32 and bf16; samples are
    weighted at the model's outputs, see `GradientGate`.

    The optimizer that comes back is the user's own object; the prepared one is ``engine.prepared_optimizer``.

    Args:
        model: The prepared model.
        optimizer: The user's.
        accelerator: What prepared it.
        prepared: The prepared optimizer.
        sync_buffers: Whether ranks take over rank 0's buffers after each step.
        options: Those of `SingleEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        accelerator: Any,
        prepared: Any,
        *,
        sync_buffers: bool = True,
        **common: Unpack[Common],
    ) -> None:
        precision = common.pop("precision", "fp32")  # autocast is in the prepared model's forward already
        world_size: int = accelerator.num_processes
        buffers = SharedBuffers(unwrap(model)) if sync_buffers and world_size > 1 else None
        super().__init__(model, optimizer, world_size=world_size, buffers=buffers, **common)
        self.precision = precision
        self.accelerator, self.prepared_optimizer = accelerator, prepared
        self._scaler = accelerator.scaler
        self._gate = GradientGate(model)
        self._watch_forwards(model)

    def _reduction(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return self._unreduced() if not last else contextlib.nullcontext()

    @contextlib.contextmanager
    def _unreduced(self) -> Iterator[None]:
        with self.accelerator.no_sync(self.model):
            yield

    def _backward(self, loss_sum: Tensor, global_count: int) -> None:
        self._gate.weigh(0.0 if self._stands_in() else 1.0)
        self.accelerator.backward(loss_sum * (self._world_size / global_count))  # DDP averages

    def _update(self) -> bool:
        if self._scaler is not None:
            self.accelerator.unscale_gradients(self.prepared_optimizer)
        self.prepared_optimizer.step()
        skipped = bool(self.prepared_optimizer.step_was_skipped)
        if skipped:
            self._after_update(self.optimizer, (), {})  # the optimizer did not run, nor its hooks
        return skipped

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        weight = self._plain_weight()
        if torch.is_grad_enabled() and weight is not None:
            self._gate.weight = weight


def build(
    model: nn.Module, optimizer: Optimizer | MakeOptimizer | None, setting: Setting
) -> tuple[nn.Module, Optimizer, SingleEngine]:
    """See `Builder.build`."""
    refuse_sync_batch_norm_on_cpu(model, setting.device)
    ready = ready_optimizer(model, optimizer)
    given = setting.options.get("accelerator")
    precision = setting.precision
    if given is None:
        precision = _precision(setting)
        accelerator = _make(setting, precision)
    else:
        accelerator = given
        _check_given(accelerator, setting)
        said = str(accelerator.mixed_precision)
        precision = cast("Precision", "fp32" if said == "no" else said)
    _check_group(accelerator, setting)
    if (
        setting.world.world_size > 1
    ):  # without broadcast_buffers DDP sends none, and it leaves a frozen model alone
        take_from_rank_zero([*model.parameters(), *model.buffers()])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        prepared_model, prepared = accelerator.prepare(model, ready)
    common = replace(setting, precision=precision).common
    engine = AccelerateEngine(
        prepared_model, ready, accelerator, prepared, sync_buffers=given is None, **common
    )
    return prepared_model, ready, engine


def _make(setting: Setting, precision: Precision) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs
    except ImportError as error:
        if error.name == "accelerate":
            raise ImportError(
                "strategy='accelerate' needs Accelerate.\nFix: pip install 'phalanx[accelerate]'"
            ) from None
        raise ImportError(f"Accelerate is installed but does not start: {error}") from error
    if precision == "fp16" and setting.device.type == "cpu":
        raise ValueError(
            "precision='fp16': Accelerate has it on GPUs only, and this rank is on the CPU.\nFix: precision='bf16'"
        )
    # Buffers are rank 0's after each step, see SharedBuffers, rather than in each forward.
    handler = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    mixed = "no" if precision == "fp32" else precision
    try:
        accelerator = Accelerator(
            cpu=setting.device.type == "cpu",
            mixed_precision=mixed,
            gradient_accumulation_steps=1,
            kwargs_handlers=[handler],
        )
    except ValueError as error:
        if "already been initialized" not in str(error):
            raise
        raise ValueError(
            f"precision={precision!r}: an Accelerator made before in this process has another precision or device, and Accelerate "
            "keeps one for all of a process.\n"
            f"Fix: one precision for all, or make the first with Accelerator(mixed_precision={mixed!r})"
        ) from error
    if accelerator.gradient_accumulation_steps != 1:  # the launcher's variable goes before the argument
        logger.info(
            "parallelize: gradient_accumulation_steps=%d of accelerate launch: the loader's micro_batch_size decides on that",
            accelerator.gradient_accumulation_steps,
        )
        accelerator.gradient_accumulation_steps = 1
    return accelerator


def _precision(setting: Setting) -> Precision:
    """The argument, or what ``accelerate launch --mixed_precision`` says where it is left at fp32."""
    said = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if setting.precision == "fp32" and said in ("bf16", "fp16"):
        return cast("Precision", said)
    return setting.precision


def _check_given(accelerator: Any, setting: Setting) -> None:
    """Refuse a user's Accelerator that would do what is ours."""
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise ValueError(
            f"the accelerator has gradient_accumulation_steps={steps}, and would divide the losses once more.\n"
            "Fix: leave it at 1, and give the loader a micro_batch_size"
        )
    said = str(accelerator.mixed_precision)
    if setting.precision not in ("fp32", said):
        raise ValueError(
            f"precision={setting.precision!r}, but the accelerator has mixed_precision={said!r}.\nFix: say it in one of the two"
        )


def _check_group(accelerator: Any, setting: Setting) -> None:
    """Refuse an Accelerator that stands elsewhere than this rank does."""
    world = setting.world
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in _WRAPPERS:
        raise ValueError(
            f"accelerate launch was told to use {kind}, which strategy='accelerate' does not go through.\n"
            f"Fix: strategy={_WRAPPERS[kind]!r}, with accelerate launch --multi_gpu"
        )
    if (accelerator.num_processes, accelerator.process_index) != (world.world_size, world.rank):
        raise ValueError(
            f"Accelerate takes this for process {accelerator.process_index} of {accelerator.num_processes}, but it is rank "
            f"{world.rank} of {world.world_size}: gradients would not be shared.\n"
            "It looks once, at the first Accelerator or PartialState of the process.\n"
            "Fix: call init_world() before anything of Accelerate's"
        )
    if accelerator.device.type != setting.device.type or (
        setting.device.index is not None and accelerator.device.index not in (None, setting.device.index)
    ):
        raise ValueError(
            f"Accelerate has taken {accelerator.device}, but this rank's device is {setting.device}.\n"
            f"Fix: init_world(device={accelerator.device.type!r}), or Accelerator(cpu={setting.device.type == 'cpu'})"
        )

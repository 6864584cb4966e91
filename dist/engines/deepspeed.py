"""DeepSpeed's ZeRO: optimizer state (1), gradients (2) and weights (3) shared out over the ranks."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist.engines.buffers import SharedBuffers, make_contiguous, take_from_rank_zero
from phalanx.dist.engines.ddp import refuse_sync_batch_norm_on_cpu
from phalanx.dist.engines.deepspeed_config import clip_norm, make_config, precision_of, read_config
from phalanx.dist.engines.deepspeed_parts import ZeroParts
from phalanx.dist.engines.deepspeed_state import ZeroState
from phalanx.dist.engines.engine import CountingLoader
from phalanx.dist.engines.gradient_gate import GradientGate
from phalanx.dist.engines.optimizers import ready_optimizer
from phalanx.dist.engines.precision import DTYPES, Precision, cast_inputs
from phalanx.dist.engines.setting import MakeOptimizer, Setting
from phalanx.dist.engines.single import SingleEngine
from phalanx.dist.wrappers import unwrap

logger = logging.getLogger(__name__)

OPTIONS = ("config", "zero_stage")
_PLAIN_LOOP = (
    "strategy='deepspeed' with a plain loss.backward() or optimizer.step(): DeepSpeed would neither reduce the gradients nor "
    "update its own copy of the weights.\n"
    "Fix: with engine.micro_step(): engine.backward(loss_sum, loader.global_count); then engine.step()"
)


class DeepSpeedEngine(SingleEngine):
    """Training by DeepSpeed, from one argument or the user's own JSON.

    ::

        model, optimizer, engine = parallelize(model, Adam, "deepspeed", zero_stage=2, loader=loader)
        for x, y in loader:
            with engine.micro_step():
                engine.backward(cross_entropy(model(x), y, reduction="sum"), loader.global_count)
            if loader.is_last_micro:
                engine.step()

    *Config.* ``config`` is a JSON file or a dict as DeepSpeed reads it. Batch sizes and accumulation are ours: what it says of them is
    replaced by 1 (and said in the log). Its precision and clipping hold, unless ``precision`` and ``max_grad_norm`` say otherwise,
    which is an error; clipping is off unless one of the two asks for it. An ``optimizer`` section needs ``optimizer=None``;
    a ``scheduler`` section is refused, since checkpoints know the user's scheduler alone.

    *Loop.* ``loss.backward(); optimizer.step()`` is refused. The user's scheduler goes on working: its optimizer stays the same object.

    *Precision.* ``bf16`` and ``fp16`` are DeepSpeed's own: weights in 16 bits with fp32 masters; inputs are cast, outputs
    come back as fp32.

    *State.* `export` and `load` speak of whole tensors by the user's names, in fp32, as every other engine does.

    On the CPU it runs over gloo.

    Args:
        model: What ``deepspeed.initialize`` returned.
        optimizer: The one that it steps.
        state: Reads and writes what is shared out.
        options: Those of `SingleEngine`.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        state: ZeroState,
        *,
        device: torch.device,
        precision: Precision = "fp32",
        max_grad_norm: float | None = None,
        loader: CountingLoader | None = None,
    ) -> None:
        # Clipping, casting and scaling are DeepSpeed's.
        super().__init__(model, optimizer, device=device, loader=loader)
        self.precision, self._clips = precision, max_grad_norm is not None
        self._deepspeed, self._state = model, state
        self._world_size = dist.get_world_size()
        if precision != "fp32":
            cast_inputs(model, DTYPES[precision])
        self._gate = GradientGate(model)
        self._gate.open, self._gate.refusal = False, _PLAIN_LOOP
        self._buffers = SharedBuffers(model.module)

    def export(self) -> dict[str, Any]:
        """See `Engine.export`. Collective; every rank gets the whole tensors."""
        state: dict[str, Any] = {"model": self._state.model(), "optimizer": self._state.optimizer()}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    @property
    def scaler(self) -> Any:
        """fp16's loss scale, which a checkpoint keeps; None in other precisions."""
        return _LossScale(self._deepspeed.optimizer.loss_scaler) if self.precision == "fp16" else None

    @property
    def group_names(self) -> list[list[str]]:
        """Parameter names of each of the user's groups, in the order that `export` numbers them."""
        return self._state.group_names

    @property
    def held(self) -> ZeroParts | None:
        """What a checkpoint reads and writes, see `HeldState`; None when model and optimizer have it all."""
        return None if self._state.is_plain() else ZeroParts(self._state)

    def load(self, state: dict[str, Any]) -> None:
        """See `Engine.load`."""
        self._refuse_within_a_step()
        self._state.load_model(state["model"])
        self._state.load_optimizer(state["optimizer"])
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    @contextlib.contextmanager
    def _reduction(self, last: bool) -> Iterator[None]:
        self._deepspeed.set_gradient_accumulation_boundary(last)
        yield
        if not last:
            self._deepspeed.step()  # counts the micro step, no more

    def _backward(self, loss_sum: Tensor, global_count: int) -> None:
        # A stand-in goes backward as well: the others reduce there, together with this rank.
        stands_in = self.loader is not None and self.loader.local_count == 0
        self._gate.weigh(0.0 if stands_in else 1.0)
        self._gate.open = True
        try:
            self._deepspeed.backward(loss_sum * (self._world_size / global_count))  # it averages over ranks
        finally:
            self._gate.open = False

    def _update(self) -> bool:
        norm = None
        if self._clips and self._deepspeed.zero_optimization_stage() == 0:
            norm = nn.utils.get_total_norm([p.grad for p in self._params if p.grad is not None])
        self._deepspeed.step()
        if self._clips:
            norm = self._deepspeed.get_global_grad_norm() if norm is None else norm
            self._grad_norm = None if norm is None else float(norm)
        self._buffers.take_over()
        return not self._deepspeed.was_step_applied()

    def _check_gradients(self) -> None:
        if not self._stepping:
            raise RuntimeError(_PLAIN_LOOP)


class _LossScale:
    """DeepSpeed's loss scaler, with a state dict as torch's has it."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        state = {"scale": float(self._scaler.cur_scale)}
        if self._scaler.dynamic:
            stable = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
            state["_growth_tracker"] = stable % self._scaler.scale_window  # as torch's counts them
            state["stable_steps"] = stable
            state["hysteresis"] = self._scaler.cur_hysteresis
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.cur_scale = state["scale"]
        if self._scaler.dynamic:
            # It grows after a number of steps without an overflow, and counts them by the last one that had one.
            stable = state.get("stable_steps", state.get("_growth_tracker", 0))
            self._scaler.last_overflow_iter = self._scaler.cur_iter - 1 - stable
            self._scaler.cur_hysteresis = state.get("hysteresis", self._scaler.delayed_shift)


def build(
    model: nn.Module, optimizer: Optimizer | MakeOptimizer | None, setting: Setting
) -> tuple[nn.Module, Optimizer, SingleEngine]:
    """See `Builder.build`; in one process without a group, the plain model with the config's precision and clipping."""
    asked = read_config(setting.options.get("config"), setting.options.get("zero_stage"))
    precision = precision_of(asked, setting.precision)
    norm = clip_norm(asked, setting.max_grad_norm)
    common = replace(setting, precision=precision, max_grad_norm=norm).common
    if not dist.is_initialized():
        ready = ready_optimizer(model, optimizer)
        return model, ready, SingleEngine(model, ready, **common)
    refuse_sync_batch_norm_on_cpu(model, setting.device)
    config = make_config(asked, world_size=setting.world.world_size, precision=precision, max_grad_norm=norm)
    ready_or_none = None
    if "optimizer" not in asked:
        ready_or_none = ready_optimizer(model, optimizer)
    elif optimizer is not None:
        raise ValueError(
            "strategy='deepspeed' with an optimizer, and another one in the config: only one can train.\n"
            "Fix: parallelize(model, None, 'deepspeed', config=...), or take \"optimizer\" out of the config"
        )
    if unwrap(model) is not model:
        raise ValueError(
            f"strategy='deepspeed' with a {type(model).__name__}: DeepSpeed wraps the plain module, and compiles it itself.\n"
            "Fix: pass the module inside, and call .compile() of the model that comes back"
        )
    scalars = [name for name, param in model.named_parameters() if param.dim() == 0]
    if scalars:
        raise ValueError(
            f"strategy='deepspeed' with parameters without dims ({', '.join(scalars[:4])}): DeepSpeed cannot send them between ranks.\n"
            "Fix: give them the shape (1,), or strategy='ddp'"
        )
    package = import_deepspeed(setting.device)
    if precision == "fp16" and not package.accelerator.get_accelerator().is_fp16_supported():
        raise ValueError(
            f"precision='fp16': DeepSpeed says that this {setting.device.type} cannot compute in fp16.\nFix: precision='bf16'"
        )
    take_from_rank_zero([*model.parameters(), *model.buffers()])
    make_contiguous(model.parameters())
    state = ZeroState(model, ready_or_none)
    with _quiet(), contextlib.redirect_stdout(io.StringIO()):  # it prints how much memory is used
        wrapped, _, _, _ = package.initialize(
            model=model, optimizer=ready_or_none, config=config, dist_init_required=False
        )
    ready = ready_or_none if ready_or_none is not None else wrapped.basic_optimizer
    state.bind(wrapped, ready)
    return wrapped, ready, DeepSpeedEngine(wrapped, ready, state, **common)


def import_deepspeed(device: torch.device) -> Any:
    """The package, set for ``device``.

    Raises:
        ImportError: It is not installed, or does not work.
        RuntimeError: It was imported before, for another kind of device.
    """
    asked = os.environ.get("DS_ACCELERATOR")
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, in the import
    try:
        with _quiet():
            import deepspeed
            import deepspeed.ops
    except ImportError as error:
        if error.name == "deepspeed":
            raise ImportError(
                "strategy='deepspeed' needs DeepSpeed.\nFix: pip install 'phalanx[deepspeed]'"
            ) from None
        raise ImportError(f"DeepSpeed is installed but does not start: {error}") from error
    finally:
        if asked is None:
            os.environ.pop("DS_ACCELERATOR", None)
        else:
            os.environ["DS_ACCELERATOR"] = asked
    kind = deepspeed.accelerator.get_accelerator().device_name()
    if kind != device.type:
        raise RuntimeError(
            f"DeepSpeed was imported for {kind}, but this rank is on {device}.\n"
            f"Fix: export DS_ACCELERATOR={device.type}, or import deepspeed after parallelize"
        )
    # It would compile a shared memory all-reduce for the CPU, for minutes and with a compiler that need not be
    # there; gloo does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Its use of collectives that torch has renamed, once for each call.
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.\w+` is deprecated",
        category=FutureWarning,
        module=r"torch\.distributed\..*",
    )
    return deepspeed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed's and its imports' notes off the user's terminal; errors stay."""
    loggers = [logging.getLogger(name) for name in ("DeepSpeed", "torch.utils.cpp_extension", "numexpr")]
    for each in loggers:
        each.addFilter(_errors_alone)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each in loggers:
            each.removeFilter(_errors_alone)


def _errors_alone(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR

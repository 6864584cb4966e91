"""One call that turns a model and its optimizer into ones for several ranks."""

from __future__ import annotations

import difflib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from phalanx.dist.arguments import require_flag, require_module, require_real, short
from phalanx.dist.audits import audit_same_model
from phalanx.dist.collective_audit import start_first_audit
from phalanx.dist.engines.ddp import find_ddp
from phalanx.dist.engines.engine import CountingLoader, Engine, engine_of, remember
from phalanx.dist.engines.precision import Precision
from phalanx.dist.engines.setting import Builder, Setting
from phalanx.dist.membership import World, world_or_single
from phalanx.dist.rank_device import named_device
from phalanx.dist.sync_batch_norm import convert_sync_batchnorm
from phalanx.dist.wrappers import unwrap

logger = logging.getLogger(__name__)

# Each has a module of its name in phalanx.dist.engines, with OPTIONS and build(): see `Builder`.
STRATEGIES = ("accelerate", "auto", "ddp", "deepspeed", "dp", "fsdp", "single")
NEED_A_GROUP = ("ddp", "deepspeed", "fsdp")  # one process without a group runs these as `single`
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def parallelize(
    model: nn.Module,
    optimizer: OptimizerT | Callable[[Iterable[nn.Parameter]], OptimizerT] | None,
    strategy: str = "auto",
    *,
    precision: Precision = "fp32",
    max_grad_norm: float | None = None,
    virtual_ranks: int | None = None,
    loader: CountingLoader | None = None,
    device: torch.device | str | None = None,
    sync_batch_norm: bool = False,
    **engine_options: Any,
) -> tuple[nn.Module, OptimizerT, Engine]:
    """The model on this rank's device, its gradients summed over all ranks, its weights rank 0's.

    A plain loop stays right, also where ranks have different numbers of samples; the loss is the mean over this rank's batch::

        model, optimizer, engine = parallelize(model, Adam(model.parameters()), loader=train_loader)
        for x, y in train_loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()

    fp16 and accumulation (a loader with both batch sizes) go through the engine, with the sum of the losses::

        for x, y in train_loader:
            with engine.micro_step():
                engine.backward(cross_entropy(model(x), y, reduction="sum"), train_loader.global_count)
            if train_loader.is_last_micro:
                engine.step()

    A model without trainable parameters comes back unwrapped, on the device, equal on all ranks. A compiled model may be given; compiling
    what is returned works too. A model that `parallelize` or the user has wrapped already is returned as it is, with a warning.

    Collective: every rank must call it, with the same model.

    Args:
        model: The user's module, with the same parameters on every rank; values are taken from rank 0.
        optimizer: One without state whose parameters are all the model's, or a function of parameters (``Adam``,
            ``lambda p: SGD(p, lr=0.1)``), called after the model is in place. None for a model without trainable parameters.
        strategy: ``auto`` is ``ddp`` on several ranks and else ``single``. ``fsdp`` shards weights, gradients and optimizer by
            ``fully_shard``, ``deepspeed`` by ZeRO, ``accelerate`` lets an Accelerator prepare model and optimizer, ``dp`` uses
            several GPUs from one process. See `FSDPEngine`, `DeepSpeedEngine`, `AccelerateEngine`, `DPEngine`.
        precision: ``bf16`` and ``fp16`` run the forward under autocast and return fp32; weights stay fp32.
        max_grad_norm: Clip the total gradient norm to this, more than 0, before each update, also in a plain loop.
        virtual_ranks: With ``single`` and ``ddp``: share each step among so many virtual ranks, so that losses and weights are
            equal to the bit on every world size that can play them (each rank a power of two of them, or one rank all). Write
            the loop with the engine; see `VirtualEngine`. A ``loader`` made with ``virtual_ranks`` says it as well.
        loader: The training loader; it tells each rank's share of a step. Without it every rank counts alike.
        device: By default the world's.
        sync_batch_norm: Batch norm over the batches of all ranks, see `convert_sync_batchnorm`.
        engine_options: For ``ddp``: ``bucket_cap_mb``, ``static_graph``, ``find_unused_parameters``,
            ``gradient_as_bucket_view`` (default True), ``broadcast_buffers`` (rank 0's buffers after each step; default True)
            and ``compression`` (``fp16``, ``bf16`` or ``powersgd``).
            For ``fsdp``: ``blocks``, ``reshard_after_forward``, ``find_unused_parameters``, ``broadcast_buffers``.
            For ``deepspeed``: ``zero_stage`` (0 to 3) or ``config`` (a JSON file or a dict). For ``accelerate``: ``accelerator``.
            For ``dp``: ``device_ids``. With ``virtual_ranks``: ``num_threads`` (of torch, from now on; default 1).

    Returns:
        Model, optimizer and engine.

    Raises:
        ValueError: An option is unknown, a parameter of the optimizer is not the model's, the optimizer has
            state, or ranks have built different models (named, on every rank).
    """
    require_module("model", model)
    sync_batch_norm = require_flag("sync_batch_norm", sync_batch_norm)
    if max_grad_norm is not None:
        max_grad_norm = require_real(
            "max_grad_norm", max_grad_norm, above=0, fix="more than 0; None switches clipping off"
        )
    world = world_or_single()
    strategy = _choose_strategy(strategy, model, world)
    if virtual_ranks is None:
        virtual_ranks = getattr(loader, "virtual_ranks", None)
    builder = _builder(strategy if virtual_ranks is None else "virtual")
    _check_options(strategy, precision, virtual_ranks, loader)
    _check_engine_options(strategy, builder, engine_options, virtual_ranks)
    if strategy in NEED_A_GROUP and not dist.is_initialized():
        logger.info("parallelize: strategy=%r in a single process runs as 'single'", strategy)
    known = engine_of(model)
    if known is not None:
        warnings.warn("parallelize: this model is parallel already, and is returned as it is", stacklevel=2)
        return model, known.optimizer, known  # type: ignore[return-value]
    place = named_device(device, world.device)
    if find_ddp(model) is not None:
        warnings.warn(
            "parallelize: this model is wrapped in DistributedDataParallel already; that wrapper is used",
            stacklevel=2,
        )
        if strategy != "ddp":
            raise ValueError(
                f"strategy={strategy!r}, but the model is wrapped in DistributedDataParallel.\nFix: pass the model inside"
            )
    elif not _is_sharded(model):
        model = model.to(place)
    start_first_audit()
    audit_same_model(model, world)
    if sync_batch_norm:
        _sync_batch_norm(model, strategy, virtual_ranks, loader, world)
    if loader is not None:
        loader.training = True
    setting = Setting(
        world=world,
        device=place,
        precision=precision,
        max_grad_norm=max_grad_norm,
        loader=loader,
        virtual_ranks=virtual_ranks,
        options=engine_options,
    )
    model, ready, engine = builder.build(model, optimizer, setting)
    remember(model, engine)
    return model, cast("OptimizerT", ready), engine


def _builder(home: str) -> Builder:
    return cast("Builder", importlib.import_module(f"phalanx.dist.engines.{home}"))


def _choose_strategy(strategy: str, model: nn.Module, world: World) -> str:
    several = world.world_size > 1
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        near = _nearest(strategy, STRATEGIES) if isinstance(strategy, str) else ""
        raise ValueError(
            f"strategy={short(strategy)} is unknown{near}.\nFix: one of {', '.join(map(repr, STRATEGIES))}"
        )
    if strategy == "single" and several:
        raise ValueError(
            f"strategy='single' on {world.world_size} ranks: each would train a model of its own.\n"
            "Fix: strategy='auto', or start one process"
        )
    sharded = _is_sharded(model)
    if sharded and strategy not in ("auto", "fsdp"):
        raise ValueError(
            f"strategy={strategy!r}, but the model is sharded by fully_shard.\nFix: strategy='fsdp', or pass a model that is not"
        )
    if strategy == "auto":
        return "fsdp" if sharded else "ddp" if several else "single"
    return strategy


def _is_sharded(model: nn.Module) -> bool:
    """Whether somebody has called ``fully_shard`` on it; importing that takes a second, and nobody has without it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(unwrap(model), fsdp.FSDPModule)


def _check_options(
    strategy: str,
    precision: str,
    virtual_ranks: int | None,
    loader: object,
) -> None:
    if not isinstance(precision, str) or precision not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"precision={short(precision)}: say 'fp32', 'bf16' or 'fp16'")
    if virtual_ranks is not None and strategy not in ("ddp", "single"):
        raise ValueError(
            f"virtual_ranks={virtual_ranks} with strategy={strategy!r}: its sums are in its own order.\n"
            "Fix: strategy='auto', or leave virtual_ranks out"
        )
    if loader is not None and not isinstance(loader, CountingLoader):
        raise ValueError(
            f"loader is a {type(loader).__name__}, which does not tell how many samples each rank has.\n"
            "Gradients of uneven batches would be weighted wrongly.\n"
            "Fix: loader=ShardLoader(dataset, global_batch_size=...), or leave it out"
        )


def _check_engine_options(
    strategy: str, builder: Builder, options: Iterable[str], virtual_ranks: int | None
) -> None:
    known = builder.OPTIONS
    for name in options:
        if name not in known:
            raise ValueError(
                f"parallelize: unknown option {name!r}{_nearest(name, known)}.\n"
                f"Fix: strategy {strategy!r} {'has' if virtual_ranks is None else 'with virtual_ranks has'} "
                f"{', '.join(known) or 'none'}"
            )


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _sync_batch_norm(
    model: nn.Module, strategy: str, virtual_ranks: int | None, loader: CountingLoader | None, world: World
) -> None:
    if virtual_ranks is not None or strategy == "dp":
        what = "virtual_ranks" if virtual_ranks is not None else "strategy='dp'"
        raise ValueError(
            f"sync_batch_norm=True with {what}: its statistics are over the batches of ranks.\n"
            "Fix: leave sync_batch_norm out, or use strategy='ddp' without virtual_ranks"
        )
    if find_ddp(model) is not None or _is_sharded(model):
        raise ValueError(
            "sync_batch_norm=True, but the model is wrapped already, and the wrapper would not know the new layers.\n"
            "Fix: convert_sync_batchnorm(model) before you wrap it"
        )
    inner = unwrap(model)
    if world.world_size > 1 and convert_sync_batchnorm(inner, loader) is not inner:
        raise ValueError(
            "sync_batch_norm=True, but the model is a batch norm itself.\nFix: convert_sync_batchnorm(model) before"
        )

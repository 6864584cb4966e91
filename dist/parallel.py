"""One call that turns a model and its optimizer into ones for several ranks."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from phalanx.dist.engines.ddp import OPTIONS as DDP_OPTIONS
from phalanx.dist.engines.ddp import DDPEngine, find_ddp
from phalanx.dist.engines.engine import CountingLoader, Engine, engine_of, remember
from phalanx.dist.engines.precision import Precision
from phalanx.dist.engines.single import SingleEngine
from phalanx.dist.engines.virtual import OPTIONS as VIRTUAL_OPTIONS
from phalanx.dist.engines.virtual import VirtualEngine, prepare_virtual_ranks
from phalanx.dist.membership import World, world_or_single

logger = logging.getLogger(__name__)

STRATEGIES = ("auto", "ddp", "single")
LATER_STRATEGIES = ("accelerate", "deepspeed", "dp", "fsdp")
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
        strategy: ``auto`` is ``ddp`` on several ranks and else ``single``.
        precision: ``bf16`` and ``fp16`` run the forward under autocast and return fp32; weights stay fp32.
        max_grad_norm: Clip the total gradient norm to this, more than 0, before each update, also in a plain loop.
        virtual_ranks: With ``single`` and ``ddp``: share each step among so many virtual ranks, so that losses and weights are
            equal to the bit on every world size that can play them (each rank a power of two of them, or one rank all). Write
            the loop with the engine; see `VirtualEngine`. A ``loader`` made with ``virtual_ranks`` says it as well.
        loader: The training loader; it tells each rank's share of a step. Without it every rank counts alike.
        device: By default the world's.
        engine_options: For ``ddp``: ``bucket_cap_mb``, ``static_graph``, ``find_unused_parameters``,
            ``gradient_as_bucket_view`` (default True) and ``broadcast_buffers`` (rank 0's buffers after each step; default True).
            With ``virtual_ranks``: ``num_threads`` (of torch, from now on; default 1).

    Returns:
        Model, optimizer and engine.

    Raises:
        ValueError: An option is unknown, a parameter of the optimizer is not the model's, or the optimizer has
            state.
    """
    world = world_or_single()
    strategy = _choose_strategy(strategy, world)
    if virtual_ranks is None:
        virtual_ranks = getattr(loader, "virtual_ranks", None)
    _check_options(strategy, precision, max_grad_norm, virtual_ranks, loader, engine_options)
    known = engine_of(model)
    if known is not None:
        warnings.warn("parallelize: this model is parallel already, and is returned as it is", stacklevel=2)
        return model, known.optimizer, known  # type: ignore[return-value]
    place = torch.device(device) if device is not None else world.device
    ddp = find_ddp(model)
    if ddp is None:
        model = model.to(place)
    else:
        warnings.warn(
            "parallelize: this model is wrapped in DistributedDataParallel already; that wrapper is used",
            stacklevel=2,
        )
        if strategy == "single":
            raise ValueError(
                "strategy='single', but the model is wrapped in DistributedDataParallel.\nFix: pass the model inside"
            )
    if virtual_ranks is not None:
        prepare_virtual_ranks(model, loader, virtual_ranks, world)
    ready = _ready_optimizer(model, optimizer)
    if loader is not None:
        loader.training = True
    common: dict[str, Any] = {
        "device": place,
        "precision": precision,
        "max_grad_norm": max_grad_norm,
        "loader": loader,
    }
    engine: SingleEngine
    if virtual_ranks is not None:
        if world.world_size > 1:
            _take_from_rank_zero([*model.parameters(), *model.buffers()])
        engine = VirtualEngine(
            model, ready, virtual_ranks=virtual_ranks, world=world, **common, **engine_options
        )
        remember(model, engine)
        return model, ready, engine
    if ddp is None and strategy == "ddp" and not any(param.requires_grad for param in model.parameters()):
        logger.info("parallelize: no parameter of the model is trainable, so it is not wrapped")
        _take_from_rank_zero([*model.parameters(), *model.buffers()])
        strategy = "single"
    if strategy == "single":
        engine = SingleEngine(model, ready, **common)
    else:
        sync_buffers = engine_options.pop("broadcast_buffers", True)
        if ddp is None:
            _refuse_sync_batch_norm_on_cpu(model, place)
            ddp = _wrap(model, place, engine_options)
            model = ddp
        else:
            sync_buffers = False  # its maker has set what DDP does in each forward
        engine = DDPEngine(model, ddp, ready, sync_buffers=sync_buffers, **common)
    remember(model, engine)
    return model, ready, engine


def _choose_strategy(strategy: str, world: World) -> str:
    several = world.world_size > 1
    if strategy in LATER_STRATEGIES:
        raise ValueError(
            f"strategy={strategy!r} is not in this version.\nFix: one of {', '.join(map(repr, STRATEGIES))}"
        )
    if strategy not in STRATEGIES:
        raise ValueError(
            f"strategy={strategy!r} is unknown{_nearest(strategy, STRATEGIES)}.\n"
            f"Fix: one of {', '.join(map(repr, STRATEGIES))}"
        )
    if strategy == "single" and several:
        raise ValueError(
            f"strategy='single' on {world.world_size} ranks: each would train a model of its own.\n"
            "Fix: strategy='auto', or start one process"
        )
    if strategy == "auto":
        return "ddp" if several else "single"
    if strategy == "ddp" and not dist.is_initialized():
        logger.info("parallelize: strategy='ddp' in a single process runs as 'single'")
        return "single"
    return strategy


def _check_options(
    strategy: str,
    precision: str,
    max_grad_norm: float | None,
    virtual_ranks: int | None,
    loader: object,
    engine_options: dict[str, Any],
) -> None:
    if precision not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"precision={precision!r}: say 'fp32', 'bf16' or 'fp16'")
    if max_grad_norm is not None and not (max_grad_norm > 0 and math.isfinite(max_grad_norm)):
        raise ValueError(f"max_grad_norm={max_grad_norm}: it must be more than 0; None switches clipping off")
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
    options = DDP_OPTIONS if virtual_ranks is None else VIRTUAL_OPTIONS
    for name in engine_options:
        if name not in options:
            raise ValueError(
                f"parallelize: unknown option {name!r}{_nearest(name, options)}.\n"
                f"Fix: strategy {strategy!r} {'has' if virtual_ranks is None else 'with virtual_ranks has'} "
                f"{', '.join(options)}"
            )


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _ready_optimizer(
    model: nn.Module, optimizer: OptimizerT | Callable[[Iterable[nn.Parameter]], OptimizerT] | None
) -> OptimizerT:
    """The optimizer over the model's own parameters.

    Raises:
        ValueError: It has state, or parameters that are not the model's: steps would change nothing.
        TypeError: It is no optimizer, nor a function that returns one.
    """
    made = optimizer if isinstance(optimizer, Optimizer) else None
    if optimizer is None and not any(param.requires_grad for param in model.parameters()):
        return SGD(model.parameters(), lr=0.0)  # type: ignore[return-value]  # there is nothing to step
    if made is None and callable(optimizer):
        made = optimizer(model.parameters())
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"parallelize: {type(optimizer).__name__} is no optimizer and no function that returns one.\n"
            "Fix: pass Adam(model.parameters()), or Adam itself"
        )
    if made.state:
        raise ValueError(
            "parallelize: the optimizer has state already, which ranks may not share and which is not moved with the model.\n"
            "Fix: pass a fresh one; CheckpointManager.restore() puts a saved state in"
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
        _take_from_rank_zero(model.buffers())
    return wrapped


def _refuse_sync_batch_norm_on_cpu(model: nn.Module, device: torch.device) -> None:
    if device.type != "cpu":
        return
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names:
        raise ValueError(
            f"SyncBatchNorm ({', '.join(names[:4])}) works on GPUs only, and this rank is on the CPU.\n"
            "Fix: leave convert_sync_batchnorm out, or run on GPUs"
        )


@torch.no_grad()
def _take_from_rank_zero(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        dist.broadcast(tensor, src=0)

"""``fully_shard``: weights, gradients and optimizer state shared out over the ranks."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from phalanx.dist.engines import single
from phalanx.dist.engines.buffers import SharedBuffers, make_contiguous, take_from_rank_zero
from phalanx.dist.engines.ddp import CHECKED_STEPS, refuse_sync_batch_norm_on_cpu
from phalanx.dist.engines.gradient_gate import GradientGate
from phalanx.dist.engines.optimizers import point_at, ready_optimizer
from phalanx.dist.engines.precision import DTYPES
from phalanx.dist.engines.ranks import RanksEngine
from phalanx.dist.engines.setting import Common, MakeOptimizer, Setting
from phalanx.dist.engines.single import SingleEngine
from phalanx.dist.wrappers import unwrap

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

OPTIONS = ("blocks", "broadcast_buffers", "find_unused_parameters", "reshard_after_forward")
MIN_BLOCK_PARAMETERS = 1_000_000  # below, a block's own all-gather costs more than it saves


class FSDPEngine(RanksEngine):
    """Training on several ranks, each with a part of every weight, gradient and optimizer state.

    ::

        model, optimizer, engine = parallelize(model, Adam, "fsdp", precision="bf16", loader=loader, blocks=TransformerLayer)

    *Blocks.* Each block's weights are gathered for its forward and backward and let go after; what is in no block is gathered for the
    whole step. By default blocks are the members of the outermost ``nn.ModuleList`` and ``nn.Sequential`` with at least
    1,000,000 parameters; ``blocks`` (a class or several) names them by class. A block that shares a parameter with another
    part of the model is left in the whole.

    *Weights.* The loop's loss is the mean over this rank's samples; FSDP's averaging over ranks is undone by
    weighting gradients with ``step_local_count / global_count`` at the model's outputs, see `GradientGate`.

    *Accumulation.* Micro steps before the last keep their gradients whole, unreduced: as much memory as DDP's.

    *Precision.* ``bf16`` and ``fp16``: weights are gathered in 16 bits, the forward runs under autocast, gradients are reduced in fp32, the
    optimizer sees fp32. Where the model has batch norm, whose weights must be fp32, weights are gathered in fp32.

    An optimizer built before is pointed at the sharded parameters. Parameters are DTensors, ``model.state_dict()`` holds them;
    `export` gathers them. Loading a state dict within a step is refused: the gathered weights would be used on.

    Args:
        model: The sharded module, or a wrapper such as `torch.compile` around it.
        sharded: That module.
        sync_buffers: Whether ranks take over rank 0's buffers after each step.
        options: Those of `SingleEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        sharded: FSDPModule,
        optimizer: Optimizer,
        *,
        sync_buffers: bool = True,
        may_be_unused: bool = False,
        **common: Unpack[Common],
    ) -> None:
        module = unwrap(model)
        buffers = SharedBuffers(module) if sync_buffers else None
        super().__init__(model, optimizer, world_size=dist.get_world_size(), buffers=buffers, **common)
        self._sharded = sharded
        self._gate = GradientGate(model)
        self._reduces = self._forwards = False  # since the last update: a forward that reduces, any forward
        self._sync = True
        self._in_step = False  # a training forward has run since the last update
        self._checked = CHECKED_STEPS if may_be_unused else 0
        self._watch_forwards(model)
        module.register_load_state_dict_pre_hook(self._before_load)  # type: ignore[no-untyped-call]

    def export(self) -> dict[str, Any]:
        """See `Engine.export`. Collective; every rank gets the whole tensors, copies of the shards."""
        state = super().export()
        state["model"] = {name: _whole(value) for name, value in state["model"].items()}
        by_number = state["optimizer"]["state"]
        state["optimizer"]["state"] = {
            number: {entry: _whole(value) for entry, value in entries.items()}
            for number, entries in by_number.items()
        }
        return state

    def load(self, state: dict[str, Any]) -> None:
        """See `Engine.load`; takes whole tensors, as `export` and other engines give them."""
        if self._in_step:
            raise _inside_a_step("engine.load()")
        module = self.unwrap()
        own = module.state_dict()
        model = {name: _sharded_as(value, own.get(name)) for name, value in state["model"].items()}
        optimizer = dict(state["optimizer"])
        params = dict(enumerate(self._params))
        optimizer["state"] = {
            number: {entry: _sharded_as(value, params.get(number)) for entry, value in entries.items()}
            for number, entries in optimizer["state"].items()
        }
        super().load({**state, "model": model, "optimizer": optimizer})

    def _reduction(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return self._synced(last)

    @contextlib.contextmanager
    def _synced(self, last: bool) -> Iterator[None]:
        self._sharded.set_requires_gradient_sync(last)
        self._sync = last
        try:
            yield
        finally:
            self._sync = True
            self._sharded.set_requires_gradient_sync(True)

    def _backward(self, loss_sum: Tensor, global_count: int) -> None:
        # A stand-in goes backward as well: the others gather weights there, together with this rank.
        self._gate.weigh(0.0 if self._stands_in() else 1.0)
        loss = loss_sum * (self._world_size / global_count)  # FSDP averages
        self._scaled(loss).backward()  # type: ignore[no-untyped-call]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._in_step = self._in_step or module.training
        self._forwards = True
        self._reduces = self._reduces or self._sync
        weight = self._plain_weight()
        if weight is not None:
            self._gate.weight = weight

    def _check_gradients(self) -> None:
        if self._forwards and not self._reduces:
            raise RuntimeError(
                "optimizer.step() with gradients that were not reduced over the ranks: no micro step was the last one.\n"
                "Fix: let the step's last micro_step have last=True"
            )
        if self._checked < CHECKED_STEPS:
            self._name_unused()

    def _name_unused(self) -> None:
        trainable = [(name, param) for name, param in self.unwrap().named_parameters() if param.requires_grad]
        unused = [name for name, param in trainable if param.grad is None]
        if len(unused) == len(trainable):
            return  # no backward yet
        self._checked += 1
        if unused:
            self._checked = CHECKED_STEPS
            names = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
            warnings.warn(
                f"{len(unused)} of {len(trainable)} parameters got no gradient: {names}. They are not trained; and if they are used on "
                "some ranks alone, ranks will wait for each other, or mix up their gradients. Fix: set requires_grad=False, or "
                "parallelize(..., find_unused_parameters=True)",
                stacklevel=4,
            )

    def _clip(self, max_norm: float) -> Tensor:
        return cast("Tensor", _whole(super()._clip(max_norm)))

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._reduces = self._forwards = self._in_step = False
        super()._after_update(optimizer, args, kwargs)

    def _before_load(self, *_: Any) -> None:
        if self._in_step:
            raise _inside_a_step("load_state_dict()")


def build(
    model: nn.Module, optimizer: Optimizer | MakeOptimizer | None, setting: Setting
) -> tuple[nn.Module, Optimizer, SingleEngine]:
    """See `Builder.build`; in one process without a group, the plain model."""
    if not dist.is_initialized():
        return single.build(model, optimizer, setting)
    options = dict(setting.options)
    sync_buffers = options.pop("broadcast_buffers", True)
    may_be_unused = options.pop("find_unused_parameters", False)
    module = unwrap(model)
    refuse_sync_batch_norm_on_cpu(module, setting.device)
    if isinstance(module, FSDPModule):
        warnings.warn(
            "parallelize: this model is sharded by fully_shard already, and stays as it is", stacklevel=3
        )
        ready = ready_optimizer(model, optimizer)
    else:
        made = optimizer if isinstance(optimizer, Optimizer) else None
        if made is not None:
            ready_optimizer(model, made)  # that its parameters are the model's can be told now only
        before = dict(module.named_parameters())
        take_from_rank_zero([*module.parameters(), *module.buffers()])
        make_contiguous(module.parameters())
        shard(module, setting, **options)
        if made is not None:
            after = dict(module.named_parameters())
            point_at(made, {old: after[name] for name, old in before.items()})
        ready = made if made is not None else ready_optimizer(model, optimizer)
    sharded = module
    assert isinstance(sharded, FSDPModule)
    if may_be_unused:
        _take_part_unused(sharded)
    engine = FSDPEngine(
        model, sharded, ready, sync_buffers=sync_buffers, may_be_unused=may_be_unused, **setting.common
    )
    return model, ready, engine


def shard(
    module: nn.Module,
    setting: Setting,
    *,
    blocks: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Call ``fully_shard`` on the blocks, then on the whole, in place. Collective."""
    mesh = init_device_mesh(setting.device.type, (setting.world.world_size,))
    dtype = DTYPES.get(setting.precision)
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        dtype = None  # its kernels want fp32 weights beside fp32 statistics; autocast alone then
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    for part in [*find_blocks(module, blocks), module]:
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        if setting.device.type == "cpu":
            _sum_only(part)


def find_blocks(
    module: nn.Module, classes: type[nn.Module] | tuple[type[nn.Module], ...] | None = None
) -> list[nn.Module]:
    """The submodules to shard one by one, outermost first; see `FSDPEngine`.

    >>> layers = nn.ModuleList(nn.Linear(1000, 1000) for _ in range(3))
    >>> len(find_blocks(nn.ModuleDict({"layers": layers, "head": nn.Linear(1000, 10)})))
    3
    >>> len(find_blocks(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear))
    1

    Raises:
        ValueError: No submodule is of the classes.
    """
    found = list(_candidates(module, classes))
    if classes is not None and not found:
        names = ", ".join(kind.__name__ for kind in (classes if isinstance(classes, tuple) else (classes,)))
        raise ValueError(
            f"blocks={names}: the model has no such submodule, so its weights would all be gathered at once.\n"
            "Fix: the class of the repeated layers of this model, or leave blocks out"
        )
    uses = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
    return [block for block in found if not _shares(block, uses)]


def _candidates(module: nn.Module, classes: Any) -> Iterator[nn.Module]:
    for child in module.children():
        if classes is not None:
            picked = isinstance(child, classes)
        else:
            listed = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(
                child, nn.ModuleList
            )
            picked = listed and sum(param.numel() for param in child.parameters()) >= MIN_BLOCK_PARAMETERS
        if picked:
            yield child
        else:
            yield from _candidates(child, classes)


def _shares(block: nn.Module, uses: Counter[int]) -> bool:
    inside = Counter(id(param) for _, param in block.named_parameters(remove_duplicate=False))
    return any(uses[param] > count for param, count in inside.items())


def _sum_only(part: Any) -> None:
    """Gloo has no averaging all-reduce."""
    if hasattr(part, "set_force_sum_reduction_for_comms"):  # torch >= 2.8
        part.set_force_sum_reduction_for_comms(True)


def _take_part_unused(sharded: FSDPModule) -> None:
    if not hasattr(sharded, "set_reduce_scatter_unused_params"):
        raise ValueError(
            f"find_unused_parameters=True with strategy='fsdp': torch {torch.__version__} cannot do that.\n"
            "Fix: a newer torch, or strategy='ddp'"
        )
    sharded.set_reduce_scatter_unused_params(True)


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    return value.full_tensor()


def _sharded_as(value: Any, like: Any) -> Any:
    """``value`` cut as ``like`` is; as it is where ``like`` is whole or has another shape (a step count)."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(like, DTensor):
        return value
    if value.shape != like.shape:
        return value
    # Every rank has the whole and takes its part: nothing is sent.
    return distribute_tensor(
        value.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def _inside_a_step(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} inside a step, between a training forward and optimizer.step(): the weights that are gathered now would be "
        "used on, or overwrite what was loaded.\n"
        "Fix: load before the step's forward, or after the update; forward under torch.no_grad() or model.eval() to evaluate"
    )

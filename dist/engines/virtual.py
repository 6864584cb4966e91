"""Virtual ranks: the same weights, to the bit, on every world size that can play them."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist.engines.buffers import take_from_rank_zero
from phalanx.dist.engines.ddp import find_ddp
from phalanx.dist.engines.engine import CountingLoader, StepInfo
from phalanx.dist.engines.optimizers import ready_optimizer
from phalanx.dist.engines.precision import Precision
from phalanx.dist.engines.setting import MakeOptimizer, Setting
from phalanx.dist.engines.single import SingleEngine
from phalanx.dist.keys import reseed
from phalanx.dist.membership import World
from phalanx.dist.numerics import NumericsWarning, differences, numerics_record, warn_of_other_bits
from phalanx.dist.plan import require_int
from phalanx.dist.virtual_buffers import StepBuffers
from phalanx.dist.virtual_ranks import virtual_range
from phalanx.dist.virtual_sums import Layout, TreeSum
from phalanx.dist.world import gather_objects

logger = logging.getLogger(__name__)

OPTIONS = ("num_threads",)
_LINES = (
    "Fix: for x, y in loader:\n"
    "         with engine.micro_step():\n"
    '             engine.backward(loss_fn(model(x), y, reduction="sum"), loader.global_count)\n'
    "         if loader.is_last_micro:\n"
    "             engine.step()"
)


class VirtualEngine(SingleEngine):
    """Training in which the number of ranks does not show in a single bit of losses and weights.

    ::

        model, optimizer, engine = parallelize(model, Adam, virtual_ranks=8, loader=loader)
        for x, y in loader:                        # one batch, or several, for each virtual rank
            with engine.micro_step():
                engine.backward(cross_entropy(model(x), y, reduction="sum"), loader.global_count)
            if loader.is_last_micro:
                info = engine.step()               # float(info.loss): the step's mean loss, equal on all ranks

    Each virtual rank's gradient is taken on its own, by plain autograd on the bare module, and summed in one fixed
    binary tree (see `TreeSum`). Each starts a step from the same buffers; afterwards those hold the mean over the
    virtual ranks. A parameter has a gradient if any virtual rank gave it one.

    The bits also depend on what `numerics_record` lists (threads, processor or GPU, flags, versions), which
    checkpoints keep; resuming under other conditions warns. A loop of ``loss.backward(); optimizer.step()`` works when
    every rank plays one virtual rank; its bits are its own, since the loss is divided elsewhere.

    Without a ``loader`` every micro step is one virtual rank, this rank's ones in order.

    Args:
        model: The user's module, on its device, equal on all ranks.
        optimizer: Of its parameters.
        virtual_ranks: How many share a step.
        world: This rank's place.
        num_threads: Threads of torch in this process from now on, the same on every rank: sums are cut into as many
            parts.
        options: Those of `SingleEngine`.

    Collective: making one compares the ranks' conditions.

    Raises:
        ValueError: This world size cannot play so many virtual ranks, or the ranks disagree on their number.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        virtual_ranks: int,
        world: World,
        device: torch.device,
        num_threads: int = 1,
        precision: Precision = "fp32",
        max_grad_norm: float | None = None,
        loader: CountingLoader | None = None,
    ) -> None:
        self.virtual_ranks = virtual_ranks
        self._played = virtual_range(virtual_ranks, world.rank, world.world_size)
        super().__init__(
            model, optimizer, device=device, precision=precision, max_grad_norm=max_grad_norm, loader=loader
        )
        require_int("num_threads", num_threads, at_least=1)
        torch.set_num_threads(num_threads)
        self.numerics = numerics_record(device, virtual_ranks=virtual_ranks, precision=precision)
        _compare_ranks(self.numerics, world.rank)
        if loader is not None:
            loader.numerics = self.numerics  # type: ignore[attr-defined]  # kept in its state_dict
        if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            warnings.warn(
                NumericsWarning(
                    "not bit-equal: CUDA kernels may sum in any order.\n"
                    "Fix: seed_everything(seed, deterministic=True) before the model is made"
                ),
                stacklevel=3,
            )
        self._world_size = world.world_size
        self._buffers = StepBuffers(self.unwrap(), world.world_size, world.rank)
        self._layout: Layout | None = None
        self._tree: TreeSum | None = None
        self._result: Any = None  # the slot that gradients are views of, until the next step begins
        self._begun = False  # a step has begun: its first forward has met the buffers
        self._taken = 0  # virtual ranks of this rank whose gradients are taken, in this step
        self._current: int | None = None  # the one whose micro batches are under way
        self._token: Any = None  # which step that is, by the loader
        self._inside = False
        self._loss: Tensor | None = None  # of the current one
        self._step_loss: Tensor | None = None
        self._used: set[int] = set()  # parameters that a virtual rank of this rank has used
        if len(self._played) == 1:
            self.unwrap().register_forward_pre_hook(_FirstForward(self))

    # ---- a step, virtual rank by virtual rank

    @contextlib.contextmanager
    def micro_step(self, key: int | None = None, *, last: bool | None = None) -> Iterator[None]:
        """See `Engine.micro_step`. Which is the last follows from the number of virtual ranks."""
        if key is not None:
            reseed(key)
        self._enter()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        if self._loss is None and any(param.grad is not None for param in self._params):
            raise RuntimeError(
                "loss.backward() in engine.micro_step(): how much these samples weigh in the step is unknown.\n"
                + _LINES
            )
        if self.loader is None or self.loader.ends_virtual_rank:  # type: ignore[attr-defined]
            self._take()

    def _enter(self) -> None:
        """Find out whose micro batch this is, and give a new virtual rank the buffers of the step's start."""
        loader: Any = self.loader
        number = self._taken
        if loader is not None:
            number = loader.virtual_rank - self._played.start
            token = (loader.progress.epoch, loader.progress.step - loader.is_last_micro)
            if number == self._current and token == self._token:
                return
            if number == 0 and self._begun and self._taken < len(self._played):
                self._abandon()  # the loop has left the step before its end, and begins another
            self._token = token
        if number >= len(self._played) or self._taken == len(self._played):
            raise RuntimeError(
                f"this rank plays {len(self._played)} of {self.virtual_ranks} virtual ranks, and another micro step came "
                "after theirs: its samples would be those of another step.\n" + _LINES
            )
        if number != self._taken:
            raise RuntimeError(
                f"a batch of virtual rank {self._played[number]} came where virtual rank {self._played[self._taken]} is "
                "next: one was left out.\nFix: an engine.micro_step() for every batch of the loader"
            )
        if self._begun and number:
            self._buffers.put_back()
        else:
            self._begin()
        self._current = number

    def _begin(self) -> None:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        if self._layout is None or len(params) != len(self._params):  # add_param_group
            self._params = params
            self._layout = Layout(1 + len(params) + self._buffers.scalars, params, self._buffers.floats)
            self._tree = TreeSum(self._layout, self._world_size)
            self._result = None
        assert self._tree is not None
        if self._result is not None:
            self._tree.release(self._result)
            self._result = None
        self._buffers.begin(self._layout)
        self._begun = True
        self._used = set()

    def _abandon(self) -> None:
        assert self._tree is not None
        logger.warning(
            "a step was left after %d of this rank's %d virtual ranks: its gradients are dropped",
            self._taken,
            len(self._played),
        )
        self._buffers.put_back()
        self._tree.clear()
        for param in self._params:
            param.grad = None
        self._begun, self._taken, self._current, self._loss = False, 0, None, None
        self._has_gradients = False

    def _backward(self, loss_sum: Tensor, global_count: int) -> None:
        if not self._inside:
            raise RuntimeError(
                "engine.backward() outside engine.micro_step(): whose gradients these are is unknown.\n"
                + _LINES
            )
        stands_in = self.loader is not None and self.loader.local_count == 0
        if stands_in:
            return
        loss = loss_sum / global_count
        self._scaled(loss).backward()  # type: ignore[no-untyped-call]
        mine = loss.detach()
        self._loss = mine if self._loss is None else self._loss + mine

    @torch.no_grad()
    def _take(self) -> None:
        """Take the current virtual rank's gradients out, into the tree."""
        assert self._tree is not None
        slot, add = self._tree.leaf()
        grads = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        used = [number for number, grad in enumerate(grads) if grad is not None]
        self._used.update(used)
        if used and any(grad is not None and grad.layout != torch.strided for grad in grads):
            raise ValueError(
                "a gradient is sparse, and virtual_ranks sums dense ones.\nFix: nn.Embedding(sparse=False)"
            )
        flags = torch.ones(len(grads) + 1, dtype=slot.scalars.dtype)
        flags[0] = 0
        if len(used) < len(grads):
            flags[1:] = torch.tensor([grad is not None for grad in grads])
        flags = flags.to(slot.scalars.device, non_blocking=True)
        if self._loss is not None:
            flags[0] = self._loss
        targets, sources = slot.gradients, grads
        if len(used) < len(grads):
            for number, grad in enumerate(grads):
                if grad is None:  # added too: -0.0 + 0.0 is 0.0, as where this is another rank's
                    slot.gradients[number].add_(0.0) if add else slot.gradients[number].zero_()
            targets, sources = [targets[number] for number in used], [grads[number] for number in used]
        if add:
            slot.scalars[: len(flags)].add_(flags)
            if used:
                torch._foreach_add_(targets, sources)
        else:
            slot.scalars[: len(flags)].copy_(flags)
            if used:
                torch._foreach_copy_(targets, sources)
        counts = self.loader is None or self._played[self._taken] < self.loader.global_count
        self._buffers.leave(slot, add=add, counts=counts, first=self._taken == 0)
        if add:
            self._tree.carry()
        self._taken += 1
        self._current, self._loss = None, None

    @torch.no_grad()
    def _reduce(self) -> None:
        """Put the sum over all virtual ranks where the optimizer looks for it. Collective."""
        assert self._tree is not None
        total = self._tree.total()
        self._step_loss = total.scalars[0].clone()
        # A flag that this rank has set itself need not be read: that would wait for the device.
        given = [True] * len(self._params)
        if len(self._used) < len(self._params):
            given = [flag > 0 for flag in total.scalars[1 : 1 + len(given)].tolist()]
        for param, view, has in zip(self._params, total.gradients, given, strict=True):
            param.grad = view if has else None
        counted = self.virtual_ranks
        if self.loader is not None:
            counted = min(counted, self.loader.global_count)
        self._buffers.finish(total, counted)
        self._result = total
        self._begun, self._taken = False, 0

    def step(self) -> StepInfo:
        """See `Engine.step`; ``loss`` is the step's, summed in the same tree."""
        if self._taken != len(self._played) or self._current is not None:
            raise RuntimeError(
                f"engine.step() after {self._taken} of this rank's {len(self._played)} virtual ranks: the others' "
                "samples would be left out.\n" + _LINES
            )
        info = super().step()
        return replace(info, loss=self._step_loss)

    def _update(self) -> bool:
        self._reduce()
        return super()._update()

    # ---- the plain loop: one virtual rank on each rank

    def _at_forward(self) -> None:
        if not self._begun:
            self._begin()

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping and self._scaler is None:
            self._take_plain()
        super()._before_update(optimizer, args, kwargs)

    @torch.no_grad()
    def _take_plain(self) -> None:
        """Weight what ``loss.backward()`` has left, and sum it."""
        if len(self._played) > 1 or self._taken:
            raise RuntimeError(
                f"optimizer.step() with virtual_ranks={self.virtual_ranks} on {self._world_size} ranks: each rank plays "
                f"{len(self._played)} in turn, and the update belongs after the last, by engine.step().\n"
                + _LINES
            )
        if not self._begun:
            raise RuntimeError(
                "optimizer.step() before any forward of the model in training: there is nothing to update"
            )
        share = 1.0 / self._world_size
        if self.loader is not None:
            share = self.loader.step_local_count / self.loader.global_count
        for param in self._params:
            if share == 0:
                param.grad = None
            elif param.grad is not None:
                param.grad.mul_(share)
        self._take()
        self._reduce()

    # ---- states

    def export(self) -> dict[str, Any]:
        """See `Engine.export`; ``numerics`` is what the bits depend on."""
        return {**super().export(), "numerics": dict(self.numerics)}

    def load(self, state: dict[str, Any]) -> None:
        """See `Engine.load`. Warns when the state was saved under conditions that give other bits."""
        super().load(state)
        warn_of_other_bits(state.get("numerics"), self.numerics)


def build(
    model: nn.Module, optimizer: Optimizer | MakeOptimizer | None, setting: Setting
) -> tuple[nn.Module, Optimizer, VirtualEngine]:
    """See `Builder.build`."""
    world, virtual_ranks = setting.world, setting.virtual_ranks
    assert virtual_ranks is not None
    prepare_virtual_ranks(model, setting.loader, virtual_ranks, world)
    ready = ready_optimizer(model, optimizer)
    if world.world_size > 1:
        take_from_rank_zero([*model.parameters(), *model.buffers()])
    engine = VirtualEngine(
        model, ready, virtual_ranks=virtual_ranks, world=world, **setting.common, **setting.options
    )
    return model, ready, engine


def prepare_virtual_ranks(
    model: nn.Module, loader: CountingLoader | None, virtual_ranks: int, world: World
) -> None:
    """Refuse what cannot be, and let the loader share steps among virtual ranks.

    Raises:
        ValueError: See `VirtualEngine`; or the model is wrapped, or the loader knows no virtual ranks.
    """
    virtual_range(virtual_ranks, world.rank, world.world_size)
    if find_ddp(model) is not None:
        raise ValueError(
            f"virtual_ranks={virtual_ranks} with a model in DistributedDataParallel, which sums gradients in its own "
            "order.\nFix: pass the module inside"
        )
    _refuse_sync_batch_norm(model)
    if loader is None:
        return
    if not hasattr(loader, "use_virtual_ranks"):
        raise ValueError(
            f"virtual_ranks={virtual_ranks} with a {type(loader).__name__}, which gives a rank one batch where its virtual "
            "ranks need one each.\nFix: loader=ShardLoader(dataset, global_batch_size=...), or leave it out"
        )
    loader.use_virtual_ranks(virtual_ranks)


def _refuse_sync_batch_norm(model: nn.Module) -> None:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names:
        raise ValueError(
            f"virtual_ranks with SyncBatchNorm ({', '.join(names[:4])}): its statistics are over the ranks' batches, and "
            "would change with the world size.\n"
            "Fix: plain batch norm, whose statistics are those of a virtual rank's micro batch"
        )


class _FirstForward:
    """Forward hook that lets the engine note the buffers; a copy or a pickle of the model takes none along."""

    def __init__(self, engine: VirtualEngine | None) -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def __call__(self, module: nn.Module, args: Any) -> None:
        engine = None if self._engine is None else self._engine()
        if engine is not None and module.training and torch.is_grad_enabled():
            engine._at_forward()

    def __deepcopy__(self, memo: dict[int, Any]) -> _FirstForward:
        return _FirstForward(None)

    def __reduce__(self) -> Any:
        return _FirstForward, (None,)


def _compare_ranks(record: dict[str, Any], rank: int) -> None:
    """Raise, on every rank, when ranks play different games; warn when their machines differ. Collective."""
    records = gather_objects(record)
    counts = [found["virtual_ranks"] for found in records]
    if len(set(counts)) > 1:
        raise ValueError(
            f"ranks disagree on virtual_ranks: {', '.join(f'rank {r}: {v}' for r, v in enumerate(counts))}.\n"
            "Fix: the same number on every rank"
        )
    for other, found in enumerate(records):
        differ = differences(records[0], found)
        if differ and rank == 0:
            warnings.warn(
                NumericsWarning(
                    f"not bit-equal: rank {other} computes under other conditions than rank 0 ({', '.join(differ)}). "
                    "Another world size would give other last bits"
                ),
                stacklevel=4,
            )
            return

"""Passes over a plan's steps: which batch comes when, under which key, and how far the run has come."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler

from phalanx.dist.arguments import require_flag
from phalanx.dist.batches import Batch, BatchQueue, Share
from phalanx.dist.keys import reseed
from phalanx.dist.loader_options import check_dataset, check_sampler, resolve_batch_sizes, samples_of_epoch
from phalanx.dist.membership import check_world
from phalanx.dist.numerics import warn_of_other_bits
from phalanx.dist.orders import EpochOrders
from phalanx.dist.permutation import Indices
from phalanx.dist.plan import Plan, Progress, Tail, require_int
from phalanx.dist.resume_point import resume_point
from phalanx.dist.transfer import move_ahead
from phalanx.dist.virtual_ranks import virtual_range

if TYPE_CHECKING:
    from phalanx.dist.world import World

_logger = logging.getLogger(__name__)


class StepLoader:
    """This rank's share of every step, by plan and progress; where a batch's contents come from is left to others.

    See `ShardLoader` for passes, attributes and arguments, which are the same for all of them.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "uneven",
        virtual_ranks: int | None = None,
        sampler: Sampler[Any] | None = None,
        world: World | None = None,
    ) -> None:
        owner = type(self).__name__
        check_dataset(dataset)
        shuffle = require_flag("shuffle", shuffle)
        check_world(world)
        if sampler is not None:
            check_sampler(sampler, shuffle, owner=owner)
        require_int("seed", seed, at_least=-(1 << 63))
        if world is None:
            from phalanx.dist.world import world_or_single

            world = world_or_single()
        self.dataset = dataset
        self.sampler = sampler
        self.world = world
        self.device: torch.device = world.device
        self.training = shuffle or (sampler is not None and not isinstance(sampler, SequentialSampler))
        self._asked = global_batch_size, micro_batch_size
        self._ordering: dict[str, Any] = {"seed": int(seed), "tail": tail, "shuffle": shuffle}
        #: What the bits of a run with virtual ranks depend on, kept in `state_dict`; the engine sets it.
        self.numerics: dict[str, Any] | None = None
        self._share_among(virtual_ranks)

        self.progress = Progress()
        self.local_count = 0
        self.step_local_count = 0
        self.global_count = 0
        self.is_last_micro = True
        self.key = 0
        self.positions: Indices = np.empty(0, dtype=np.int64)
        self.virtual_rank = self._shards.start
        self.ends_virtual_rank = True

        self._begun = False  # batches were asked for
        self._pass: object | None = None  # the pass under way: another one takes its place
        self._left_at: int | None = None  # the epoch of a pass that has begun and not ended
        self._finished: int | None = None
        self._said_left_early = False
        self._audit()

    @property
    def global_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self.plan.global_batch_size

    def __len__(self) -> int:
        """Batches that this rank gets in a whole epoch."""
        return self._share().batches_per_epoch()

    def __iter__(self) -> Iterator[Any]:
        if self._left_at is not None:
            self._leave_early()
        self._pass = token = object()
        self._begun = True
        progress = self.progress
        self._queue.share = self._share()
        self._queue.epoch, self._queue.first_step = progress.epoch, progress.step_in_epoch
        contents = self._contents(self._queue)
        return self._deliver(token, self._fetch(token, contents, self._queue.pending), progress)

    def use_virtual_ranks(self, virtual_ranks: int) -> None:
        """Share steps among virtual ranks from now on, as if made with ``virtual_ranks``.

        Raises:
            ValueError: This world size cannot play so many, or the loader was made with another number.
            RuntimeError: Batches were delivered already: they had other samples.
        """
        if self.virtual_ranks == virtual_ranks:
            return
        if self.virtual_ranks is not None:
            raise ValueError(
                f"virtual_ranks={virtual_ranks}, but the loader was made with virtual_ranks={self.virtual_ranks}: its "
                "batches would not be theirs.\nFix: say the same number in both places, or in one"
            )
        if self._begun:
            raise RuntimeError(
                f"use_virtual_ranks({virtual_ranks}) after batches were delivered: the run has begun with other shares.\n"
                "Fix: parallelize(virtual_ranks=..., loader=loader) before the first pass"
            )
        self._share_among(virtual_ranks)
        self.virtual_rank = self._shards.start

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``; not needed, since passes count epochs themselves.

        Called with the epoch that a restored run stands in, it keeps the position within it.
        """
        require_int("epoch", epoch, at_least=0)
        if epoch == self._finished and self.training:
            _logger.warning(
                "epoch %d is about to run again, in the same order. %s counts epochs by itself; "
                "a set_epoch is needed only to go elsewhere.",
                epoch,
                type(self).__name__,
            )
        if epoch != self.progress.epoch or self._left_at is not None:
            self.progress = replace(self.progress, epoch=epoch, step_in_epoch=0)
        self._left_at = None
        self._pass = None

    def state_dict(self) -> dict[str, Any]:
        """Progress and plan as plain values, the same on every rank and free of the world size."""
        state: dict[str, Any] = {
            "progress": self.progress.to_dict(),
            "plan": {**self.plan.to_dict(), "fingerprint": self.plan.fingerprint()},
        }
        if self.numerics is not None:
            state["numerics"] = dict(self.numerics)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, on any number of ranks.

        Within an epoch the order has to be the same one: only ``global_batch_size`` may differ, when
        the samples seen are a multiple of the new one.

        Raises:
            ValueError: The state was taken within an epoch of other data, seed or batch size.
        """
        progress = resume_point(state, self.plan, owner=type(self).__name__)
        warn_of_other_bits(state.get("numerics"), self.numerics, started=progress.step > 0)
        self.progress = progress
        self._left_at = self._finished = None
        self._pass = None

    # ---- what other loaders say

    def _contents(self, queue: BatchQueue) -> Iterator[Any]:
        """What a pass delivers for each order that the queue hands out, on the CPU or in place. Iterates the queue at once."""
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        """What has to be equal on all ranks."""
        settings: dict[str, Any] = {**self.plan.to_dict(), "micro_batch_size": self.micro_batch_size}
        settings["virtual_ranks"] = self.virtual_ranks
        if self.sampler is not None:
            settings["order drawn from the sampler"] = self._orders.fingerprint()
        return settings

    # ---- shared

    def _share_among(self, virtual_ranks: int | None) -> None:
        """Make the plan for so many virtual ranks, or for the ranks."""
        world = self.world
        shards = world.world_size
        self._shards = range(world.rank, world.rank + 1)
        if virtual_ranks is not None:
            shards = virtual_ranks
            self._shards = virtual_range(virtual_ranks, world.rank, world.world_size)
        self.virtual_ranks = virtual_ranks
        batch_size, self.micro_batch_size = resolve_batch_sizes(
            *self._asked, shards, owner=type(self).__name__
        )
        self.plan = Plan(
            num_items=samples_of_epoch(self.dataset, self.sampler, batch_size, owner=type(self).__name__),
            global_batch_size=batch_size,
            shards=shards,
            **self._ordering,
        )
        self._check_steps()
        self._orders = EpochOrders(self.plan, self.sampler)
        self._queue = BatchQueue(self._orders.indices)

    def _share(self) -> Share:
        return Share(self.plan, self._shards, self.micro_batch_size, stand_ins=self.training)

    def _check_steps(self) -> None:
        plan = self.plan
        if plan.steps_per_epoch == 0 and (self.training or plan.num_items):
            raise ValueError(
                f"{plan.num_items} items with global_batch_size={plan.global_batch_size}, tail={plan.tail!r}: an "
                "epoch would have no step.\n"
                'Fix: a smaller global_batch_size or tail="uneven"'
            )
        if self.training and plan.global_batch_size < plan.shards:
            _logger.warning(
                "global_batch_size=%d is less than the %d %s: some never get a sample",
                plan.global_batch_size,
                plan.shards,
                "ranks" if self.virtual_ranks is None else "virtual ranks",
            )

    def _audit(self) -> None:
        """Compare datasets and settings over the ranks. Collective when there is a group."""
        if self.world.world_size == 1 or not torch.distributed.is_initialized():
            return
        from phalanx.dist.audits import audit_same_dataset

        audit_same_dataset(self.dataset, self.world, settings=self._settings())

    def _fetch(
        self, token: object, contents: Iterator[Any], pending: deque[Batch]
    ) -> Iterator[tuple[Batch, Any]]:
        """Each batch with its contents, in order."""
        while True:
            self._check_under_way(token)  # before a batch is taken: a later pass has the same workers
            try:
                taken = next(contents)
            except StopIteration:
                return
            yield pending.popleft(), taken

    def _deliver(self, token: object, fetched: Iterator[tuple[Batch, Any]], start: Progress) -> Iterator[Any]:
        steps_before = start.step - start.step_in_epoch  # steps of the run before this epoch
        training, plan = self.training, self.plan
        for batch, contents in move_ahead(fetched, self.device):
            self._check_under_way(token)
            self._left_at = batch.epoch
            self.positions = batch.positions
            self.local_count = len(batch.positions)
            self.step_local_count = batch.step_local_count
            self.global_count = batch.global_count
            self.is_last_micro = batch.is_last_micro
            self.virtual_rank, self.ends_virtual_rank = batch.shard, batch.is_last_of_shard
            purpose = "loop" if batch.micro == 0 else f"loop {batch.micro}"
            self.key = plan.key(batch.epoch, batch.step, batch.shard, purpose)
            done = batch.step + batch.is_last_micro
            self.progress = replace(self.progress, step_in_epoch=done, step=steps_before + done)
            if training:
                reseed(self.key)
            yield contents
        if self._pass is token:
            self.progress = replace(
                self.progress,
                epoch=start.epoch + 1,
                step_in_epoch=0,
                step=steps_before + plan.steps_per_epoch,
            )
            self._left_at, self._finished, self._pass = None, start.epoch, None

    def _check_under_way(self, token: object) -> None:
        if self._pass is not token:
            raise RuntimeError(
                f"this pass over the {type(self).__name__} has ended: another one, set_epoch or load_state_dict came after "
                "it, and progress would count both."
            )

    def _leave_early(self) -> None:
        seen, steps = self.progress.step_in_epoch, self.plan.steps_per_epoch
        if self.training and seen < steps and not self._said_left_early:
            self._said_left_early = True
            _logger.warning(
                "the pass over epoch %d was left after %d of %d steps: its other samples are not seen, the next "
                "pass is epoch %d",
                self.progress.epoch,
                seen,
                steps,
                self.progress.epoch + 1,
            )
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, step_in_epoch=0)
        self._left_at = None

"""A DataLoader for one rank's share of every step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

from phalanx.dist.arguments import require_flag, require_mapping, short
from phalanx.dist.batches import Batch, BatchQueue, KeyedDataset, Share, WorkerInit
from phalanx.dist.keys import generator_states, reseed, restore_generator_states
from phalanx.dist.loader_options import (
    check_dataset,
    check_options,
    check_sampler,
    resolve_batch_sizes,
    samples_of_epoch,
)
from phalanx.dist.membership import check_world
from phalanx.dist.numerics import warn_of_other_bits
from phalanx.dist.orders import EpochOrders
from phalanx.dist.permutation import Indices
from phalanx.dist.plan import Plan, Progress, Tail, require_int
from phalanx.dist.transfer import move_ahead
from phalanx.dist.virtual_ranks import virtual_range
from phalanx.dist.worker_audit import watch_workers

if TYPE_CHECKING:
    from phalanx.dist.world import World

_logger = logging.getLogger(__name__)


class ShardLoader:
    """This rank's share of every step, as batches on its device: a DataLoader that knows about ranks.

    Which samples a step sees depends on seed, epoch and step alone, never on the number of ranks, of
    workers, or of restarts. With ``shuffle=True`` every epoch has an order of its own; without, it is
    an exact evaluation: every item once, none repeated. ::

        loader = ShardLoader(dataset, global_batch_size=50, shuffle=True, num_workers=2)
        for epoch in range(epochs):
            for x, y in loader:            # 25 samples each on 2 ranks; 13, 13, 12, 12 on 4
                ...

    *Passes.* Each ``for`` is one epoch, the next one is the next epoch; no ``set_epoch`` is needed.
    Leaving a pass early makes the next one the next epoch too. After `load_state_dict` the first pass
    delivers the rest of the interrupted epoch (nothing, if its last step had been delivered).

    *Attributes* valid for the batch delivered last: ``progress`` (counts batches delivered, however
    far workers have drawn ahead), ``local_count`` (samples of this rank in the batch),
    ``step_local_count`` (in the whole step), ``global_count`` (in the step over all ranks),
    ``is_last_micro``, ``key`` (a random key for what the loop does), ``positions`` (within the epoch,
    of the samples), ``virtual_rank`` (whose batch it is; without virtual ranks the rank) and
    ``ends_virtual_rank`` (its last one in the step).

    *Uneven steps.* A rank without samples in a step of ``training`` gets a stand-in, the step's first
    sample, with ``local_count`` 0, so that it takes part in collectives; it must weigh nothing (the
    engines see to it; metrics take ``count=loader.local_count``). In evaluation it gets nothing.

    *Randomness.* Every sample is fetched under a key of (seed, epoch, position), in workers as in the
    main process: augmentation by the global generators of torch, random and numpy is the same for any
    ``num_workers`` and world size. A dataset with ``__getitems__`` gets one call for a batch, under
    the key of its first position. In training the global generators are reseeded with ``key`` before
    each batch is delivered; evaluation leaves them as they are.

    Collective when there are several ranks: making one compares the ranks' datasets and settings.

    Args:
        dataset: Map style, the same on every rank.
        global_batch_size: Samples of a step over all ranks.
        micro_batch_size: Samples of one batch on one rank. Alone it means ``global_batch_size =
            micro_batch_size * world_size``; with ``global_batch_size`` each rank's share of a step
            comes in batches of at most that size, equally many on every rank.
        shuffle: A new order each epoch; also what makes ``training`` true.
        seed: Any integer, the same on every rank.
        tail: The last step: "uneven" is short, "drop" leaves it out, "pad" repeats the first items.
        virtual_ranks: Share each step among so many virtual ranks rather than among the ranks; each rank
            gets the batches of its own ones in turn. ``parallelize(virtual_ranks=V, loader=loader)`` sets
            it as well. Batches, their sizes and keys then depend on V alone, never on the world size;
            ``micro_batch_size`` is of a virtual rank.
        sampler: A torch Sampler over the whole dataset, drawn once an epoch under a seed that all
            ranks share, then cut into shares; or a WeightedShardSampler or LengthBucketSampler, whose
            whole epoch is looked up under its own seed. Makes ``training`` true as well.
        world: Where this rank stands; by default the current world.
        options: Of torch's DataLoader: ``num_workers``, ``collate_fn``, ``worker_init_fn``,
            ``prefetch_factor``, ``timeout``, ``multiprocessing_context``, ``pin_memory`` (default: on
            CUDA) and ``persistent_workers`` (default: with workers, as their start is slow).

    Raises:
        ValueError: ``batch_size=`` (which of the two?), an IterableDataset, a sampler that is one
            rank's share already, ranks with different datasets or settings, a number out of range.
        TypeError: An option that DataLoader does not have.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "uneven",
        virtual_ranks: int | None = None,
        sampler: Sampler[Any] | None = None,
        world: World | None = None,
        **options: Any,
    ) -> None:
        check_options(options)
        check_dataset(dataset)
        shuffle = require_flag("shuffle", shuffle)
        check_world(world)
        if sampler is not None:
            check_sampler(sampler, shuffle)
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
        self._options = options
        self._generator = torch.Generator()
        self._inner: DataLoader[Any] | None = None
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
        progress = self.progress
        self._queue.share = self._share()
        self._queue.epoch, self._queue.first_step = progress.epoch, progress.step_in_epoch
        self._keyed.reseed_cuda = self.training
        self._generator.manual_seed(self.plan.key(progress.epoch, 0, self.world.rank, "workers"))
        if self._inner is None:
            self._inner = self._make_inner()
        inner = iter(self._inner)
        return self._deliver(token, self._fetch(token, inner, self._queue.pending), progress)

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
        if self._inner is not None:
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
                "epoch %d is about to run again, in the same order. ShardLoader counts epochs by itself; "
                "a set_epoch is needed only to go elsewhere.",
                epoch,
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
        require_mapping("state", state, "what ShardLoader.state_dict() returned")
        if "progress" not in state:
            raise ValueError(
                f"state={short(state)} has no progress.\nFix: what ShardLoader.state_dict() returned"
            )
        progress, then = Progress.from_dict(state["progress"]), dict(state.get("plan", {}))
        now = self.plan.to_dict()
        differ = [name for name in now if name in then and then[name] != now[name]]
        if progress.step_in_epoch == 0:
            if differ:
                _logger.warning("the run goes on with another %s", _differences(differ, then, now))
        elif differ == ["global_batch_size"]:
            consumed = min(progress.step_in_epoch * then["global_batch_size"], self.plan.num_items)
            step_in_epoch, rest = divmod(consumed, self.plan.global_batch_size)
            if consumed == self.plan.num_items:
                step_in_epoch, rest = self.plan.steps_per_epoch, 0
            if rest:
                raise ValueError(
                    f"the run stopped {consumed} samples into epoch {progress.epoch} with global_batch_size="
                    f"{then['global_batch_size']}: that is no whole number of steps of "
                    f"{self.plan.global_batch_size}, samples would be repeated or left out.\n"
                    f"Fix: global_batch_size={then['global_batch_size']} until that epoch ends"
                )
            progress = replace(progress, step_in_epoch=step_in_epoch)
        elif differ:
            raise ValueError(
                f"the run stopped within epoch {progress.epoch} with another {_differences(differ, then, now)}: "
                "the rest of its order would be that of other data.\n"
                "Fix: the same settings until that epoch ends, or start from a checkpoint of an epoch's end"
            )
        if progress.step_in_epoch > self.plan.steps_per_epoch:
            raise ValueError(
                f"the state stands at step {progress.step_in_epoch} of an epoch of {self.plan.steps_per_epoch}."
            )
        warn_of_other_bits(state.get("numerics"), self.numerics, started=progress.step > 0)
        self.progress = progress
        self._left_at = self._finished = None
        self._pass = None

    def _share_among(self, virtual_ranks: int | None) -> None:
        """Make the plan for so many virtual ranks, or for the ranks."""
        world = self.world
        shards = world.world_size
        self._shards = range(world.rank, world.rank + 1)
        if virtual_ranks is not None:
            shards = virtual_ranks
            self._shards = virtual_range(virtual_ranks, world.rank, world.world_size)
        self.virtual_ranks = virtual_ranks
        batch_size, self.micro_batch_size = resolve_batch_sizes(*self._asked, shards)
        self.plan = Plan(
            num_items=samples_of_epoch(self.dataset, self.sampler, batch_size),
            global_batch_size=batch_size,
            shards=shards,
            **self._ordering,
        )
        self._check_steps()
        self._orders = EpochOrders(self.plan, self.sampler)
        self._queue = BatchQueue(self._orders.indices)
        self._keyed = KeyedDataset(
            self.dataset, self.plan, own_collate=self._options.get("collate_fn") is not None
        )
        self._inner = None

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

        settings: dict[str, Any] = {**self.plan.to_dict(), "micro_batch_size": self.micro_batch_size}
        settings["virtual_ranks"] = self.virtual_ranks
        if self.sampler is not None:
            settings["order drawn from the sampler"] = self._orders.fingerprint()
        audit_same_dataset(self.dataset, self.world, settings=settings)

    def _make_inner(self) -> DataLoader[Any]:
        options = dict(self._options)
        options.setdefault("pin_memory", self.device.type == "cuda")
        if options.get("num_workers", 0):
            options.setdefault("persistent_workers", True)
        options["worker_init_fn"] = WorkerInit(options.get("worker_init_fn"))
        watch_workers()
        # A generator of its own: DataLoader would draw its workers' seed from the global one.
        return DataLoader(self._keyed, batch_sampler=self._queue, generator=self._generator, **options)  # type: ignore[arg-type]

    def _fetch(
        self, token: object, inner: Iterator[Any], pending: deque[Batch]
    ) -> Iterator[tuple[Batch, Any]]:
        """Each batch with its contents, on the CPU, in order."""
        # Without workers the samples' keys go to this process's own generators, which the caller
        # of an evaluation expects untouched.
        keep = not self.training and self._options.get("num_workers", 0) == 0 and self._keyed.draws
        while True:
            self._check_under_way(token)  # before a batch is taken: a later pass has the same workers
            states = generator_states() if keep else None
            try:
                contents = next(inner)
            except StopIteration:
                return
            finally:
                if states is not None:
                    restore_generator_states(states)
            yield pending.popleft(), contents

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
                "this pass over the ShardLoader has ended: another one, set_epoch or load_state_dict came after "
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


def _differences(names: list[str], then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({then[name]!r} then, {now[name]!r} now)" for name in names)

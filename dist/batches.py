"""The batches that one rank asks its dataset for, and the random keys they are fetched under."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, get_worker_info

from phalanx.dist.keys import derive_key, reseed
from phalanx.dist.permutation import Indices
from phalanx.dist.plan import Plan

# Positions looked up in the epoch's order at a time: a look-up costs its start, hardly its length.
_LOOK_UP = 4096

_NOTHING: Indices = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Batch:
    """What one micro batch of this rank is made of. ``fetched`` is longer than ``positions`` for a stand-in."""

    epoch: int
    step: int
    shard: int  # of the plan: the rank, or the virtual rank, whose batch it is
    micro: int  # within the shard's part of the step
    is_last_of_shard: bool
    is_last_micro: bool  # of this rank in the step
    positions: Indices  # of the real samples, within the epoch
    fetched: Indices  # positions fetched: the real ones, or the one of a stand-in
    step_local_count: int
    global_count: int


@dataclass(frozen=True)
class Share:
    """One rank's part of every step of a plan: its shards, cut into micro batches of at most ``micro_batch_size``."""

    plan: Plan
    shards: range  # that this rank plays, one after the other: itself, or its virtual ranks
    micro_batch_size: int | None
    stand_ins: bool  # also give a batch where a shard has no sample

    def micro_sizes(self, epoch: int, step: int, shard: int) -> list[int]:
        """Samples of each micro batch of a shard in a step, as even as can be.

        Every shard has as many as shard 0 (which is the largest). Without stand-ins those without a
        sample are left out.
        """
        count = self.plan.shard_count(epoch, step, shard)
        pieces = 1
        if self.micro_batch_size is not None:
            pieces = -(-self.plan.shard_count(epoch, step, 0) // self.micro_batch_size)
        size, larger = divmod(count, pieces)
        sizes = [size + 1] * larger + [size] * (pieces - larger)
        return sizes if self.stand_ins else [size for size in sizes if size]

    def batches_per_epoch(self) -> int:
        """Batches of an epoch on this rank; all steps but the last are alike."""
        steps = self.plan.steps_per_epoch
        if steps == 0:
            return 0
        first, last = (
            sum(len(self.micro_sizes(0, step, shard)) for shard in self.shards) for step in (0, steps - 1)
        )
        return first * (steps - 1) + last

    def batches(self, epoch: int, step: int) -> list[Batch]:
        """The batches of one step on this rank, shard by shard."""
        plan = self.plan
        sizes = [
            (shard, micro, size)
            for shard in self.shards
            for micro, size in enumerate(self.micro_sizes(epoch, step, shard))
        ]
        positions = {shard: plan.positions(epoch, step, shard) for shard in self.shards}
        global_count, step_local_count = plan.count(epoch, step), sum(map(len, positions.values()))
        batches, start = [], 0
        for number, (shard, micro, size) in enumerate(sizes):
            start = start if micro else 0
            real = positions[shard][start : start + size]
            start += size
            last = number == len(sizes) - 1
            batches.append(
                Batch(
                    epoch=epoch,
                    step=step,
                    shard=shard,
                    micro=micro,
                    is_last_of_shard=last or sizes[number + 1][0] != shard,
                    is_last_micro=last,
                    positions=real,
                    fetched=real if size else plan.positions(epoch, step, 0)[:1],
                    step_local_count=step_local_count,
                    global_count=global_count,
                )
            )
        return batches


Order = tuple[int, list[int], list[Any]]  # epoch, positions, dataset indices: what a worker is sent


class BatchQueue:
    """Batch sampler of the inner DataLoader: hands out orders and notes the batch of each.

    A DataLoader draws ahead of what it delivers, and delivers in the order drawn: `pending` holds what
    was drawn and not yet delivered, oldest first.
    """

    def __init__(self, look_up: Callable[[int, Indices], list[Any]]) -> None:
        self._look_up = look_up
        self.share: Share | None = None
        self.epoch = 0
        self.first_step = 0
        self.pending: deque[Batch] = deque()

    def __iter__(self) -> Iterator[Order]:
        assert self.share is not None
        # One of its own for each pass: an abandoned pass must not add to the next one's.
        self.pending = deque()
        return self._orders(self.share, self.pending, self.epoch, self.first_step)

    def __len__(self) -> int:
        return self.share.batches_per_epoch() if self.share is not None else 0

    def _orders(self, share: Share, pending: deque[Batch], epoch: int, first_step: int) -> Iterator[Order]:
        block: list[Batch] = []
        size, last = 0, share.plan.steps_per_epoch - 1
        for step in range(first_step, last + 1):
            for batch in share.batches(epoch, step):
                block.append(batch)
                size += len(batch.fetched)
            if size < _LOOK_UP and step < last:
                continue
            fetched = [batch.fetched for batch in block]
            indices = self._look_up(epoch, np.concatenate(fetched) if fetched else _NOTHING)
            start = 0
            for batch in block:
                pending.append(batch)
                stop = start + len(batch.fetched)
                yield epoch, batch.fetched.tolist(), indices[start:stop]
                start = stop
            block, size = [], 0


def fetches_whole_batches(dataset: Any) -> bool:
    """Whether the dataset fetches a batch in one call of its own (``__getitems__``).

    torch's Subset and StackDataset have that method only to pass it on.
    """
    method = getattr(type(dataset), "__getitems__", None)
    if method is Subset.__getitems__:
        return fetches_whole_batches(dataset.dataset)
    if method is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(map(fetches_whole_batches, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def draws_no_random_numbers(dataset: Any) -> bool:
    """Whether fetching is known to be free of randomness, so that no generator needs a key."""
    kind = type(dataset)
    if kind is TensorDataset:
        return True
    if kind is Subset:
        return draws_no_random_numbers(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(draws_no_random_numbers, dataset.datasets))
    return False


class KeyedDataset(Dataset[Any]):
    """A dataset whose every sample is fetched under a random key of its own.

    In a worker and in the main process alike the global generators are reseeded before each sample,
    so that what it draws depends on (seed, epoch, position) alone. A dataset that fetches whole
    batches is called once, under the key of the first position; so is a ``collate_fn`` of the user's.
    """

    def __init__(self, dataset: Any, plan: Plan, *, own_collate: bool) -> None:
        self.dataset = dataset
        self.reseed_cuda = False
        self._plan = plan
        self._own_collate = own_collate
        self._whole_batches = fetches_whole_batches(dataset)
        self._keyed = not draws_no_random_numbers(dataset)

    @property
    def draws(self) -> bool:
        """Whether fetching a batch reseeds the global generators."""
        return self._keyed or self._own_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, order: Order) -> list[Any]:
        epoch, positions, indices = order
        samples: list[Any]
        if self._whole_batches:
            self._reseed(self._plan.sample_key(epoch, positions[0]))
            samples = self.dataset.__getitems__(indices)
        elif self._keyed:
            samples = []
            for position, index in zip(positions, indices, strict=True):
                self._reseed(self._plan.sample_key(epoch, position))
                samples.append(self.dataset[index])
        else:
            samples = [self.dataset[index] for index in indices]
        if self._own_collate:
            self._reseed(derive_key(self._plan.sample_key(epoch, positions[0]), "collate"))
        return samples

    def _reseed(self, key: int) -> None:
        reseed(key, cuda=self.reseed_cuda)


class WorkerInit:
    """First call of a loader worker: shows the user's dataset to the user's own ``worker_init_fn``."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, KeyedDataset):
            info.dataset.reseed_cuda = False
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses ordinary assignment
        if self._then is not None:
            self._then(worker)

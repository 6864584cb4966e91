"""Batches of samples of similar lengths, so that little of a step is padding."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.dist.arguments import require_flag, require_int, short
from phalanx.dist.epoch_sampler import EpochSampler
from phalanx.dist.keys import derive_key
from phalanx.dist.permutation import Indices, KeyedPermutation
from phalanx.dist.plan import Tail, epoch_order

_POOL_BATCHES = 100  # of which a pool holds samples, unless it is said ...
_LEAST_POOLS = 4  # ... or there would be fewer pools
_LEAST_BATCHES = 8  # ... but no fewer than these: one batch alone has nothing to sort out


class LengthBucketSampler(EpochSampler[list[int]]):
    """This rank's part of batches whose samples are of similar lengths, in an order that all ranks agree on.

    Use it as ``batch_sampler=`` of a plain DataLoader. Each epoch the samples are shuffled, dealt into
    pools, sorted by length within a pool and cut into batches, and the batches are shuffled. The set of
    batches depends on ``(seed, epoch)`` alone, never on the number of ranks: all ranks take part of the
    same batch in the same step, so that none waits for another's longer samples. ::

        lengths = [len(text) for text in dataset]
        loader = DataLoader(dataset, batch_sampler=LengthBucketSampler(lengths, 64), collate_fn=pad)

    >>> sampler = LengthBucketSampler([5, 90, 6, 91, 7, 92, 8, 93], 4, rank=0, world_size=1)
    >>> sorted(sorted(batch) for batch in sampler)
    [[0, 2, 4, 6], [1, 3, 5, 7]]

    *Size of a batch.* ``global_batch_size`` samples over all ranks; the last one is short. Or as many
    as fit in ``max_tokens``: the longest sample's length times the number of samples, over all ranks,
    is at most that. Rank r takes samples r, r + world_size, ... of each batch, sorted by length. Every
    rank yields equally many batches, none of them empty: where a batch has fewer samples than there
    are ranks, those without one repeat one of it. With ``max_tokens`` epochs differ in their number of
    batches; ``len`` is that of the epoch under way or next.

    In a `ShardLoader` (``sampler=``, with the same ``global_batch_size``) those ranks get a stand-in that
    weighs nothing instead, and resuming, micro batches and random keys come with it.

    Passes, epochs and `load_state_dict` are those of `ShardSampler`; ``consumed`` counts samples.

    Args:
        lengths: A whole number of at least 0 for each sample: a sequence, an array or a tensor.
        global_batch_size: Samples of a batch over all ranks, at least ``world_size``.
        max_tokens: Instead of it, the largest padded size of a batch over all ranks, at least the
            longest length times ``world_size``.
        rank: Position in the data-parallel group, ``0 <= rank < world_size``. By default this
            process's, as is ``world_size``.
        world_size: Number of ranks in that group.
        shuffle: False sorts the whole dataset, longest first (which tells at once whether memory is
            enough), the same in each epoch.
        seed: Any integer, the same on every rank.
        tail: The short batch at the end: "uneven" keeps it, "drop" leaves it out, "pad" repeats some of
            its samples until it is full. With ``max_tokens`` no batch counts as short.
        pool_size: Samples sorted together. More means less padding and less chance in which samples
            meet; by default a quarter of the samples, 8 batches at least and 100 at most.

    Raises:
        ValueError: Both sizes or none, one too small for the ranks or for the longest sample, a length
            that is negative or no whole number; ``rank`` is outside the group.
    """

    def __init__(
        self,
        lengths: Any,
        global_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "uneven",
        pool_size: int | None = None,
    ) -> None:
        self._lengths = read_lengths(lengths)
        if seed is None:
            raise ValueError("seed=None: batches are drawn from a seed.\nFix: seed=0, or shuffle=False")
        super().__init__(rank, world_size, seed=seed, tail=tail)
        _check_sizes(self._lengths, global_batch_size, max_tokens, self.world_size)
        self.global_batch_size = None if global_batch_size is None else int(global_batch_size)
        self.max_tokens = None if max_tokens is None else int(max_tokens)
        self.shuffle = require_flag("shuffle", shuffle)
        self._pool_size = self._resolve_pool(pool_size)
        self._made: dict[tuple[int | None, int], tuple[Indices, Indices]] = {}  # the last two epochs

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch over all ranks (those that ``tail`` drops are in it)."""
        return len(self._lengths)

    def indices_at(self, epoch: int, positions: Indices) -> Indices:
        """The dataset indices at these positions of an epoch, its batches one after the other."""
        order, _ = self._batches(epoch)
        found: Indices = order[positions]
        return found

    def _resolve_pool(self, pool_size: int | None) -> int:
        if pool_size is not None:
            require_int("pool_size", pool_size, at_least=1)
        count = self._lengths.size
        if pool_size is None:
            batch = self.global_batch_size
            if batch is None:
                batch = int((self.max_tokens or 0) / max(1.0, float(self._lengths.mean()))) if count else 1
            # With one pool, samples of unusual length would meet the same ones in every epoch.
            pool_size = min(_POOL_BATCHES * batch, max(_LEAST_BATCHES * batch, -(-count // _LEAST_POOLS)))
        pool_size = max(1, int(pool_size))
        if self.global_batch_size is None:
            return pool_size
        return -(-pool_size // self.global_batch_size) * self.global_batch_size

    def _batches(self, epoch: int) -> tuple[Indices, Indices]:
        """An epoch's samples, batch after batch, and where each batch ends."""
        key = self.seed, epoch
        if key not in self._made:
            while len(self._made) > 1:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make_batches(self.seed or 0, epoch)
        return self._made[key]

    def _make_batches(self, seed: int, epoch: int) -> tuple[Indices, Indices]:
        order = self._sorted_pools(seed, epoch)
        ends = self._cut(order)
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        if not self.shuffle or ends.size == 0:
            return order, ends
        full = ends.size
        if self.global_batch_size is not None and order.size % self.global_batch_size:
            full -= 1  # the short one stays last, as in every plan of steps
        places = KeyedPermutation(full, derive_key(seed, epoch, "batches")).take(
            np.arange(full, dtype=np.int64)
        )
        places = np.concatenate([places, np.arange(full, ends.size, dtype=np.int64)])
        sizes = (ends - starts)[places]
        new_ends = np.cumsum(sizes)
        offsets = np.repeat(starts[places] - (new_ends - sizes), sizes)
        return order[offsets + np.arange(order.size, dtype=np.int64)], new_ends

    def _sorted_pools(self, seed: int, epoch: int) -> Indices:
        """Shuffled samples, longest first within each pool."""
        count = self._lengths.size
        positions = np.arange(count, dtype=np.int64)
        if not self.shuffle:
            longest_first: Indices = np.argsort(-self._lengths, kind="stable").astype(np.int64, copy=False)
            return longest_first
        order: Indices = epoch_order(count, seed, epoch).take(positions).copy()
        for start in range(0, count, self._pool_size):
            pool = order[start : start + self._pool_size]
            order[start : start + self._pool_size] = pool[np.argsort(-self._lengths[pool], kind="stable")]
        return order

    def _cut(self, order: Indices) -> Indices:
        """Where the batches of sorted samples end."""
        if self.global_batch_size is not None:
            return np.minimum(
                np.arange(
                    self.global_batch_size, order.size + self.global_batch_size, self.global_batch_size
                ),
                order.size,
            ).astype(np.int64)
        assert self.max_tokens is not None
        pool_size = self._pool_size if self.shuffle else max(1, order.size)
        lengths = np.maximum(self._lengths[order], 1)
        ends: list[int] = []
        for start in range(0, order.size, pool_size):
            stop, place = min(start + pool_size, order.size), start
            while place < stop:  # the first is the longest, since pools are sorted
                before, place = place, min(place + self.max_tokens // int(lengths[place]), stop)
                if place == stop and before > start and 2 * (stop - before) < before - _last_start(ends):
                    # Rather two batches of medium size than a small one, which some ranks would have no part of.
                    ends[-1] = (_last_start(ends) + stop + 1) // 2
                ends.append(place)
        return np.array(ends, dtype=np.int64)

    def _rounds(self, epoch: int) -> tuple[Indices, Indices]:
        """Samples and ends of the batches that the ranks share, without what ``tail`` leaves out."""
        order, ends = self._batches(epoch)
        if self.tail == "drop" and self.global_batch_size is not None:
            ends = ends[: order.size // self.global_batch_size]
        return order, ends

    def _first_batch(self, epoch: int, start: int) -> int:
        """How many batches hold the first ``start`` samples of an epoch."""
        _, ends = self._rounds(epoch)
        return int(np.searchsorted(ends, start, side="right"))

    def _count(self, epoch: int, start: int) -> int:
        return len(self._rounds(epoch)[1]) - self._first_batch(epoch, start)

    def _look_up(self, epoch: int, start: int, done: int, size: int) -> list[list[int]]:
        order, ends = self._rounds(epoch)
        first = self._first_batch(epoch, start) + done
        return [self._part(order[ends[at - 1] if at else 0 : ends[at]]) for at in range(first, first + size)]

    def _part(self, batch: Indices) -> list[int]:
        """This rank's samples of a batch."""
        if self.tail == "pad" and self.global_batch_size is not None and batch.size < self.global_batch_size:
            batch = np.resize(batch, self.global_batch_size)
        mine: list[int] = batch[self.rank :: self.world_size].tolist()
        return mine or [int(batch[self.rank % batch.size])]

    def _consumed(self, epoch: int, start: int, handed_out: int) -> int:
        if handed_out == 0:
            return start
        return int(self._rounds(epoch)[1][self._first_batch(epoch, start) + handed_out - 1])

    def _check_consumed(self, epoch: int, consumed: int) -> None:
        _, ends = self._batches(epoch)
        if consumed and consumed not in ends:
            raise ValueError(
                f"the state has {consumed} samples of epoch {epoch} behind it, which is no whole number of batches of "
                f"an epoch of {self._lengths.size} here: samples would be repeated or left out.\n"
                "Fix: the lengths, batch size and pool size that the state was taken with"
            )

    @property
    def _orders_differ(self) -> bool:
        return self.shuffle


def read_lengths(lengths: Any) -> Indices:
    """Lengths as an int64 array of one dim.

    Raises:
        ValueError: They are none; the first bad one is named.
    """
    if hasattr(lengths, "detach"):
        lengths = lengths.detach().cpu().numpy()
    try:
        if isinstance(lengths, str | bytes):
            raise TypeError("text")
        array = np.asarray(lengths)
        if array.size == 0 and array.ndim == 1:
            return np.empty(0, dtype=np.int64)
        if array.dtype.kind not in "iuf":
            raise TypeError(f"{array.dtype} is no whole number")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lengths={short(lengths)} are no whole numbers ({error}).\n"
            "Fix: one for each sample: [len(sample) for sample in dataset]"
        ) from None
    if array.ndim != 1:
        raise ValueError(
            f"lengths have the shape {array.shape}: one dim is needed, a sample's length at its index."
        )
    good = (array >= 0) & (array <= 1 << 53)
    if array.dtype.kind == "f":
        good &= array == np.floor(array)
    if not good.all():
        bad = int(np.flatnonzero(~good)[0])
        raise ValueError(
            f"lengths[{bad}]={array[bad]!r}: a whole number of at least 0 is needed.\nFix: len() of that sample"
        )
    return array.astype(np.int64)


def _check_sizes(
    lengths: Indices, global_batch_size: int | None, max_tokens: int | None, world_size: int
) -> None:
    if (global_batch_size is None) == (max_tokens is None):
        raise ValueError(
            f"LengthBucketSampler got global_batch_size={short(global_batch_size)} and max_tokens={short(max_tokens)}: one of the "
            "two says how large a batch is.\nFix: leave out one, give the other"
        )
    if global_batch_size is not None:
        global_batch_size = require_int("global_batch_size", global_batch_size, at_least=1)
        if global_batch_size < world_size:
            raise ValueError(
                f"global_batch_size={global_batch_size} over {world_size} ranks: some would never have a sample of "
                f"their own.\nFix: global_batch_size={world_size} or more"
            )
    else:
        max_tokens = require_int("max_tokens", max_tokens, at_least=1)
        longest = int(lengths.argmax()) if lengths.size else 0
        length = int(lengths[longest]) if lengths.size else 0
        if max_tokens < max(1, length) * world_size:
            raise ValueError(
                f"max_tokens={max_tokens} over {world_size} ranks is {max_tokens // world_size} on each, and sample "
                f"{longest} has a length of {length}: it would not fit.\n"
                f"Fix: max_tokens={max(1, length) * world_size} or more, or shorten the samples"
            )


def _last_start(ends: list[int]) -> int:
    """Where the last of these batches begins."""
    return ends[-2] if len(ends) > 1 else 0

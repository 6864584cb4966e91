"""Batches that somebody else's sampler makes, dealt out to the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import torch

from phalanx.dist.arguments import require_flag, require_int, short
from phalanx.dist.epoch_sampler import EpochSampler
from phalanx.dist.epochs import sharded_part
from phalanx.dist.orders import draw_elements
from phalanx.dist.plan import Tail

# A sampler that goes on beyond this without having a length is taken for endless.
_ENDLESS = 1 << 24


class ShardBatchSampler(EpochSampler[Any]):
    """This rank's share of any sampler or batch sampler, from one draw that all ranks agree on.

    What the inner sampler yields in an epoch is drawn whole, with the global generators and its own
    ones at a key of ``(seed, epoch)`` and put back afterwards; it may be seeded otherwise on each rank.
    Then elements 0, world_size, 2 world_size, ... are rank 0's, and so on. ``set_epoch`` reaches the
    inner sampler and those inside it.

    Over a batch sampler it is a ``batch_sampler=``, over a sampler of items a ``sampler=``::

        batches = BatchSampler(RandomSampler(dataset), batch_size=64, drop_last=False)
        loader = DataLoader(dataset, batch_sampler=ShardBatchSampler(batches))

    >>> from torch.utils.data import BatchSampler
    >>> batches = BatchSampler(range(14), 3, drop_last=False)    # 0-2 | 3-5 | 6-8 | 9-11 | 12-13
    >>> [list(ShardBatchSampler(batches, rank, 2)) for rank in range(2)]
    [[[0, 1, 2], [6, 7, 8], [12]], [[3, 4, 5], [9, 10, 11], [13]]]

    *Equal counts.* Every rank yields equally many batches, however many the inner sampler makes, so
    that collectives match, and with ``tail="uneven"`` every item is there once all the same: batches
    left over are cut into one piece for each rank (where they hold fewer items than there are ranks,
    these are added to the last batches). Only an epoch with fewer items than ranks repeats some, so
    that no rank is without a batch. Items, unlike batches, cannot be cut: over a sampler of items the
    ranks' lengths differ by one with "uneven".

    *Length.* ``len`` is exact, that of the epoch under way or next: it counts what was drawn, since
    the inner sampler's own length may be missing, an upper bound, or change from epoch to epoch.

    Passes, epochs and `load_state_dict` are those of `ShardSampler`; ``consumed`` counts samples.

    Args:
        sampler: Anything that yields batches (lists, tuples, arrays) or items; not one rank's share.
        rank: Position in the data-parallel group, ``0 <= rank < world_size``. By default this
            process's, as is ``world_size``.
        world_size: Number of ranks in that group.
        split_batches: Each rank takes its part of every batch, items rank, rank + world_size, ...,
            instead of whole batches: the inner sampler's batches are steps of all ranks together.
        seed: Any integer, the same on every rank.
        tail: Batches left over (with ``split_batches``: items of a batch) when they are no multiple of
            ``world_size``: "uneven" shares them as above, "drop" leaves them out, "pad" repeats the
            first ones.
        epoch_length: Draw no more elements than that for an epoch. For samplers without an end.

    Raises:
        ValueError: The inner sampler gives one rank's share already, cannot be iterated, or goes on
            without an end; ``rank`` is outside the group.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        rank: int | None = None,
        world_size: int | None = None,
        *,
        split_batches: bool = False,
        seed: int = 0,
        tail: Tail = "uneven",
        epoch_length: int | None = None,
    ) -> None:
        _check_inner(sampler)
        if seed is None:
            raise ValueError("seed=None: ranks need a seed to draw alike.\nFix: seed=0")
        if epoch_length is not None:
            epoch_length = require_int("epoch_length", epoch_length, at_least=1)
        super().__init__(rank, world_size, seed=seed, tail=tail)
        self.sampler = sampler
        self.split_batches = require_flag("split_batches", split_batches)
        self._limit = epoch_length
        self._drawn: tuple[Any, list[Any]] | None = None
        self._dealt: tuple[Any, list[Any], list[int]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``; not needed, since passes count epochs themselves.

        The inner sampler is told when its epoch is drawn.
        """
        super().set_epoch(epoch)

    def _draw(self, epoch: int) -> list[Any]:
        """What the inner sampler yields in an epoch, batches as lists; the last draw is kept."""
        key = self.seed, epoch
        if self._drawn is None or self._drawn[0] != key:
            limit = self._limit
            if limit is None:
                known = len(self.sampler) if _has_length(self.sampler) else 0  # type: ignore[arg-type]
                limit = max(_ENDLESS, 2 * known) + 1
            drawn = draw_elements(self.sampler, self.seed or 0, epoch, limit)
            if self._limit is None and len(drawn) == limit:
                raise ValueError(
                    f"{type(self.sampler).__name__} gave more than {limit - 1} elements in epoch {epoch}: it seems to "
                    "have no end, and one draw for all ranks needs one.\nFix: epoch_length= (elements of an epoch)"
                )
            drawn = [list(element) if _is_batch(element) else element for element in drawn]
            self._drawn = key, _without_empty(drawn, type(self.sampler).__name__)
        return self._drawn[1]

    def _deal(self, epoch: int, start: int) -> tuple[list[Any], list[int]]:
        """This rank's elements after ``start`` samples, and the samples behind all ranks after each."""
        key = self.seed, epoch, start
        if self._dealt is None or self._dealt[0] != key:
            drawn = self._draw(epoch)
            first = _elements_behind(drawn, start)
            rounds = self._split(drawn[first:]) if self.split_batches else self._share(drawn[first:])
            mine, behind, total = [], [], start
            for element, count in rounds:
                total += count
                if element is not None:
                    mine.append(element)
                    behind.append(total)
            self._dealt = key, mine, behind
        return self._dealt[1], self._dealt[2]

    def _split(self, batches: list[Any]) -> list[tuple[Any, int]]:
        """This rank's part of each batch, with the samples that all parts hold."""
        rounds = []
        for batch in batches:
            if not isinstance(batch, list):
                raise ValueError(
                    f"split_batches=True, but {type(self.sampler).__name__} yields items ({batch!r}), not batches.\n"
                    "Fix: leave it out, or BatchSampler(sampler, batch_size, drop_last)"
                )
            part = batch[self.rank :: self.world_size]
            rest = len(batch) % self.world_size
            if self.tail == "drop":
                part = part[: len(batch) // self.world_size]
            elif not part or (self.tail == "pad" and self.rank >= rest > 0):
                part = [*part, batch[(self.rank - rest) % len(batch)]]
            rounds.append((part or None, len(batch)))
        return rounds

    def _share(self, elements: list[Any]) -> list[tuple[Any, int]]:
        """This rank's whole elements, with the samples of each round."""
        whole = len(elements) // self.world_size * self.world_size
        rounds = [
            (elements[first + self.rank], sum(map(_size, elements[first : first + self.world_size])))
            for first in range(0, whole, self.world_size)
        ]
        rest = elements[whole:]
        if not rest or self.tail == "drop":
            return rounds
        left_over = sum(map(_size, rest))
        if self.tail == "pad":
            rounds.append((elements[(whole + self.rank) % len(elements)], left_over))
        elif not isinstance(rest[0], list):
            if self.rank < len(rest):
                rounds.append((rest[self.rank], left_over))
        else:
            items = [item for batch in rest for item in batch]
            if left_over < self.world_size and rounds:
                last, count = rounds.pop()
                rounds.append(([*last, *items[self.rank : self.rank + 1]], count + left_over))
            else:
                first, stop = (left_over * place // self.world_size for place in (self.rank, self.rank + 1))
                rounds.append((items[first:stop] or [items[first % left_over]], left_over))
        return rounds

    def _count(self, epoch: int, start: int) -> int:
        return len(self._deal(epoch, start)[0])

    def _look_up(self, epoch: int, start: int, done: int, size: int) -> list[Any]:
        return self._deal(epoch, start)[0][done : done + size]

    def _consumed(self, epoch: int, start: int, handed_out: int) -> int:
        return self._deal(epoch, start)[1][handed_out - 1] if handed_out else start

    def _check_consumed(self, epoch: int, consumed: int) -> None:
        _elements_behind(self._draw(epoch), consumed)


def _check_inner(sampler: Any) -> None:
    name = type(sampler).__name__
    single = getattr(sampler, "ndim", 1) == 0  # a tensor without dims has __iter__ all the same
    if not hasattr(sampler, "__iter__") or isinstance(sampler, (str, bytes, dict)) or single:
        raise ValueError(
            f"sampler={short(sampler)} is no sampler: it yields no indices.\nFix: a torch Sampler or BatchSampler"
        )
    if hasattr(sampler, "__next__"):
        raise ValueError(
            f"sampler is a {name}, which can be gone through once: the second epoch would be empty.\n"
            "Fix: an object whose __iter__ starts anew, as a torch Sampler's does"
        )
    part = sharded_part(sampler)
    if part is not None:
        inside = "" if part is sampler else f" (its {type(part).__name__})"
        raise ValueError(
            f"sampler={name}{inside} gives one rank's share already, and would be shared again: with W ranks each "
            "would see 1/W of 1/W of the data.\n"
            "Fix: use it as it is, or give ShardBatchSampler the sampler that knows nothing of ranks"
        )


def _has_length(sampler: Any) -> bool:
    if not isinstance(sampler, Sized):
        return False
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        return False
    return True


def _is_batch(element: Any) -> bool:
    if isinstance(element, (np.ndarray, torch.Tensor)):
        return element.ndim > 0
    return isinstance(element, (list, tuple))


def _size(element: Any) -> int:
    return len(element) if isinstance(element, list) else 1


def _without_empty(drawn: list[Any], name: str) -> list[Any]:
    kinds = {isinstance(element, list) for element in drawn}
    if len(kinds) > 1:
        raise ValueError(
            f"{name} yields both batches and single items: how to share them is unclear.\nFix: one of the two"
        )
    return [element for element in drawn if not (isinstance(element, list) and not element)]


def _elements_behind(drawn: list[Any], consumed: int) -> int:
    """How many elements hold the first ``consumed`` samples."""
    if drawn and not isinstance(drawn[0], list):
        behind, total = consumed, len(drawn)
    else:
        ends = np.cumsum([0, *map(len, drawn)])
        behind, total = int(np.searchsorted(ends, consumed)), int(ends[-1])
        if consumed <= total and ends[behind] != consumed:
            raise ValueError(
                f"the state has {consumed} samples of an epoch behind it, which is no whole number of batches (the "
                f"nearest are {ends[behind - 1]} and {ends[behind]}): samples would be repeated or left out.\n"
                "Fix: the sampler and batch size that the state was taken with"
            )
    if consumed > total:
        raise ValueError(
            f"the state has {consumed} samples of an epoch behind it, an epoch here has {total}: it is another "
            "dataset, or the samples were counted over several epochs."
        )
    return behind

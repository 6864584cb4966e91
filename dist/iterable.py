"""Streams shared among ranks and the DataLoader workers of each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from phalanx.dist.arguments import require_int
from phalanx.dist.epoch_sampler import read_state, resolve_rank
from phalanx.dist.epochs import nested_parts, sharded_part
from phalanx.dist.keys import derive_key, generator_states, reseed, restore_generator_states
from phalanx.dist.plan import Tail, require_seed, require_tail

_MAX_WORKERS = 1024
_EPOCH, _CONSUMED, _PASSES = (
    0,
    1,
    2,
)  # in the memory shared with workers; from _PASSES on one count for each worker


def shard_iterable(
    iterable: Iterable[Any],
    rank: int | None = None,
    world_size: int | None = None,
    *,
    batch_size: int = 1,
    seed: int | None = 0,
    tail: Tail = "uneven",
) -> ShardIterable:
    """This rank's share of a stream: every element once over all ranks and all DataLoader workers.

    What comes out is an IterableDataset. Each rank, and each worker of it, goes through the whole
    stream and keeps its own elements: rank r those at r, r + world_size, ... Give the DataLoader's
    ``batch_size`` here too, and a rank's batches are the same for any ``num_workers``::

        dataset = shard_iterable(lines, batch_size=32)
        loader = DataLoader(dataset, batch_size=32, num_workers=4, persistent_workers=True)

    >>> [list(shard_iterable("abcdefg", rank, 3)) for rank in range(3)]
    [['a', 'd', 'g'], ['b', 'e'], ['c', 'f']]
    >>> [list(shard_iterable("abcdefg", rank, 3, tail="drop")) for rank in range(3)]
    [['a', 'd'], ['b', 'e'], ['c', 'f']]

    *Equal counts.* With "uneven" lengths differ by one, which hangs a loop with collectives; "drop" and
    "pad" give every rank equally many, without asking the others and without knowing the stream's
    length: a rank looks as far ahead as the round that its element belongs to.

    *Randomness.* A stream that shuffles itself has to be the same in every process. It is run while the
    global generators of torch, random and numpy stand at a key of (seed, epoch), which are put back
    around each batch; ``seed=None`` leaves that out (a few ten microseconds a batch) for a stream without
    random numbers. Its ``set_epoch`` is called, where it has one. It must not share itself among ranks;
    while it is run in a worker, torch's ``get_worker_info()`` says None, so that it does not share itself
    among workers either.

    *Resuming.* ``dataset.state_dict(consumed)`` and ``load_state_dict``: ``consumed`` counts elements over
    all ranks in this epoch, after k whole batches on each rank ``k * batch_size * world_size``. Any
    number of ranks and workers can go on from there; the elements before it are read and thrown away.
    Each pass is the next epoch. Offset and epoch are kept in memory shared with the workers, also with
    persistent ones: a resumed pass is the rest of its epoch, later passes are whole.

    Args:
        iterable: An IterableDataset, a list, any object whose ``__iter__`` starts anew; the same
            stream on every rank.
        rank: Position in the data-parallel group, ``0 <= rank < world_size``. By default this
            process's, as is ``world_size``.
        world_size: Number of ranks in that group.
        batch_size: Elements of a rank that go to one worker in a row: the DataLoader's batch size.
        seed: Any integer, the same on every rank; None for a stream that draws no random numbers.
        tail: The round at the end that has fewer elements than ranks: "uneven" gives them to the first
            ranks, "drop" leaves them out, "pad" repeats the stream's first elements.

    Raises:
        ValueError: An iterator (it can be gone through once), a map-style dataset, a stream that is one
            rank's share already, a number out of range.
    """
    return ShardIterable(iterable, rank, world_size, batch_size=batch_size, seed=seed, tail=tail)


class ShardIterable(IterableDataset[Any]):
    """What `shard_iterable` returns."""

    is_sharded = True
    reaches_workers = True  # set_epoch and load_state_dict are seen by workers that live already

    def __init__(
        self,
        iterable: Iterable[Any],
        rank: int | None,
        world_size: int | None,
        *,
        batch_size: int,
        seed: int | None,
        tail: Tail,
    ) -> None:
        _check_stream(iterable)
        self.batch_size = require_int("batch_size", batch_size, at_least=1)
        require_tail(tail)
        self.seed = None if seed is None else require_seed(seed)
        self.rank, self.world_size = resolve_rank("shard_iterable", rank, world_size)
        self.iterable = iterable
        self.tail = tail
        self._shared = torch.zeros(_PASSES + _MAX_WORKERS, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._handed_out: int | None = None  # by this process in the pass under way
        self._ended = False  # that pass

    def __len__(self) -> int:
        """Elements of a whole epoch on this rank.

        Raises:
            TypeError: The stream has no length.
        """
        if not isinstance(self.iterable, Sized):
            raise TypeError(f"{type(self.iterable).__name__} has no len(): how many elements come is unknown")
        count = len(self.iterable)
        if self.tail == "uneven":
            return max(0, -(-(count - self.rank) // self.world_size))
        return count // self.world_size if self.tail == "drop" else -(-count // self.world_size)

    @property
    def epoch(self) -> int:
        """The epoch of the pass begun last, or of the next one after `set_epoch` or `load_state_dict`."""
        return int(self._shared[_EPOCH]) + max(0, int(self._shared[_PASSES:].max()) - 1)

    def __iter__(self) -> Iterator[Any]:
        # No generator function: the pass is counted now, not at the first element.
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if workers > _MAX_WORKERS:
            raise ValueError(f"num_workers={workers}: shard_iterable knows at most {_MAX_WORKERS}.")
        passes = int(self._shared[_PASSES + worker])
        self._shared[_PASSES + worker] = passes + 1
        epoch = int(self._shared[_EPOCH]) + passes
        start = int(self._shared[_CONSUMED]) if passes == 0 else 0
        if info is None:
            self._handed_out, self._ended = 0, False
        return self._elements(epoch, start, worker, workers)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``; not needed, since passes count epochs themselves.

        Called with the epoch that a restored run stands in, it keeps the position within it.
        """
        require_int("epoch", epoch, at_least=0)
        begun = bool(self._shared[_PASSES:].any())
        if begun or epoch != int(self._shared[_EPOCH]):
            self._place(epoch, 0)

    def state_dict(self, consumed: int | None = None) -> dict[str, int | None]:
        """``{"seed", "epoch", "consumed"}``, free of the numbers of ranks and workers.

        Args:
            consumed: Elements of this epoch trained on by all ranks together. Workers draw ahead, so
                only without workers it can be left out.

        Raises:
            ValueError: ``consumed`` is missing, and workers have made the batches.
        """
        if consumed is None:
            begun = bool(self._shared[_PASSES:].any())
            if begun and self._handed_out is None:
                raise ValueError(
                    "state_dict() of a stream read by workers: how many of their elements were trained on is known to "
                    "the loop alone.\nFix: state_dict(consumed=batches * batch_size * world_size)"
                )
            if self._ended:
                return {"seed": self.seed, "epoch": self.epoch + 1, "consumed": 0}
            start = int(self._shared[_CONSUMED]) if int(self._shared[_PASSES]) <= 1 else 0
            consumed = start + (self._handed_out or 0) * self.world_size
        require_int("consumed", consumed, at_least=0)
        return {"seed": self.seed, "epoch": self.epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, on any number of ranks and workers.

        Raises:
            ValueError: ``state`` lacks a field, or its seed is another one.
        """
        seed, epoch, consumed = read_state("ShardIterable", state)
        if seed != self.seed:
            raise ValueError(
                f"the state was taken with seed={seed}, this stream has seed={self.seed}: the rest of its order would "
                f"be another one.\nFix: shard_iterable(..., seed={seed})"
            )
        self._place(epoch, consumed)

    def _place(self, epoch: int, consumed: int) -> None:
        self._shared[_PASSES:] = 0
        self._shared[_EPOCH], self._shared[_CONSUMED] = epoch, consumed
        self._handed_out, self._ended = None, False

    def _elements(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Any]:
        # The last batch may be short, while its consumed samples were counted as if it were not.
        stream = _SameStream(self.iterable, self.seed, epoch, slack=self.batch_size * self.world_size)
        counted = int(self._shared[_PASSES + worker])
        rounds = _rounds(stream.elements(start), self.rank, self.world_size, self.tail)
        mine = islice(rounds, worker * self.batch_size, None)
        while True:
            with stream.running():
                block = list(islice(mine, self.batch_size))
            for element in block:
                if self._handed_out is not None:
                    self._handed_out += 1
                yield element
            if len(block) < self.batch_size:
                self._ended = counted == int(self._shared[_PASSES + worker])
                return
            if workers > 1:
                with stream.running():
                    _skip(mine, (workers - 1) * self.batch_size)


class _SameStream:
    """A stream that is the same in every process: run under generators of its own."""

    def __init__(self, iterable: Iterable[Any], seed: int | None, epoch: int, slack: int) -> None:
        self._iterable = iterable
        self._epoch = epoch
        self._slack = slack
        self._states: tuple[Any, ...] | None = None
        self._key = None if seed is None else derive_key(seed, epoch, "stream")

    def elements(self, start: int) -> Iterator[Any]:
        """All elements after the first ``start``; to be drawn inside `running` only."""
        for part in nested_parts(self._iterable):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(self._epoch)
        elements = iter(self._iterable)
        skipped = _skip(elements, start)
        if start - skipped >= self._slack:
            raise ValueError(
                f"the state has {start} elements of an epoch behind it, the stream ended after {skipped}: it is "
                "another stream, or the elements were counted over several epochs."
            )
        yield from elements

    @contextmanager
    def running(self) -> Iterator[None]:
        """The generators are the stream's inside, the caller's outside; no worker is seen inside."""
        if self._key is None:
            with _no_worker():
                yield
            return
        outside = generator_states()
        if self._states is None:
            reseed(self._key, cuda=False)
        else:
            restore_generator_states(self._states)
        try:
            with _no_worker():
                yield
            self._states = generator_states()
        finally:
            restore_generator_states(outside)


def _rounds(elements: Iterator[Any], rank: int, world_size: int, tail: Tail) -> Iterator[Any]:
    """This rank's element of each ``world_size`` elements."""
    first: list[Any] | None = None
    while True:
        if tail == "uneven":  # no further than to its own
            mine = list(islice(elements, rank, rank + 1))
            yield from mine
            if not mine:
                return
            _skip(elements, world_size - rank - 1)
            continue
        row = list(islice(elements, world_size))
        if first is None:
            first = row
        if len(row) == world_size:
            yield row[rank]
            continue
        if row and tail == "pad":
            yield row[rank] if rank < len(row) else first[(rank - len(row)) % len(first)]
        return


def _skip(elements: Iterator[Any], count: int) -> int:
    """Throw away up to ``count`` elements; how many there were."""
    return sum(1 for _ in islice(elements, count))


@contextmanager
def _no_worker() -> Iterator[None]:
    """``get_worker_info()`` is None inside: a stream that shares itself among workers must not do so as well."""
    module = sys.modules.get("torch.utils.data._utils.worker")
    info = getattr(module, "_worker_info", None)
    if info is None:
        yield
        return
    setattr(module, "_worker_info", None)  # noqa: B010  torch has no public way; absent, nothing is changed
    try:
        yield
    finally:
        setattr(module, "_worker_info", info)  # noqa: B010


def _check_stream(iterable: Any) -> None:
    name = type(iterable).__name__
    if not hasattr(iterable, "__iter__") or getattr(iterable, "ndim", 1) == 0:
        map_style = hasattr(iterable, "__getitem__")
        fix = "a map-style dataset goes into ShardLoader" if map_style else "an object with __iter__"
        raise ValueError(f"iterable={name} has no __iter__: it is no stream.\nFix: {fix}")
    if hasattr(iterable, "__next__"):
        raise ValueError(
            f"iterable is a {name}, which can be gone through once: the second epoch would be empty.\n"
            "Fix: an object whose __iter__ starts anew, such as an IterableDataset"
        )
    if any(getattr(part, "is_sharded", False) for part in nested_parts(iterable)) or sharded_part(iterable):
        raise ValueError(
            f"iterable={name} is one rank's share already, and would be shared again: with W ranks each would see "
            "1/W of 1/W of the stream.\nFix: use it as it is, or give shard_iterable the whole stream"
        )

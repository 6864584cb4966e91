"""Do loader workers, ranks and epochs draw random numbers apart from each other?

torch seeds its workers apart. A ``worker_init_fn`` that seeds each with one constant undoes that, and a generator that
the dataset holds is copied into each worker as it stands: all of them then augment with the same numbers. So do ranks
that were seeded alike.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data import _utils as torch_data

from phalanx.dist.batches import BatchQueue, KeyedDataset
from phalanx.dist.draw_warnings import warn_of_passes, warn_of_ranks, warn_of_workers
from phalanx.dist.epochs import nested_parts
from phalanx.dist.membership import membership_in_force
from phalanx.dist.random_streams import global_streams, own_streams

#: (generator, where it stood before the first batch, and after it): who has the same draws the same numbers. After
#: counts as well, since a dataset may reseed its generator for each sample, and stands at one place before.
Draw = tuple[str, str, str]

_SLOT = 2048  # bytes for a worker's report
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

_passes: weakref.WeakKeyDictionary[Any, list[dict[int, list[Draw]]]] = weakref.WeakKeyDictionary()


def watch_workers() -> None:
    """Warn, once for each DataLoader, when workers, ranks or epochs draw the same random numbers.

    `init_world` calls it, and `ShardLoader`. Looked at is the first batch of each worker in the first two passes: about
    0.2 ms of each worker's start, nothing afterwards.
    """
    original = getattr(DataLoader, "_get_iterator", None)
    if original is None or getattr(original, "watched_by_phalanx", False):
        return

    @functools.wraps(original)
    def watched(self: DataLoader[Any]) -> Any:
        try:
            passes = _passes.setdefault(self, [])
        except TypeError:  # a DataLoader of the user's own making, without a hash
            return original(self)
        if len(passes) >= 2:
            return original(self)
        return _watch_ranks(self, original) if self.num_workers == 0 else _watch_workers(self, original)

    watched.watched_by_phalanx = True  # type: ignore[attr-defined]
    DataLoader._get_iterator = watched  # type: ignore[method-assign]


def _watch_ranks(loader: DataLoader[Any], make: Callable[[Any], Any]) -> Any:
    """Without workers: only other ranks can have the same numbers."""
    iterator = make(loader)
    current = membership_in_force()
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if current is None or current.world.world_size == 1 or fetcher is None or _passes[loader]:
        return iterator
    _passes[loader].append({})
    dataset = loader.dataset
    keyed = isinstance(dataset, KeyedDataset)
    users, collate_fn = dataset.dataset if isinstance(dataset, KeyedDataset) else dataset, loader.collate_fn
    kind, known = type(fetcher), weakref.ref(loader)

    def first(indices: Any) -> Any:
        del fetcher.fetch
        look = _Look(users, collate_fn, keyed)  # not sooner: the sampler has drawn its seed meanwhile
        batch = kind.fetch(fetcher, indices)
        _judge_ranks(known(), {0: look.drawn()})
        return batch

    fetcher.fetch = first
    return iterator


def _watch_workers(loader: DataLoader[Any], make: Callable[[Any], Any]) -> Any:
    try:
        board = _Board(loader.num_workers)
    except OSError:  # no shared memory: the workers will say so better
        return make(loader)
    given = loader.worker_init_fn
    loader.worker_init_fn = _Reporting(
        given, board, loader.collate_fn, isinstance(loader.dataset, KeyedDataset)
    )
    try:
        iterator = make(loader)
    finally:
        loader.worker_init_fn = given
    known = weakref.ref(loader)
    _after_batches(iterator, loader.num_workers, lambda: _judge(known(), board.read()))
    return iterator


def _after_batches(iterator: Any, count: int, then: Callable[[], None]) -> None:
    """Call ``then`` once ``count`` batches have come: batches come from the workers in turn."""
    if not hasattr(type(iterator), "_next_data"):
        return
    kind, known = type(iterator), weakref.ref(iterator)  # a cycle would keep workers that nobody waits for
    left = count

    def counted() -> Any:
        nonlocal left
        here = known()
        left -= 1
        try:
            return kind._next_data(here)
        except StopIteration:
            left = 0
            raise
        finally:
            if left <= 0:
                here.__dict__.pop("_next_data", None)
                then()

    iterator._next_data = counted


class _Board:
    """A page of memory shared with the workers, on which each leaves its report."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._memory = multiprocessing.RawArray("c", workers * _SLOT)

    def write(self, worker: int, drawn: list[Draw]) -> None:
        text = json.dumps(drawn).encode()
        while len(text) > _SLOT:
            drawn = drawn[:-1]
            text = json.dumps(drawn).encode()
        self._memory[worker * _SLOT : worker * _SLOT + len(text)] = text

    def read(self) -> dict[int, list[Draw]]:
        """The reports of the workers that have left one."""
        content = self._memory.raw
        texts = {
            each: content[each * _SLOT : (each + 1) * _SLOT].rstrip(b"\0") for each in range(self._workers)
        }
        return {worker: [tuple(draw) for draw in json.loads(text)] for worker, text in texts.items() if text}


class _Reporting:
    """First call of a worker: the user's own ``worker_init_fn``, then a look at the generators around the first batch."""

    def __init__(
        self, then: Callable[[int], None] | None, board: _Board, collate_fn: Any, keyed: bool
    ) -> None:
        self._then, self._board, self._collate_fn, self._keyed = then, board, collate_fn, keyed

    def __call__(self, worker: int) -> None:
        if self._then is not None:
            self._then(worker)
        info = get_worker_info()
        assert info is not None
        look = _Look(info.dataset, self._collate_fn, self._keyed)
        fetchers = torch_data.fetch._MapDatasetFetcher, torch_data.fetch._IterableDatasetFetcher
        originals = {kind: kind.fetch for kind in fetchers}

        def first(fetcher: Any, indices: Any) -> Any:
            for kind, original in originals.items():
                kind.fetch = original  # type: ignore[method-assign]
            batch = fetcher.fetch(indices)
            self._board.write(worker, look.drawn())
            return batch

        for kind in fetchers:
            kind.fetch = first  # type: ignore[method-assign]


class _Look:
    """A look at the generators before a batch is fetched, and one after it.

    Args:
        dataset: The user's.
        collate_fn: What makes a batch of its samples.
        keyed: The global generators are reseeded for each sample: their positions say nothing.
    """

    def __init__(self, dataset: Any, collate_fn: Any, keyed: bool) -> None:
        self._roots, self._keyed = {"dataset": dataset, "collate_fn": collate_fn}, keyed
        self._before = self._positions()

    def drawn(self) -> list[Draw]:
        """The generators that stand elsewhere now; one that was made since counts as well."""
        after = self._positions()
        pairs = [(name, self._before.get(name, "not made yet"), position) for name, position in after.items()]
        return [draw for draw in pairs if draw[1] != draw[2]]

    def _positions(self) -> dict[str, str]:
        streams = own_streams(self._roots) if self._keyed else [*global_streams(), *own_streams(self._roots)]
        return {stream.name: stream.position() for stream in streams}


def _judge(loader: DataLoader[Any] | None, reports: dict[int, list[Draw]]) -> None:
    """Warn of what the workers' first batches have in common with each other's, an earlier pass's, another rank's."""
    if loader is None:
        return
    passes = _passes[loader]
    earlier = passes[-1] if passes else None
    passes.append(reports)
    if earlier is None:
        alike = _alike(reports)
        if alike is not None:
            warn_of_workers(loader, *alike)
        else:
            _judge_ranks(loader, reports)
    elif _shuffles(loader):
        known = {draw for drawn in earlier.values() for draw in drawn}
        again = [draw[0] for drawn in reports.values() for draw in drawn if draw in known]
        if again and _alike(earlier) is None:
            warn_of_passes(loader, again[0])


def _alike(reports: dict[int, list[Draw]]) -> tuple[str, list[int]] | None:
    """A generator from which several workers have drawn the same, and these workers."""
    workers_by_draw: dict[Draw, list[int]] = {}
    for worker, drawn in reports.items():
        for draw in drawn:
            workers_by_draw.setdefault(draw, []).append(worker)
    groups = [(draw[0], workers) for draw, workers in workers_by_draw.items() if len(workers) > 1]
    return max(groups, key=lambda group: len(group[1]), default=None)


def _judge_ranks(loader: DataLoader[Any] | None, reports: dict[int, list[Draw]]) -> None:
    """Warn when another rank has drawn the same. Nobody waits: each draw is noted in the store by who comes first."""
    current = membership_in_force()
    if loader is None or current is None or current.store is None or current.world.world_size == 1:
        return
    mine = str(current.world.rank)
    for drawn in reports.values():
        for draw in drawn:
            first = mine
            with contextlib.suppress(RuntimeError, NotImplementedError):  # the store has gone with rank 0
                first = current.store.compare_set("draws/" + "/".join(draw), "", mine).decode()
            if first != mine:
                warn_of_ranks(loader, draw[0], int(mine), int(first))
                return


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Whether it trains: an evaluation may want the same numbers in each pass."""
    return any(
        isinstance(part, _SHUFFLING)
        or bool(getattr(part, "shuffle", False))
        or (isinstance(part, BatchQueue) and part.share is not None and part.share.stand_ins)
        for part in nested_parts(loader, datasets=False)
    )

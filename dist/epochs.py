"""What a loader is made of, and telling all of it which epoch it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from phalanx.dist.arguments import require_int, short

_logger = logging.getLogger(__name__)

# Where loaders, samplers and datasets of torch, Accelerate, Lightning and of users keep what they wrap.
_SAMPLERS = ("sampler", "batch_sampler", "base_sampler", "_sampler")
_LOADERS = ("base_dataloader", "dataloader", "loader")
_DATASETS = ("dataset", "datasets", "iterable")
_MAX_PARTS = 10_000  # a ConcatDataset may be long, a chain without an end is somebody's __getattr__


def nested_parts(outer: Any, *, datasets: bool = True) -> Iterator[Any]:
    """An object and the samplers, loaders and datasets inside it, at any depth, each once, outermost first."""
    names = (*_SAMPLERS, *_LOADERS, *(_DATASETS if datasets else ()))
    waiting, seen = [outer], {id(outer)}
    while waiting and len(seen) < _MAX_PARTS:
        part = waiting.pop(0)
        yield part
        for name in names:
            inner = _attribute(part, name)
            for each in _each(inner):
                if id(each) not in seen:
                    seen.add(id(each))
                    waiting.append(each)


def set_epoch(loader: Any, epoch: int) -> int:
    """Tell a loader, and every sampler and dataset inside it, which epoch comes next.

    torch's loop reaches ``loader.sampler`` alone: a sampler inside a batch sampler is never told, and
    gives the same order each epoch. Here everything that has a ``set_epoch`` is called: the loader
    itself, ``sampler``, ``batch_sampler``, those inside them, and the dataset with what it wraps.

    >>> from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    >>> loader = DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    >>> set_epoch(loader, 3)
    1
    >>> sampler.epoch
    3

    Args:
        loader: A DataLoader, a ShardLoader, a sampler, or what wraps them.
        epoch: From 0.

    Returns:
        How many objects were told; 0 means that nothing in this loader knows of epochs.

    Raises:
        ValueError: ``epoch`` is negative or no integer, or ``loader`` is a plain value.
    """
    epoch = require_int("epoch", epoch, at_least=0)
    if isinstance(loader, str | bytes | int | float | complex | type):
        raise ValueError(
            f"set_epoch({short(loader)}, ...): no loader, sampler or dataset.\nFix: set_epoch(loader, epoch)"
        )
    told = 0
    for part in nested_parts(loader):
        tell = _attribute(part, "set_epoch")
        if callable(tell):
            tell(epoch)
            told += 1
    _warn_of_workers(loader)
    return told


def sharded_part(sampler: Any) -> Any | None:
    """The sampler, or one inside it, that gives one rank's share alone; None when there is none.

    Recognised are ours, whatever has torch's ``num_replicas``, and Accelerate's ``num_processes``, for
    more than one rank.
    """
    for part in nested_parts(sampler, datasets=False):
        ours = bool(_attribute(part, "is_sharded")) and _attribute(part, "world_size") != 1
        ranks = [_attribute(part, name) for name in ("num_replicas", "num_processes")]
        if ours or any(isinstance(count, int) and count > 1 for count in ranks):
            return part
    return None


def _warn_of_workers(loader: Any) -> None:
    """Persistent workers hold copies of the dataset, which no call in this process reaches."""
    if not _attribute(loader, "persistent_workers") or _attribute(loader, "_iterator") is None:
        return
    for part in nested_parts(_attribute(loader, "dataset")):
        if callable(_attribute(part, "set_epoch")) and not _attribute(part, "reaches_workers"):
            _logger.warning(
                "%s.set_epoch was called here, but the loader's persistent workers hold copies of it that go on "
                "with the old epoch.\nFix: persistent_workers=False, or shard_iterable for an iterable dataset",
                type(part).__name__,
            )
            return
        if _attribute(part, "reaches_workers"):
            return


def _each(inner: Any) -> list[Any]:
    if inner is None or isinstance(inner, (str, bytes, int, float)):
        return []
    if isinstance(inner, dict):
        return list(inner.values())
    return list(inner) if isinstance(inner, (list, tuple)) else [inner]


def _attribute(part: Any, name: str) -> Any:
    try:
        return getattr(part, name, None)
    except Exception:  # somebody's property that cannot be read now is no part
        return None

"""Does the order change from epoch to epoch? torch's DistributedSampler repeats itself unless it is told the epoch."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

_finished: weakref.WeakKeyDictionary[Any, int] = (
    weakref.WeakKeyDictionary()
)  # the epoch of each sampler's last whole pass
_said: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_orders() -> None:
    """Warn, once for each DistributedSampler, when a whole pass is followed by one in the same order. `init_world` calls it."""
    original = DistributedSampler.__iter__
    if getattr(original, "watched_by_phalanx", False):
        return

    @functools.wraps(original)
    def watched(self: Any) -> Iterator[Any]:
        if self.shuffle and _finished.get(self) == self.epoch and self not in _said and len(self) > 1:
            _said.add(self)
            warnings.warn(
                f"DistributedSampler: this pass has the order of the last one, that of epoch {self.epoch}: nobody has called "
                "set_epoch, and every epoch trains on the same batches. Fix: sampler.set_epoch(epoch) before each epoch, or "
                "ShardLoader, which counts epochs itself",
                stacklevel=2,
            )
        return _counted(self, original(self))

    watched.watched_by_phalanx = True  # type: ignore[attr-defined]
    DistributedSampler.__iter__ = watched  # type: ignore[method-assign]


def _counted(sampler: Any, items: Iterator[Any]) -> Iterator[Any]:
    epoch = sampler.epoch
    yield from items
    _finished[sampler] = epoch

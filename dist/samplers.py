"""Which indices of a dataset belong to this rank, for a plain DataLoader."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from phalanx.dist.permutation import Indices
from phalanx.dist.plan import Tail, epoch_order, require_int, require_tail

_logger = logging.getLogger(__name__)

_FIRST_BLOCK = 256  # the first index comes at once
_LARGEST_BLOCK = 1 << 15  # beyond, a block leaves the cache


class ShardSampler(Sampler[int]):
    """This rank's share of a dataset, in an order that all ranks agree on.

    The order depends on ``(seed, epoch)`` alone; the global RNG is left untouched. Rank r takes
    positions r, r + world_size, ... For 10 items on 4 ranks, unshuffled::

        tail="uneven"  0 4 8 | 1 5 9 | 2 6   | 3 7      every item once (default)
        tail="drop"    0 4   | 1 5   | 2 6   | 3 7      equal steps, 2 items unseen
        tail="pad"     0 4 8 | 1 5 9 | 2 6 0 | 3 7 1    equal steps, 2 items seen twice

    It goes into a plain DataLoader, and neither its memory nor the time to its first index grows with
    ``num_items``::

        sampler = ShardSampler(len(dataset), seed=0)
        loader = DataLoader(dataset, batch_size=64, sampler=sampler)

    *Epochs.* Each pass is the next epoch, in an order of its own, whether or not ``set_epoch`` is
    called; leaving a pass early ends its epoch too. After `load_state_dict` the first pass is the rest
    of the interrupted one, later passes are whole.

    *Uneven shares.* The ranks' lengths differ by one at most. A training step with collectives needs
    equally many batches on each: take "drop" or "pad" there, or a ShardLoader, which has the rule for
    uneven ones.

    Args:
        num_items: Dataset length, the same on every rank.
        rank: Position in the data-parallel group, ``0 <= rank < world_size``. By default this
            process's, as is ``world_size``.
        world_size: Number of ranks in that group.
        shuffle: False keeps dataset order.
        seed: The same on every rank, or shards overlap. None keeps dataset order.
        tail: What to do when ``num_items`` is not a multiple of ``world_size``.

    Raises:
        ValueError: ``rank`` is outside the group, ``tail`` is unknown, or a number is none.
    """

    is_sharded = True  # ShardLoader refuses to share it again

    def __init__(
        self,
        num_items: int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        shuffle: bool = True,
        seed: int | None = 0,
        tail: Tail = "uneven",
    ) -> None:
        if hasattr(num_items, "__len__"):
            raise ValueError(
                f"num_items is a {type(num_items).__name__}, a number is needed.\nFix: ShardSampler(len(dataset), ...)"
            )
        require_int("num_items", num_items, at_least=0)
        require_tail(tail)
        if seed is not None:
            require_int("seed", seed, at_least=-(1 << 63))
        if (rank is None) != (world_size is None):
            raise ValueError(
                f"ShardSampler got rank={rank} and world_size={world_size}: one without the other.\n"
                "Fix: both, or neither (the current world's)"
            )
        if rank is None or world_size is None:
            from phalanx.dist.world import world_or_single

            world = world_or_single()
            rank, world_size = world.rank, world.world_size
        require_int("world_size", world_size, at_least=1)
        require_int("rank", rank, at_least=0)
        if rank >= world_size:
            raise ValueError(
                f"rank={rank} is outside of a group of {world_size} ranks (0 to {world_size - 1}): some items would "
                "never be seen."
            )
        self.num_items, self.rank, self.world_size = int(num_items), int(rank), int(world_size)
        self.shuffle, self.tail = shuffle, tail
        self.seed = None if seed is None else int(seed)
        self._epoch = 0
        self._start = 0  # global samples of this epoch consumed before the pass under way
        self._handed_out = 0  # by this rank in this pass, in blocks that are done
        self._block: Iterator[int] = iter(())  # the rest of the block under way
        self._pass: object | None = None  # the pass under way
        self._finished: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way, or of the next one."""
        return self._epoch

    def __len__(self) -> int:
        """Indices of a whole epoch on this rank; a pass after `load_state_dict` may be shorter."""
        return self._count(0)

    def __iter__(self) -> Iterator[int]:
        if self._pass is not None:
            self._next_epoch()
        token = self._pass = object()
        epoch, start = self._epoch, self._start
        count = self._count(start)
        done, size = 0, _FIRST_BLOCK
        while done < count:
            size = min(size, count - done)
            block = iter(self._look_up(epoch, start, done, size))
            done += size
            if self._pass is token:
                # The place within the block is asked of the list's own iterator: the loop below is C.
                self._handed_out, self._block = done, block
            yield from block
            size = min(size * 2, _LARGEST_BLOCK)
        if self._pass is token:
            self._finished = epoch
            self._next_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``; not needed, since passes count epochs themselves.

        Called with the epoch that a restored run stands in, it keeps the position within it.
        """
        require_int("epoch", epoch, at_least=0)
        if epoch == self._finished and self.shuffle and self.seed is not None:
            _logger.warning("epoch %d is about to run again, in the same order", epoch)
        if epoch != self._epoch or self._pass is not None:
            self._epoch, self._start = epoch, 0
        self._rewind()

    def state_dict(self, consumed: int | None = None) -> dict[str, int | None]:
        """``{"seed", "epoch", "consumed"}``, free of the world size.

        Args:
            consumed: Samples of this epoch trained on by all ranks together. By default those handed
                out, which counts batches that DataLoader workers have drawn ahead: with workers, say
                how many were trained on, or use a ShardLoader.
        """
        if consumed is None:
            handed_out = self._handed_out - length_hint(self._block)
            consumed = min(self._start + handed_out * self.world_size, self.num_items)
        require_int("consumed", consumed, at_least=0)
        return {"seed": self.seed, "epoch": self._epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, on any number of ranks: its seed and order are taken over.

        Raises:
            ValueError: ``state`` lacks a field or is of a larger dataset.
        """
        missing = [name for name in ("seed", "epoch", "consumed") if name not in state]
        if missing:
            raise ValueError(
                f"a ShardSampler's state needs seed, epoch and consumed: {', '.join(missing)} missing."
            )
        require_int("epoch", state["epoch"], at_least=0)
        require_int("consumed", state["consumed"], at_least=0)
        if state["consumed"] > self.num_items:
            raise ValueError(
                f"the state has {state['consumed']} samples of an epoch behind it, this dataset has "
                f"{self.num_items}: it is another dataset, or the samples were counted over several epochs."
            )
        self.seed, self._epoch, self._start = state["seed"], state["epoch"], state["consumed"]
        self._finished = None
        self._rewind()

    def _count(self, start: int) -> int:
        """Indices of this rank when ``start`` samples of the epoch are behind it."""
        rest = self.num_items - start
        if self.tail == "uneven":
            return max(0, -(-(rest - self.rank) // self.world_size))
        return rest // self.world_size if self.tail == "drop" else -(-rest // self.world_size)

    def _look_up(self, epoch: int, start: int, done: int, size: int) -> list[int]:
        first = start + self.rank + done * self.world_size
        positions: Indices = np.arange(first, first + size * self.world_size, self.world_size, dtype=np.int64)
        if self.tail == "pad":
            positions %= self.num_items
        if self.shuffle and self.seed is not None:
            positions = epoch_order(self.num_items, self.seed, epoch).take(positions)
        indices: list[int] = positions.tolist()
        return indices

    def _next_epoch(self) -> None:
        self._epoch, self._start = self._epoch + 1, 0
        self._rewind()

    def _rewind(self) -> None:
        self._pass, self._handed_out, self._block = None, 0, iter(())

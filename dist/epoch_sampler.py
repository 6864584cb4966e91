"""What every sampler for ranks has: epochs that count themselves, and a position free of the world size."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Sampler

from phalanx.dist.arguments import require_int, short
from phalanx.dist.permutation import Indices
from phalanx.dist.plan import Tail, require_seed, require_tail

_logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_BLOCK = 256  # the first index comes at once
_LARGEST_BLOCK = 1 << 15  # beyond, a block leaves the cache


def resolve_rank(name: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This rank and the number of ranks: as given, or those of the current world.

    Raises:
        ValueError: One without the other, a number out of range, a rank outside of the group.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"{name} got rank={short(rank)} and world_size={short(world_size)}: one without the other.\n"
            "Fix: both, or neither (the current world's)"
        )
    if rank is None or world_size is None:
        from phalanx.dist.world import world_or_single

        world = world_or_single()
        return world.rank, world.world_size
    world_size = require_int("world_size", world_size, at_least=1)
    rank = require_int("rank", rank, at_least=0)
    if rank >= world_size:
        raise ValueError(
            f"rank={rank} is outside of a group of {world_size} ranks (0 to {world_size - 1}): some items would "
            f"never be seen.\nFix: a rank below world_size, or leave both out for the current world's"
        )
    return rank, world_size


def read_state(name: str, state: Mapping[str, Any]) -> tuple[Any, int, int]:
    """Seed, epoch and consumed samples of a sampler's state.

    Raises:
        ValueError: A field is missing, or a number is none.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"a {name}'s state is a mapping with seed, epoch and consumed, not {short(state)}.\n"
            f"Fix: what {name}.state_dict() returned"
        )
    missing = [field for field in ("seed", "epoch", "consumed") if field not in state]
    if missing:
        raise ValueError(
            f"a {name}'s state needs seed, epoch and consumed: {', '.join(missing)} missing.\n"
            f"Fix: what {name}.state_dict() returned"
        )
    epoch = require_int("epoch", state["epoch"], at_least=0)
    consumed = require_int("consumed", state["consumed"], at_least=0)
    seed = None if state["seed"] is None else require_seed(state["seed"])
    return seed, epoch, consumed


class EpochSampler(Sampler[T]):
    """Passes over one rank's share of epochs; what an epoch holds is said by the class that extends it.

    Each pass is the next epoch, whether or not `set_epoch` is called; leaving a pass early ends its
    epoch too. After `load_state_dict` the first pass is the rest of the interrupted one.
    """

    is_sharded = True  # wrappers refuse to share it again

    def __init__(self, rank: int | None, world_size: int | None, *, seed: int | None, tail: Tail) -> None:
        require_tail(tail)
        self.seed = None if seed is None else require_seed(seed)
        self.rank, self.world_size = resolve_rank(type(self).__name__, rank, world_size)
        self.tail = tail
        self._epoch = 0
        self._start = 0  # global samples of this epoch consumed before the pass under way
        self._handed_out = 0  # by this rank in this pass, in blocks that are done
        self._block: Iterator[T] = iter(())  # the rest of the block under way
        self._pass: object | None = None  # the pass under way
        self._finished: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way, or of the next one."""
        return self._epoch

    def __len__(self) -> int:
        """What a whole epoch yields on this rank; a pass after `load_state_dict` may be shorter."""
        return self._count(self._epoch, 0)

    def __iter__(self) -> Iterator[T]:
        if self._pass is not None:
            self._next_epoch()
        token = self._pass = object()
        epoch, start = self._epoch, self._start
        count = self._count(epoch, start)
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
        epoch = require_int("epoch", epoch, at_least=0)
        if epoch == self._finished and self._orders_differ:
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
            consumed = self._consumed(self._epoch, self._start, handed_out)
        return {
            "seed": self.seed,
            "epoch": self._epoch,
            "consumed": require_int("consumed", consumed, at_least=0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, on any number of ranks: its seed and order are taken over.

        Raises:
            ValueError: ``state`` lacks a field or is of a larger dataset.
        """
        seed, epoch, consumed = read_state(type(self).__name__, state)
        before = self.seed
        self.seed = seed
        try:
            self._check_consumed(epoch, consumed)
        except ValueError:
            self.seed = before
            raise
        self._epoch, self._start = epoch, consumed
        self._finished = None
        self._rewind()

    @property
    def _orders_differ(self) -> bool:
        """Whether two epochs have different orders."""
        return True

    def _count(self, epoch: int, start: int) -> int:
        """What this rank yields of an epoch when ``start`` samples of it are behind all ranks."""
        raise NotImplementedError

    def _look_up(self, epoch: int, start: int, done: int, size: int) -> list[T]:
        """The next ``size`` of them after ``done``."""
        raise NotImplementedError

    def _consumed(self, epoch: int, start: int, handed_out: int) -> int:
        """Samples of the epoch behind all ranks after each was handed so much."""
        raise NotImplementedError

    def _check_consumed(self, epoch: int, consumed: int) -> None:
        """Raise a ValueError unless a pass can begin after so many samples."""
        raise NotImplementedError

    def _next_epoch(self) -> None:
        self._epoch, self._start = self._epoch + 1, 0
        self._rewind()

    def _rewind(self) -> None:
        self._pass, self._handed_out, self._block = None, 0, iter(())


class PositionSampler(EpochSampler[int]):
    """Deals the positions of an epoch, rank r taking r, r + world_size, ...

    Args:
        num_positions: Length of an epoch over all ranks.
    """

    def __init__(
        self, num_positions: int, rank: int | None, world_size: int | None, *, seed: int | None, tail: Tail
    ) -> None:
        super().__init__(rank, world_size, seed=seed, tail=tail)
        self._num_positions = int(num_positions)

    def indices_at(self, epoch: int, positions: Indices) -> Indices:
        """The dataset indices at these positions of an epoch, whichever rank they belong to.

        Args:
            epoch: From 0.
            positions: int64, one-dimensional, within the epoch.
        """
        raise NotImplementedError

    def _count(self, epoch: int, start: int) -> int:
        rest = self._num_positions - start
        if self.tail == "uneven":
            return max(0, -(-(rest - self.rank) // self.world_size))
        return rest // self.world_size if self.tail == "drop" else -(-rest // self.world_size)

    def _look_up(self, epoch: int, start: int, done: int, size: int) -> list[int]:
        first = start + self.rank + done * self.world_size
        positions: Indices = np.arange(first, first + size * self.world_size, self.world_size, dtype=np.int64)
        if self.tail == "pad":
            positions %= self._num_positions
        indices: list[int] = self.indices_at(epoch, positions).tolist()
        return indices

    def _consumed(self, epoch: int, start: int, handed_out: int) -> int:
        return min(start + handed_out * self.world_size, self._num_positions)

    def _check_consumed(self, epoch: int, consumed: int) -> None:
        if consumed > self._num_positions:
            raise ValueError(
                f"the state has {consumed} samples of an epoch behind it, an epoch here has "
                f"{self._num_positions}: it is another dataset, or the samples were counted over several epochs."
            )

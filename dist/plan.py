"""Which samples a step sees and under which keys: arithmetic that every rank does alone and alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from phalanx.dist.arguments import require_flag, short
from phalanx.dist.arguments import require_int as require_int
from phalanx.dist.keys import derive_key
from phalanx.dist.permutation import Indices, KeyedPermutation

Tail = Literal["uneven", "drop", "pad"]
_LEAST_SEED = -(1 << 63)
TAILS: tuple[str, ...] = get_args(Tail)


def require_seed(seed: object) -> int:
    """The seed as an int; a ValueError for anything else."""
    return require_int("seed", seed, at_least=_LEAST_SEED, at_most=None)


def require_tail(tail: str) -> None:
    """Raise a ValueError unless ``tail`` is one of the known ones."""
    if not isinstance(tail, str) or tail not in TAILS:
        raise ValueError(
            f"tail={short(tail)} is unknown: the items left over at an epoch's end would have no rule.\n"
            'Fix: tail="uneven" (every item once), "drop" (leave them out) or "pad" (repeat the first ones)'
        )


@lru_cache(maxsize=4)
def epoch_order(num_items: int, seed: int, epoch: int) -> KeyedPermutation:
    """The shuffled order of an epoch; a few are kept, since a small set's order is a table."""
    return KeyedPermutation(num_items, derive_key(seed, epoch, "order"))


@dataclass(frozen=True)
class Plan:
    """Which samples each shard takes in each step, and under which random keys.

    An epoch is a sequence of positions 0, 1, ..., num_items - 1, cut into steps of
    ``global_batch_size``; shard v takes positions v, v + shards, ... of a step. What a step sees is
    free of ``shards``::

        >>> plan = Plan(num_items=100, global_batch_size=50, shards=4)
        >>> [len(plan.positions(0, 0, v)) for v in range(4)]
        [13, 13, 12, 12]
        >>> alone = Plan(num_items=100, global_batch_size=50, shards=1)
        >>> shared = np.concatenate([plan.indices(0, 1, v) for v in range(4)])
        >>> sorted(shared) == sorted(alone.indices(0, 1, 0))
        True

    Args:
        num_items: Samples of an epoch.
        global_batch_size: Samples of a step over all shards.
        shards: How many share a step: the ranks, or the virtual ranks.
        seed: Any integer, the same on every rank. None keeps dataset order.
        tail: The last step when ``num_items`` is no multiple of ``global_batch_size``: "uneven" is
            short, "drop" leaves it out, "pad" fills it with the epoch's first positions.
        shuffle: False keeps dataset order, while the keys still depend on ``seed``.

    Raises:
        ValueError: A number is out of range, or ``tail`` is unknown.
    """

    num_items: int
    global_batch_size: int
    shards: int
    seed: int | None = 0
    tail: Tail = "uneven"
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name, least in (("num_items", 0), ("global_batch_size", 1), ("shards", 1)):
            object.__setattr__(self, name, require_int(name, getattr(self, name), at_least=least))
        if self.seed is not None:
            object.__setattr__(self, "seed", require_seed(self.seed))
        require_tail(self.tail)
        object.__setattr__(self, "shuffle", require_flag("shuffle", self.shuffle))

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the same on every shard."""
        if self.tail == "drop":
            return self.num_items // self.global_batch_size
        return -(-self.num_items // self.global_batch_size)

    def count(self, epoch: int, step: int) -> int:
        """Samples of this step over all shards; padding counts as well."""
        self._check_step(epoch, step)
        if self.tail == "pad":
            return self.global_batch_size
        return min(self.global_batch_size, self.num_items - step * self.global_batch_size)

    def shard_count(self, epoch: int, step: int, v: int) -> int:
        """Samples of this step on shard ``v``; 0 when the step is shorter than the shards are many."""
        self._check_shard(v)
        return max(0, -(-(self.count(epoch, step) - v) // self.shards))

    def positions(self, epoch: int, step: int, v: int) -> Indices:
        """The positions within the epoch that shard ``v`` takes in ``step``, ascending (padding wraps)."""
        self._check_step(epoch, step)
        self._check_shard(v)
        start = step * self.global_batch_size
        taken = np.arange(start + v, start + self.count(epoch, step), self.shards, dtype=np.int64)
        if self.tail == "pad":
            taken %= self.num_items
        return taken

    def indices(self, epoch: int, step: int, v: int) -> Indices:
        """The dataset indices at `positions`."""
        return self.order(epoch, self.positions(epoch, step, v))

    def order(self, epoch: int, positions: Indices) -> Indices:
        """The dataset indices at these positions of an epoch."""
        if self.seed is None or not self.shuffle:
            return positions
        return epoch_order(self.num_items, self.seed, epoch).take(positions)

    def key(self, epoch: int, step: int, v: int, purpose: str) -> int:
        """The random key of what shard ``v`` does in this step for ``purpose``."""
        for name, number in (("epoch", epoch), ("step", step), ("v", v)):
            require_int(name, number, at_least=0)
        if not isinstance(purpose, str):
            raise ValueError(
                f"purpose={short(purpose)} is no text.\nFix: a word for what is drawn, such as 'noise'"
            )
        return derive_key("step", self.seed or 0, epoch, step, v, purpose)

    def sample_key(self, epoch: int, position: int, purpose: str = "sample") -> int:
        """The random key of one sample in one epoch, whichever shard takes it."""
        return derive_key("position", self.seed or 0, epoch, position, purpose)

    def to_dict(self) -> dict[str, Any]:
        """Everything but ``shards``, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "shards"}

    def fingerprint(self) -> str:
        """A hash of everything but ``shards``: equal for runs that see the same samples in each step."""
        return hashlib.blake2b(
            json.dumps(self.to_dict(), sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    def _check_step(self, epoch: int, step: int) -> None:
        for name, number in (("epoch", epoch), ("step", step)):
            if type(number) is not int:
                require_int(name, number, at_least=0)
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise ValueError(
                f"epoch {epoch}, step {step}: an epoch has steps 0 to {self.steps_per_epoch - 1} "
                f"({self.num_items} items, {self.global_batch_size} a step).\nFix: a step below steps_per_epoch"
            )

    def _check_shard(self, v: int) -> None:
        if type(v) is not int:
            require_int("v", v, at_least=0)
        if not 0 <= v < self.shards:
            raise ValueError(
                f"shard {v}: there are shards 0 to {self.shards - 1}.\nFix: one of these, or a Plan with more shards"
            )


@dataclass(frozen=True)
class Progress:
    """How far a run has come: the only counter there is.

    >>> progress = Progress(epoch=1, step_in_epoch=3, step=103)
    >>> Progress.from_dict(progress.to_dict()) == progress
    True

    Args:
        epoch: The epoch that is being run, from 0.
        step_in_epoch: Steps of that epoch delivered to the loop.
        step: Steps delivered over the whole run.
        skipped: Steps whose update was left out, as when fp16 gradients overflow.

    Raises:
        ValueError: A number is negative or no integer.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            number = require_int(field.name, getattr(self, field.name), at_least=0)
            object.__setattr__(self, field.name, number)

    def to_dict(self) -> dict[str, int]:
        """As plain integers, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """From what `to_dict` returned.

        Raises:
            ValueError: A field is missing, or not a number of at least 0.
        """
        if not isinstance(values, Mapping):
            raise ValueError(
                f"progress={short(values)} is no mapping.\nFix: what Progress.to_dict() returned"
            )
        missing = [field.name for field in fields(cls) if field.name not in values]
        if missing:
            raise ValueError(
                f"progress {dict(values)!r} lacks {', '.join(missing)}: where to go on is unknown."
            )
        return cls(**{field.name: values[field.name] for field in fields(cls)})

"""Which indices of a dataset belong to this rank, for a plain DataLoader."""

from __future__ import annotations

from phalanx.dist.arguments import require_flag, require_int
from phalanx.dist.epoch_sampler import PositionSampler
from phalanx.dist.permutation import Indices
from phalanx.dist.plan import Tail, epoch_order


class ShardSampler(PositionSampler):
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
        if hasattr(num_items, "__len__") and not hasattr(num_items, "dtype"):
            raise ValueError(
                f"num_items is a {type(num_items).__name__}, a number is needed.\nFix: ShardSampler(len(dataset), ...)"
            )
        num_items = require_int("num_items", num_items, at_least=0)
        super().__init__(num_items, rank, world_size, seed=seed, tail=tail)
        self.num_items = num_items
        self.shuffle = require_flag("shuffle", shuffle)

    def indices_at(self, epoch: int, positions: Indices) -> Indices:
        """The dataset indices at these positions of an epoch, whichever rank they belong to."""
        if not self._orders_differ or self.seed is None:
            return positions
        return epoch_order(self.num_items, self.seed, epoch).take(positions)

    @property
    def _orders_differ(self) -> bool:
        return self.shuffle and self.seed is not None

"""Which ranks play which virtual ranks: arithmetic that every rank does alone and alike."""

from __future__ import annotations

from phalanx.dist.arguments import require_int

MOST_VIRTUAL_RANKS = 1 << 16  # a rank loops over those that it plays


def world_sizes(virtual_ranks: int) -> list[int]:
    """The world sizes whose runs are equal to the bit, ascending.

    Each rank must play a whole subtree of the binary tree over the virtual ranks: a power of two of them. One
    rank plays the whole tree, whatever their number.

    >>> world_sizes(8), world_sizes(6), world_sizes(3)
    ([1, 2, 4, 8], [1, 3, 6], [1, 3])

    Raises:
        ValueError: ``virtual_ranks`` is no integer of at least 1.
    """
    virtual_ranks = require_int("virtual_ranks", virtual_ranks, at_least=1, at_most=MOST_VIRTUAL_RANKS)
    sizes, size = {1}, virtual_ranks
    while True:
        sizes.add(size)
        if size % 2:
            return sorted(sizes)
        size //= 2


def virtual_range(virtual_ranks: int, rank: int, world_size: int) -> range:
    """The virtual ranks that ``rank`` plays: equally many on every rank, in order.

    >>> [virtual_range(8, rank, 2) for rank in range(2)]
    [range(0, 4), range(4, 8)]

    Raises:
        ValueError: So many virtual ranks cannot be played by so many ranks; the message names the world sizes.
    """
    sizes = world_sizes(virtual_ranks)
    if world_size not in sizes:
        what = (
            f"{virtual_ranks} virtual ranks cannot be shared evenly among {world_size} ranks"
            if virtual_ranks % world_size
            else f"each of {world_size} ranks would play {virtual_ranks // world_size}, which is no power of two, and "
            "gradients would be summed in another order than on other world sizes"
        )
        raise ValueError(
            f"virtual_ranks={virtual_ranks}: {what}.\n"
            f"Fix: start {_either(sizes)} ranks, or choose virtual_ranks={world_size} times a power of two"
        )
    each = virtual_ranks // world_size
    return range(rank * each, (rank + 1) * each)


def _either(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last

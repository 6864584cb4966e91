"""Sums over virtual ranks in one fixed binary tree, whichever ranks play them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Entries start at multiples of so many elements, as tensors of their own would in memory (64 bytes and up):
# what reads them later, an optimizer above all, meets the same alignment on every world size.
_ALIGNMENT = 64


class Layout:
    """Where the numbers of one virtual rank lie: a flat tensor per dtype, with an entry for each tensor.

    Args:
        scalars: How many plain numbers there are (loss and flags).
        gradients: Parameters; their gradients' entries have their shapes and strides.
        others: Tensors (buffers); they end the flat tensors, one region in each.
    """

    def __init__(self, scalars: int, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        tensors = [*gradients, *others]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.scalar_dtype = torch.float64 if wide else torch.float32
        self.scalars = scalars
        self.sizes: dict[torch.dtype, int] = {self.scalar_dtype: _aligned(scalars)}
        self.gradients = [(tensor, self._reserve(tensor)) for tensor in gradients]
        self.begins = {tensor.dtype: self.sizes.get(tensor.dtype, 0) for tensor in others}
        self.others = [(tensor, self._reserve(tensor)) for tensor in others]

    def _reserve(self, tensor: Tensor) -> int:
        start = self.sizes.get(tensor.dtype, 0)
        self.sizes[tensor.dtype] = start + _aligned(tensor.numel())
        return start


class Slot:
    """Memory for the numbers of one virtual rank, or for a sum of several. All zero at first.

    Attributes:
        flats: A flat tensor for each dtype.
        scalars: View of the plain numbers.
        gradients: View of each gradient, laid out as its parameter.
        others: View of each other tensor.
        regions: The part of each flat tensor with the other tensors.
    """

    def __init__(self, layout: Layout, world_size: int) -> None:
        self.flats: dict[torch.dtype, Tensor] = {}
        for dtype, size in layout.sizes.items():
            padded = -(-size // (_ALIGNMENT * world_size)) * _ALIGNMENT * world_size
            self.flats[dtype] = torch.zeros(padded, dtype=dtype, device=layout.device)
        self.scalars = self.flats[layout.scalar_dtype][: layout.scalars]
        self.gradients = [
            _strided_view(self.flats[tensor.dtype], start, tensor) for tensor, start in layout.gradients
        ]
        self.others = [
            self.flats[tensor.dtype][start : start + tensor.numel()].view(tensor.shape)
            for tensor, start in layout.others
        ]
        self.regions = {
            dtype: self.flats[dtype][begin : layout.sizes[dtype]] for dtype, begin in layout.begins.items()
        }

    def add_(self, other: Slot) -> None:
        """Add another slot's numbers."""
        for mine, theirs in zip(self.flats.values(), other.flats.values(), strict=True):
            mine.add_(theirs)


class TreeSum:
    """Sums slots of virtual ranks so that every bit is the same for every world size.

    The tree pairs neighbours, level by level; who has none goes up as it is. For 6 virtual ranks::

        ((0 + 1) + (2 + 3)) + (4 + 5)

    A rank that plays 2**k of them in order sums a subtree, as a binary counter counts: k slots at most. The
    subtrees' sums go through the rest of the tree shard by shard, each rank summing one shard of all.

    Args:
        layout: Of the slots.
        world_size: Ranks; 1 for no communication.
    """

    def __init__(self, layout: Layout, world_size: int) -> None:
        self._layout = layout
        self._world_size = world_size
        self._levels: list[Slot | None] = [None]
        self._free: list[Slot] = []
        self.slots = 0  # made so far

    def leaf(self) -> tuple[Slot, bool]:
        """The slot for the next virtual rank's numbers, and whether they are to be *added* to it."""
        slot = self._levels[0]
        if slot is not None:
            return slot, True
        self._levels[0] = slot = self._take()
        return slot, False

    def carry(self) -> None:
        """After numbers were added to a leaf's slot: carry sums up."""
        slot, level = self._levels[0], 1
        assert slot is not None
        self._levels[0] = None
        while level < len(self._levels) and (left := self._levels[level]) is not None:
            left.add_(slot)
            self._free.append(slot)
            slot, self._levels[level] = left, None
            level += 1
        if level == len(self._levels):
            self._levels.append(None)
        self._levels[level] = slot

    def clear(self) -> None:
        """Forget what was summed."""
        self._free += [slot for slot in self._levels if slot is not None]
        self._levels = [None] * len(self._levels)

    def total(self) -> Slot:
        """The sum over all virtual ranks; give it back with `release`. Collective."""
        total: Slot | None = None
        for level, slot in enumerate(self._levels):
            if slot is None:
                continue
            self._levels[level] = None
            if total is not None:
                slot.add_(total)
                self._free.append(total)
            total = slot
        assert total is not None
        if self._world_size > 1:
            room = self._take()
            for flat, received in zip(total.flats.values(), room.flats.values(), strict=True):
                tree_all_reduce(flat, received, self._world_size)
            self._free.append(room)
        return total

    def release(self, slot: Slot) -> None:
        """Let a slot be used again."""
        self._free.append(slot)

    def _take(self) -> Slot:
        if self._free:
            return self._free.pop()
        self.slots += 1
        return Slot(self._layout, self._world_size)


def tree_all_reduce(flat: Tensor, room: Tensor, world_size: int) -> None:
    """Sum ``flat`` over the ranks in place, in the order of the tree over ranks. Collective.

    Only copies travel, and each element is summed on one rank: the sum has the same bits on all of them, for any
    backend.

    Args:
        flat: Of a length that ``world_size`` divides.
        room: As large; overwritten.
        world_size: Number of ranks.
    """
    dist.all_to_all_single(_bytes(room), _bytes(flat))
    rows = room.view(world_size, -1)
    stride = 1
    while stride < world_size:
        for left in range(0, world_size - stride, 2 * stride):
            rows[left].add_(rows[left + stride])
        stride *= 2
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.14
    gather(_bytes(flat), _bytes(rows[0]))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _strided_view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """A view of ``flat`` with the strides of ``like``, where these leave no gaps."""
    part = flat[start : start + like.numel()]
    dims = sorted(zip(like.stride(), like.shape, strict=True))
    expected = 1
    for stride, size in dims:
        if size != 1 and stride != expected:
            return part.view(like.shape)
        expected *= size
    if expected != like.numel() or math.prod(like.shape) == 0:
        return part.view(like.shape)
    return part.as_strided(like.shape, like.stride())

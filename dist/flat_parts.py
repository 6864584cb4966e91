"""Tensors that lie as a run of elements on each rank, as ZeRO has them: what a checkpoint needs to see of one."""

from __future__ import annotations

from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in the whole tensor, and its size


class FlatPart(Tensor):
    """This rank's run of a tensor's elements, in logical order; no rank need have all of them.

    Its shape, dtype and device are the whole tensor's. It is not for computing: torch.distributed.checkpoint asks
    it, as it asks a DTensor, which boxes this rank holds and for their content::

        part = FlatPart(torch.arange(5.0), start=3, shape=(4, 4))      # elements 3 to 7
        flat_boxes((4, 4), 3, 8) == [((0, 3), (1, 1)), ((1, 0), (1, 4))]

    Args:
        run: The elements that this rank holds; of one dim.
        start: Where they begin in the flattened tensor.
        shape: Of the whole tensor.
    """

    run: Tensor
    start: int

    @staticmethod
    def __new__(cls, run: Tensor, start: int, shape: tuple[int, ...]) -> FlatPart:
        part: FlatPart = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=run.dtype, device=run.device, requires_grad=False
        )
        part.run, part.start = run.detach(), start
        return part

    def __init__(self, run: Tensor, start: int, shape: tuple[int, ...]) -> None:
        """All is done where it is made."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatPart({self.run.numel()} of {tuple(self.shape)} from {self.start})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the disabled one, which is no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise TypeError(
            f"{func}: a FlatPart is a part of a tensor to save or to load into, not to compute with"
        )

    def to_local(self) -> Tensor:
        """The elements that this rank holds, of one dim."""
        return self.run

    def pieces(self) -> list[tuple[Box, Tensor]]:
        """The boxes that this rank holds, and a view of each one's elements."""
        found, done = [], 0
        for box in flat_boxes(tuple(self.shape), self.start, self.start + self.run.numel()):
            size = prod(box[1])
            found.append((box, self.run[done : done + size].view(box[1])))
            done += size
        return found

    # What torch.distributed.checkpoint calls

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for (offsets, sizes), _ in self.pieces()
        ]

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(piece for (offsets, _), piece in self.pieces() if offsets == tuple(index.offset))


def flat_boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Boxes that make up elements `start` to `end` of a flattened tensor, in order; each lies in one piece.

    >>> flat_boxes((4, 4), 3, 13)
    [((0, 3), (1, 1)), ((1, 0), (2, 4)), ((3, 0), (1, 1))]
    """
    if start >= end:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, last = start // row, (end - 1) // row
    if start % row == 0 and end % row == 0:
        return [((first, *(0,) * (len(shape) - 1)), (last + 1 - first, *shape[1:]))]
    if first == last:
        inner = flat_boxes(shape[1:], start - first * row, end - first * row)
        return [((first, *offsets), (1, *sizes)) for offsets, sizes in inner]
    head = -(-start // row) * row  # where the first whole row begins, and the last one ends
    tail = end // row * row
    return [
        *flat_boxes(shape, start, head),
        *flat_boxes(shape, head, tail),
        *flat_boxes(shape, tail, end),
    ]


def whole_box(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return (0,) * len(shape), shape

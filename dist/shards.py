"""Tensors of which each rank holds a part (DTensor, as FSDP2 makes them): which part, and where it goes."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in the whole tensor, and its size


def is_sharded(value: object) -> TypeGuard[Tensor]:
    """Whether a tensor is a DTensor; asked by its attributes, since importing DTensor takes its time."""
    return isinstance(value, Tensor) and hasattr(value, "placements") and hasattr(value, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; the tensor itself when it is a plain one."""
    if not is_sharded(tensor):
        return tensor.detach()
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def local_boxes(tensor: Tensor) -> list[Box]:
    """Where this rank's part lies in the whole tensor; no box when this rank holds nothing of it."""
    if not is_sharded(tensor):
        return [((0,) * tensor.dim(), tuple(tensor.shape))]
    chunks: list[Any] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]


def cut(tensor: Tensor, box: Box) -> Tensor:
    """The view of `tensor` that a box describes."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@torch.no_grad()
def share_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a whole tensor, sharded as `like` is."""
    shared = torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    part = local_part(shared)
    if part.numel():
        (box,) = local_boxes(shared)
        part.copy_(cut(whole, box))
    return shared

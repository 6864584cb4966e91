"""Tensors of which each rank holds a part (DTensor of FSDP2, FlatPart for ZeRO): which part, and where it goes."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from phalanx.dist.flat_parts import Box, FlatPart, whole_box


def is_sharded(value: object) -> TypeGuard[Tensor]:
    """Whether a rank may hold a part of it; asked by an attribute, since importing DTensor takes its time."""
    return isinstance(value, Tensor) and hasattr(value, "__create_chunk_list__")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; the tensor itself when it is a plain one."""
    if isinstance(tensor, FlatPart):
        return tensor.run
    if not is_sharded(tensor):
        return tensor.detach()
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def local_pieces(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """Which boxes of the whole tensor this rank holds, and their content; none when it holds nothing of it."""
    if isinstance(tensor, FlatPart):
        return tensor.pieces()
    if not is_sharded(tensor):
        return [(whole_box(tuple(tensor.shape)), tensor.detach())]
    chunks: list[Any] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return [((tuple(chunk.offsets), tuple(chunk.sizes)), local_part(tensor)) for chunk in chunks]


def cut(tensor: Tensor, box: Box) -> Tensor:
    """The view of `tensor` that a box describes."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@torch.no_grad()
def share_into(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, or this rank's share of it, into `target`."""
    for box, piece in local_pieces(target):
        if piece.numel():
            piece.copy_(cut(whole, box))


def share_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a whole tensor, sharded as `like` is."""
    shared = torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    share_into(shared, whole)
    return shared

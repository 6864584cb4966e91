"""Bringing tensors that ranks hold in parts together in rank 0's host memory, one at a time."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.dist.checkpoint_staging import Staging
from phalanx.dist.flat_parts import FlatPart
from phalanx.dist.rank_errors import on_rank_zero
from phalanx.dist.world import World

Parts = dict[str, dict[str, Tensor]]


def gather_parts(parts: Parts, staging: Staging, world: World) -> Parts:
    """The parts with whole tensors in place of every `FlatPart`, on rank 0; empty ones on the others.

    Besides rank 0's copies, which lie in `staging`, one tensor at a time is whole on each rank's device.

    Collective: every rank must call it, with the same names.

    Raises:
        CheckpointError: Rank 0 has no memory for the copies (on the others; rank 0 raises its own error).
    """
    shared_out = [
        (part, name, tensor)
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
        if isinstance(tensor, FlatPart)
    ]

    def make_room() -> None:
        for part, name, tensor in shared_out:
            staging.place(f"{part}/{name}", tensor)

    on_rank_zero(world, make_room)
    found = {part: dict(tensors) for part, tensors in parts.items()}
    for part, name, tensor in shared_out:
        whole = _sum_on_rank_zero(tensor, world)
        if world.is_rank_zero:
            found[part][name] = staging.place(f"{part}/{name}", tensor).copy_(whole)
    return found if world.is_rank_zero else {part: {} for part in parts}


def _sum_on_rank_zero(part: FlatPart, world: World) -> Tensor:
    """Every element is one rank's; bits are summed as integers, so that zeros beside them change none."""
    bits = torch.int32 if part.element_size() % 4 == 0 else torch.uint8
    whole = torch.zeros(prod(part.shape), dtype=part.dtype, device=world.device)
    whole[part.start : part.start + part.run.numel()] = part.run
    if world.world_size > 1 and whole.numel():
        dist.reduce(whole.view(bits), dst=0)
    return whole.view(part.shape)

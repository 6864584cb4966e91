"""Weights and buffers that every rank takes over from rank 0."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def take_from_rank_zero(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors, in place, by rank 0's. Collective."""
    for tensor in tensors:
        dist.broadcast(tensor, src=0)


def make_contiguous(parameters: Iterable[nn.Parameter]) -> None:
    """Give the parameters row-major memory, in place, their values unchanged.

    A model in ``channels_last`` has kernels in another order, which neither fully_shard (torch 2.14) nor DeepSpeed's
    broadcast (0.19) takes: each ends in an error about strides. Such a model still computes the same from images in
    either order.
    """
    for parameter in parameters:
        parameter.data = parameter.data.contiguous()


class SharedBuffers:
    """The buffers of a module (batch norm's running statistics), which ranks take over from rank 0 when told.

    After each optimizer step rather than in each forward, as DDP does, which breaks two forwards before one backward.

    Args:
        module: Whose buffers.
        group: The ranks that share them; the default group when None.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        self._group = group if group is not None else dist.group.WORLD

    @torch.no_grad()
    def take_over(self) -> None:
        """Overwrite the buffers by rank 0's. Collective: one broadcast of bytes, whatever the dtypes."""
        group = self._group
        if not self._buffers or group is None or dist.get_world_size(group) == 1:
            return
        views = [buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in self._buffers]
        flat = torch.cat(views)
        dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
        if dist.get_rank(group) == 0:
            return
        start = 0
        for buffer in self._buffers:
            end = start + buffer.numel() * buffer.element_size()
            # A copy, since a view of another dtype needs an aligned start.
            buffer.copy_(flat[start:end].clone().view(buffer.dtype).view(buffer.shape))
            start = end

"""Buffers (batch norm's running statistics) of virtual ranks that start each step from the same ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.dist.virtual_sums import Layout, Slot

_COUNTER = "num_batches_tracked"


class StepBuffers:
    """A model's buffers over one step: put back for each virtual rank, their mean taken at the end.

    Floating-point buffers become the start plus the mean of the virtual ranks' changes, so that one that nobody
    changes stays as it is to the bit. Others take virtual rank 0's value (whether a virtual rank meets a batch norm may
    depend on its samples, so that not even counters are alike).

    Args:
        model: The user's module.
        world_size: Ranks.
        rank: This one.
    """

    def __init__(self, model: nn.Module, world_size: int, rank: int) -> None:
        self._spread = world_size > 1
        self._rank = rank
        # By name in its module: a forward may put another tensor in its place.
        self._floats: list[tuple[nn.Module, str]] = []
        self._counters: list[tuple[nn.Module, str]] = []
        self._rest: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.numel() == 0 or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                kind = self._floats if buffer.is_floating_point() else self._rest
                if name == _COUNTER and buffer.numel() == 1:
                    kind = self._counters
                kind.append((module, name))
        self._counters_at_start: list[Tensor] = []
        self._rest_at_start: list[Tensor] = []
        self._rest_of_first: list[Tensor] = []
        self._start: Slot | None = None
        self._scratch: Slot | None = None

    @property
    def scalars(self) -> int:
        """How many plain numbers the layout needs for the buffers, behind all others."""
        return len(self._counters)

    @property
    def floats(self) -> list[Tensor]:
        """The floating-point buffers: what the layout needs to know of."""
        return _tensors(self._floats)

    @torch.no_grad()
    def begin(self, layout: Layout) -> None:
        """Note where the step starts."""
        if self._floats:
            if self._start is None or self._scratch is None:
                only = Layout(0, [], [tensor for tensor, _ in layout.others])
                self._start, self._scratch = Slot(only, 1), Slot(only, 1)
            torch._foreach_copy_(self._start.others, self.floats)
        self._counters_at_start = [tensor.clone() for tensor in _tensors(self._counters)]
        self._rest_at_start = [tensor.clone() for tensor in _tensors(self._rest)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the next virtual rank what the step started with."""
        if self._floats:
            assert self._start is not None
            torch._foreach_copy_(self.floats, self._start.others)
        for places, values in (
            (self._counters, self._counters_at_start),
            (self._rest, self._rest_at_start),
        ):
            if places:
                torch._foreach_copy_(_tensors(places), values)

    @torch.no_grad()
    def leave(self, slot: Slot, *, add: bool, counts: bool, first: bool) -> None:
        """Write, or add, what the virtual rank has changed.

        Args:
            slot: Where to.
            add: Rather than write.
            counts: It has samples.
            first: It is this rank's first one.
        """
        if first:
            self._rest_of_first = [tensor.clone() for tensor in _tensors(self._rest)]
        if self._counters and not add:
            # Virtual rank 0's counts travel with the sums: those of all others add zero.
            counted = slot.scalars[-len(self._counters) :]
            if first and self._rank == 0:
                now = torch.stack([tensor.view(()) for tensor in _tensors(self._counters)])
                counted.copy_(now - torch.stack([tensor.view(()) for tensor in self._counters_at_start]))
            else:
                counted.zero_()
        if not self._floats:
            return
        assert self._start is not None
        assert self._scratch is not None
        torch._foreach_copy_(self._scratch.others, self.floats)
        for dtype, region in slot.regions.items():
            now, start = self._scratch.regions[dtype], self._start.regions[dtype]
            if not counts:
                now.zero_()
            else:
                same = now == start  # infinities too, whose difference is none
                now.sub_(start).masked_fill_(same, 0)
            if add:
                region.add_(now)
            else:
                region.copy_(now)

    @torch.no_grad()
    def finish(self, total: Slot, counted: int) -> None:
        """Take the mean over the virtual ranks that have samples. Collective."""
        if self._floats:
            assert self._start is not None
            for dtype, region in total.regions.items():
                region.div_(counted).add_(self._start.regions[dtype])
            torch._foreach_copy_(self.floats, total.others)
        if self._counters:
            steps = total.scalars[-len(self._counters) :].unbind()
            values = [
                start + step.to(start.dtype)
                for start, step in zip(self._counters_at_start, steps, strict=True)
            ]
            torch._foreach_copy_(_tensors(self._counters), values)
        if not self._rest:
            return
        if self._spread:
            # One broadcast of bytes, whatever the dtypes.
            flat = torch.cat(
                [tensor.contiguous().view(-1).view(torch.uint8) for tensor in self._rest_of_first]
            )
            dist.broadcast(flat, src=0)
            sizes = [tensor.numel() * tensor.element_size() for tensor in self._rest_of_first]
            self._rest_of_first = [
                # A copy, since a view of another dtype needs an aligned start.
                part.clone().view(tensor.dtype).view(tensor.shape)
                for part, tensor in zip(torch.split(flat, sizes), self._rest_of_first, strict=True)
            ]
        torch._foreach_copy_(_tensors(self._rest), self._rest_of_first)


def _tensors(places: list[tuple[nn.Module, str]]) -> list[Tensor]:
    found = []
    for module, name in places:
        buffer = module._buffers[name]
        assert buffer is not None
        found.append(buffer)
    return found

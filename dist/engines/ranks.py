"""What the engines over several ranks have in common: an average over ranks to undo, and buffers to share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.dist.engines.buffers import SharedBuffers
from phalanx.dist.engines.single import SingleEngine

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from phalanx.dist.engines.setting import Common


class RanksEngine(SingleEngine):
    """Training on several ranks whose gradients something else averages: DDP, FSDP, an Accelerator.

    Args:
        model: As the loop calls it.
        optimizer: Of its parameters.
        world_size: Ranks that are averaged over.
        buffers: What ranks take over from rank 0 after each optimizer step; None leaves each rank its own.
        common: The options of `SingleEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        world_size: int,
        buffers: SharedBuffers | None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, optimizer, **common)
        self._world_size = world_size
        self._buffers = buffers

    def _watch_forwards(self, module: nn.Module) -> None:
        """Call `_before_forward` ahead of each forward of ``module``."""
        # Not compiled: a trace would fix the counts of the batch it saw.
        before: Callable[..., None] = torch.compiler.disable(self._before_forward)  # type: ignore[no-untyped-call]
        module.register_forward_pre_hook(before)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """For the plain loop: the backward that follows is of the batch yielded last."""
        raise NotImplementedError

    def _plain_weight(self) -> float | None:
        """What this rank's mean weighs in the average over ranks; None where nobody counts samples."""
        loader = self.loader
        if loader is None or not loader.global_count:
            return None
        return loader.step_local_count * self._world_size / loader.global_count

    def _stands_in(self) -> bool:
        """Whether the batch yielded last has no sample of this rank's."""
        return self.loader is not None and self.loader.local_count == 0

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._buffers is not None:
            self._buffers.take_over()

"""How the learning rate moves over a run: functions of the step alone, so that a resumed run needs no memory."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class OneCycle:
    """Factor of the learning rate at a step: up from ``start`` to 1 along a cosine, then down to ``end``.

    Made for ``torch.optim.lr_scheduler.LambdaLR``, one ``scheduler.step()`` per optimizer step.

    >>> cycle = OneCycle(total_steps=100, warmup=0.25)
    >>> [round(cycle(step), 3) for step in (0, 25, 50, 99)]
    [0.04, 1.0, 0.75, 0.0]

    Args:
        total_steps: Optimizer steps of the whole run, at least 1.
        warmup: Share of the steps that go up, at least 0, below 1.
        start: Factor of the first step.
        end: Factor after the last step.
    """

    total_steps: int
    warmup: float = 0.25
    start: float = 0.04
    end: float = 0.0

    def __call__(self, step: int) -> float:
        peak = self.warmup * self.total_steps
        if step < peak:
            return self._between(self.start, 1.0, step / peak)
        return self._between(1.0, self.end, min(1.0, (step - peak) / (self.total_steps - peak)))

    @staticmethod
    def _between(first: float, last: float, share: float) -> float:
        return last + (first - last) * (1 + math.cos(math.pi * share)) / 2

"""How the learning rate moves over a run: functions of the step alone, so that a resumed run needs no memory.

All are factors for ``torch.optim.lr_scheduler.LambdaLR``, one ``scheduler.step()`` per optimizer step. `Plateau` alone
remembers something: what it has seen of the validation loss, which LambdaLR keeps with the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

    from phalanx.recipes.optimization import OptimizationSettings

_WARMUP_START = 0.01


@dataclass(frozen=True)
class OneCycle:
    """Factor of the learning rate at a step: up from ``start`` to 1 along a cosine, then down to ``end``.

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


@dataclass(frozen=True)
class Decay:
    """Factor of the learning rate at a step: up along a line in ``warmup_steps``, then down as ``schedule`` says.

    >>> decay = Decay("step", total_steps=90, steps_per_epoch=10, step_epochs=3)
    >>> [round(decay(step), 4) for step in (0, 29, 30, 60)]
    [1.0, 1.0, 0.1, 0.01]
    >>> Decay("constant", total_steps=90, steps_per_epoch=10, warmup_steps=20)(10)
    0.505

    Args:
        schedule: ``cosine`` to zero at the end; ``step`` by ``gamma`` every ``step_epochs``; ``multistep`` by ``gamma``
            at each of ``milestones``; ``exponential`` by ``gamma`` every epoch; ``constant``.
        total_steps: Optimizer steps of the whole run.
        steps_per_epoch: At least 1.
        warmup_steps: Steps that go up; ``step_epochs`` and ``exponential`` count from their end, milestones from the
            run's start.
        gamma: None: 0.1; for ``exponential`` what leads to 0.01 at the end.
        step_epochs: None: a third of the run after the warm-up.
        milestones: Epochs; None: half and three quarters of the run.
    """

    schedule: str
    total_steps: int
    steps_per_epoch: int
    warmup_steps: int = 0
    gamma: float | None = None
    step_epochs: int | None = None
    milestones: tuple[int, ...] | None = None

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return _WARMUP_START + (1 - _WARMUP_START) * step / self.warmup_steps
        length = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / length)
        epochs = (step - self.warmup_steps) // self.steps_per_epoch
        gamma = 0.1 if self.gamma is None else self.gamma
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        if self.schedule == "step":
            return float(gamma ** (int(3 * done) if self.step_epochs is None else epochs // self.step_epochs))
        if self.schedule == "multistep":
            marks = [self.total_steps / 2, self.total_steps * 0.75]
            if self.milestones is not None:
                marks = [epoch * self.steps_per_epoch for epoch in self.milestones]
            return float(gamma ** sum(step >= mark for mark in marks))
        if self.schedule == "exponential":
            each = 0.01 ** (self.steps_per_epoch / length) if self.gamma is None else self.gamma
            return float(each**epochs)
        return 1.0


@dataclass
class Plateau:
    """Factor of the learning rate: up along a line in ``warmup_steps``, then by ``gamma`` wherever the loss stays.

    >>> plateau = Plateau(patience=2)
    >>> for loss in (1.0, 0.9, 0.9, 0.95, 0.91):
    ...     plateau.judge(loss)
    >>> round(plateau(100), 4)  # two epochs were no better than 0.9, the third lowered it
    0.1

    Args:
        patience: Epochs that may be no better before the factor is lowered.
        gamma: What it is lowered by.
        warmup_steps: Steps that go up.
        threshold: Share by which a loss must be below the best one to be better.
    """

    patience: int
    gamma: float = 0.1
    warmup_steps: int = 0
    threshold: float = 1e-4
    factor: float = 1.0
    best: float = math.inf
    waited: int = 0

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return _WARMUP_START + (1 - _WARMUP_START) * step / self.warmup_steps
        return self.factor

    def judge(self, loss: float) -> None:
        """Take an epoch's validation loss into account; the same on every rank."""
        if loss < self.best * (1 - self.threshold):
            self.best, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited > self.patience:
            self.factor, self.waited = self.factor * self.gamma, 0


def factor_for(settings: OptimizationSettings, steps_per_epoch: int) -> Callable[[int], float]:
    """The factor that the settings ask for, their ``epochs`` known."""
    assert settings.epochs is not None
    total, name = settings.epochs * steps_per_epoch, settings.schedule_name
    if name == "one-cycle":
        given = settings.warmup_epochs
        share = settings.rises if given is None else min(given / settings.epochs, 1 - 1 / (total + 1))
        return OneCycle(total, share)
    warmup_steps = round((settings.warmup_epochs or 0) * steps_per_epoch)
    if name == "plateau":
        gamma = 0.1 if settings.gamma is None else settings.gamma
        return Plateau(settings.plateau_epochs, gamma, warmup_steps)
    return Decay(
        name,
        total,
        steps_per_epoch,
        warmup_steps,
        settings.gamma,
        settings.step_epochs,
        settings.milestone_epochs(),
    )


def scheduler_for(optimizer: Optimizer, settings: OptimizationSettings, steps_per_epoch: int) -> LambdaLR:
    """The settings' schedule of an optimizer: ``step()`` after each of its steps, `judge` after each epoch."""
    from torch.optim.lr_scheduler import LambdaLR

    factor = factor_for(settings, steps_per_epoch)
    if isinstance(factor, Plateau):
        return LambdaLR(optimizer, factor)
    # A plain function: an object's fields would come back with the checkpoint, the old number of epochs among them.
    return LambdaLR(optimizer, lambda step: factor(step))


def judge(scheduler: Any, loss: float | None) -> None:
    """Tell a schedule how the epoch went, for the learning rate of the next step; most do not mind."""
    waiting = {id(each): each for each in scheduler.lr_lambdas if isinstance(each, Plateau)}
    if loss is None or not waiting:
        return
    for plateau in waiting.values():
        plateau.judge(loss)
    # What LambdaLR has set for the coming step was reckoned before this loss was known.
    rates = [
        base * factor(scheduler.last_epoch)
        for factor, base in zip(scheduler.lr_lambdas, scheduler.base_lrs, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates

"""The learning rate over a run: against torch's schedulers, along a warm-up, after a resume."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from torch.optim import lr_scheduler

from phalanx.recipes import schedules
from phalanx.recipes.mnist import MnistSettings
from phalanx.recipes.schedules import Decay, OneCycle, Plateau, judge, scheduler_for

PER_EPOCH, EPOCHS = 5, 12


def _optimizer(groups: int = 1) -> torch.optim.SGD:
    weights = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
    return torch.optim.SGD(weights, lr=0.5)


def _rates(scheduler: Any, losses: list[float]) -> list[float]:
    """The learning rate of every step of a run that has these validation losses."""
    found = []
    for loss in losses:
        for _ in range(PER_EPOCH):
            found.append(scheduler.optimizer.param_groups[0]["lr"])
            scheduler.optimizer.step()
            scheduler.step()
        judge(scheduler, loss)
    return found


def _of_torch(make: Callable[[Any], Any], losses: list[float]) -> list[float]:
    """The same of one of torch's that is stepped after each epoch."""
    optimizer, found = _optimizer(), []
    scheduler = make(optimizer)
    for loss in losses:
        found += [optimizer.param_groups[0]["lr"]] * PER_EPOCH
        optimizer.step()
        scheduler.step(*([loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return found


def test_the_examples() -> None:
    assert doctest.testmod(schedules).failed == 0


@pytest.mark.parametrize(("total", "warmup"), [(1, 0.25), (10, 0.0), (840, 0.25), (7, 0.9)])
def test_one_cycle_goes_up_then_down_within_0_and_1(total: int, warmup: float) -> None:
    cycle = OneCycle(total, warmup)
    values = [cycle(step) for step in range(total + 2)]
    assert all(0 <= value <= 1 for value in values)
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert values[total] == pytest.approx(0)
    assert total < 10 or max(values) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "torchs"),
    [
        ({"schedule": "step", "step_epochs": 4, "gamma": 0.3}, lambda o: lr_scheduler.StepLR(o, 4, 0.3)),
        ({"schedule": "step"}, lambda o: lr_scheduler.StepLR(o, EPOCHS // 3)),
        ({"schedule": "multistep", "milestones": "2, 7"}, lambda o: lr_scheduler.MultiStepLR(o, [2, 7])),
        ({"schedule": "multistep"}, lambda o: lr_scheduler.MultiStepLR(o, [EPOCHS // 2, EPOCHS * 3 // 4])),
        ({"schedule": "exponential", "gamma": 0.8}, lambda o: lr_scheduler.ExponentialLR(o, 0.8)),
        ({"schedule": "exponential"}, lambda o: lr_scheduler.ExponentialLR(o, 0.01 ** (1 / EPOCHS))),
        ({"schedule": "constant"}, lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0)),
        (
            {"schedule": "plateau", "plateau_epochs": 2, "gamma": 0.2},
            lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.2, patience=2),
        ),
    ],
)
def test_it_is_torchs(settings: dict[str, Any], torchs: Callable[[Any], Any]) -> None:
    losses = [1.0, 0.7, 0.6, 0.6, 0.65, 0.62, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    ours = scheduler_for(_optimizer(), MnistSettings(epochs=EPOCHS, **settings), PER_EPOCH)
    rates = _rates(ours, losses)
    assert rates == pytest.approx(_of_torch(torchs, losses))
    assert settings["schedule"] == "constant" or min(rates) < 0.5


def test_cosine_is_torchs_by_the_step() -> None:
    ours = scheduler_for(_optimizer(), MnistSettings(epochs=EPOCHS, schedule="cosine"), PER_EPOCH)
    theirs = lr_scheduler.CosineAnnealingLR(_optimizer(), EPOCHS * PER_EPOCH)
    for _ in range(EPOCHS * PER_EPOCH):
        assert ours.get_last_lr() == pytest.approx(theirs.get_last_lr())
        for scheduler in (ours, theirs):
            scheduler.optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("name", ["cosine", "step", "multistep", "exponential", "plateau", "constant"])
def test_a_warm_up_rises_along_a_line_to_the_peak(name: Any) -> None:
    settings = MnistSettings(epochs=EPOCHS, schedule=name, warmup_epochs=2.0)
    rates = _rates(scheduler_for(_optimizer(), settings, PER_EPOCH), [1.0 / n for n in range(1, EPOCHS + 1)])
    steps = 2 * PER_EPOCH
    assert rates[: steps + 1] == pytest.approx([0.5 * (0.01 + 0.99 * n / steps) for n in range(steps + 1)])
    assert max(rates) == pytest.approx(0.5)


def test_one_cycle_takes_a_warm_up_in_epochs() -> None:
    rates = _rates(
        scheduler_for(_optimizer(), MnistSettings(epochs=EPOCHS, warmup_epochs=4.0), PER_EPOCH),
        [1.0] * EPOCHS,
    )
    assert rates.index(max(rates)) == 4 * PER_EPOCH


@pytest.mark.parametrize("name", ["one-cycle", "cosine", "step", "multistep", "exponential", "plateau"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_run_that_goes_on_has_the_rates_of_one_that_was_not_cut(name: Any, groups: int) -> None:
    losses = [1.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]
    settings = MnistSettings(epochs=EPOCHS, schedule=name, plateau_epochs=1)
    whole = _rates(scheduler_for(_optimizer(groups), settings, PER_EPOCH), losses)
    first, again = _optimizer(groups), _optimizer(groups)
    before = scheduler_for(first, settings, PER_EPOCH)
    rates = _rates(before, losses[:5])
    after = scheduler_for(again, settings, PER_EPOCH)
    again.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    assert rates + _rates(after, losses[5:]) == whole
    assert len(set(whole)) > 1


def test_a_run_of_more_epochs_follows_the_longer_schedule() -> None:
    short, long = (MnistSettings(epochs=epochs, schedule="cosine") for epochs in (EPOCHS, 2 * EPOCHS))
    before, after = (
        scheduler_for(_optimizer(), short, PER_EPOCH),
        scheduler_for(_optimizer(), long, PER_EPOCH),
    )
    _rates(before, [1.0] * EPOCHS)
    after.load_state_dict(before.state_dict())
    after.optimizer.step()
    after.step()
    assert after.get_last_lr()[0] == pytest.approx(0.25, rel=0.1)  # half of the way down, not at its end


def test_nothing_waits_without_a_plateau() -> None:
    scheduler = scheduler_for(_optimizer(), MnistSettings(epochs=EPOCHS), PER_EPOCH)
    rate = scheduler.get_last_lr()
    judge(scheduler, 1e9)
    judge(scheduler, None)
    assert scheduler.get_last_lr() == rate


def test_published_steps_of_a_run() -> None:
    steps = Decay("step", total_steps=90, steps_per_epoch=1)
    assert [round(steps(step), 6) for step in (0, 29, 30, 60, 89)] == [1.0, 1.0, 0.1, 0.01, 0.01]
    assert Plateau(3)(0) == 1.0

"""One cycle: up, down, and a function of the step alone."""

from __future__ import annotations

import doctest

import pytest

from phalanx.recipes import schedules
from phalanx.recipes.schedules import OneCycle


def test_the_example() -> None:
    assert doctest.testmod(schedules).failed == 0


@pytest.mark.parametrize(("total", "warmup"), [(1, 0.25), (10, 0.0), (840, 0.25), (7, 0.9)])
def test_it_goes_up_then_down_within_0_and_1(total: int, warmup: float) -> None:
    cycle = OneCycle(total, warmup)
    values = [cycle(step) for step in range(total + 2)]
    assert all(0 <= value <= 1 for value in values)
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert values[total] == pytest.approx(0)
    assert total < 10 or max(values) == pytest.approx(1, abs=1e-3)

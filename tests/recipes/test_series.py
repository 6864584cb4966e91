"""The passengers, their windows, and forecasts against ones reckoned by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.recipes.series import (
    Series,
    airline_passengers,
    all_at_once,
    one_month_ahead,
    rmse,
    seasonal_naive,
)


def _ramp(months: int = 30, known: int = 18) -> Series:
    return Series(torch.arange(months, dtype=torch.float64), 3, 2000, known, "a ramp")


def _next(values: Tensor, months: Tensor) -> Tensor:
    """Goes on as the last two values did; proves along the way which months it is told."""
    assert values.shape == months.shape
    assert ((values + 1 + 3) % 12 == months).all()
    return 2 * values[:, -1] - values[:, -2]


def test_the_passengers_are_box_and_jenkins_series() -> None:
    series = airline_passengers(100)
    assert len(series.values) == 144
    assert series.values[[0, 1, 99, 143]].tolist() == [112, 118, 348, 432]
    assert (series.first_month, series.first_year) == (0, 1949)
    assert len(series.held_out) == 44
    assert "100 months to train on, 44 to forecast" in series.described()


def test_windows_hold_no_month_that_is_to_be_forecast() -> None:
    values, months = _ramp().windows(5)
    assert values.shape == months.shape == (13, 6)
    assert values.max() == 17
    assert values[2].tolist() == [2, 3, 4, 5, 6, 7]
    assert months[8].tolist() == [11, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("forecast", [one_month_ahead, all_at_once])
def test_a_ramp_is_forecast_exactly(forecast) -> None:  # type: ignore[no-untyped-def]
    series = _ramp()
    assert forecast(series, 4, _next).tolist() == series.held_out.tolist()


def test_one_forecast_is_made_from_true_values_the_other_from_forecasts() -> None:
    series = _ramp()
    double = lambda values, months: 2 * values[:, -1]  # noqa: E731
    assert one_month_ahead(series, 4, double).tolist() == [2.0 * value for value in range(17, 29)]
    assert all_at_once(series, 4, double).tolist() == [17 * 2.0**power for power in range(1, 13)]


def test_the_naive_forecasts_are_a_year_old() -> None:
    series = _ramp(months=34, known=18)
    ahead, again = seasonal_naive(series)
    assert ahead.tolist() == [float(value) for value in range(6, 22)]
    assert again.tolist() == [*map(float, range(6, 18)), 6, 7, 8, 9]
    assert rmse(ahead, series.held_out) == 12
    assert rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0])) == pytest.approx((9 / 2) ** 0.5)

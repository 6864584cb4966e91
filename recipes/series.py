"""A monthly series, cut into windows, so that ranks can share it; forecasts, and the one that needs no network."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

AIRLINE_FILE = Path(__file__).parent / "data" / "airpassengers.csv"
MONTHS = 12


@dataclass(frozen=True)
class Series:
    """Values month by month, the first ``train_months`` of them to train on.

    Args:
        values: Float64, one per month.
        first_month: Of the first value, 0 for January.
        first_year: Of the first value.
        train_months: How many are known.
        source: Where it came from, for the user.
    """

    values: Tensor
    first_month: int
    first_year: int
    train_months: int
    source: str

    def month(self, index: Tensor) -> Tensor:
        """The month of the year, 0 to 11, of the values at ``index``."""
        return (index + self.first_month) % MONTHS

    @property
    def held_out(self) -> Tensor:
        """What is to be forecast."""
        return self.values[self.train_months :]

    def windows(self, length: int) -> tuple[Tensor, Tensor]:
        """Every stretch of ``length + 1`` months that are known: values and months, both [n, length + 1]."""
        starts = torch.arange(self.train_months - length)
        index = starts[:, None] + torch.arange(length + 1)
        return self.values[index], self.month(index)

    def described(self) -> str:
        """One line for the user."""
        return f"{self.source}: {self.train_months} months to train on, {len(self.held_out)} to forecast"


def airline_passengers(train_months: int) -> Series:
    """The 144 months of Box and Jenkins' series G, in thousands of passengers."""
    with AIRLINE_FILE.open(newline="", encoding="ascii") as file:
        rows = list(csv.DictReader(file))
    year, month = (int(part) for part in rows[0]["month"].split("-"))
    values = torch.tensor([float(row["passengers"]) for row in rows], dtype=torch.float64)
    return Series(values, month - 1, year, train_months, "international airline passengers, 1949 to 1960")


def one_month_ahead(series: Series, length: int, predict: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The held-out months, each forecast from the true values before it.

    Args:
        series: What to forecast.
        length: Months that ``predict`` is shown.
        predict: Values [n, length] and the months of the values that follow each, [n, length] -> the value
            after each window, [n].
    """
    ends = torch.arange(series.train_months, len(series.values))
    index = ends[:, None] - length + torch.arange(length)
    return predict(series.values[index], series.month(index + 1))


def all_at_once(series: Series, length: int, predict: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The held-out months, forecast from the known ones alone: each forecast is an input of the next."""
    values = series.values[: series.train_months]
    while len(values) < len(series.values):
        index = torch.arange(len(values) - length, len(values))
        following = predict(values[index][None], series.month(index + 1)[None])
        values = torch.cat([values, following.to(values.dtype)])
    return values[series.train_months :]


def seasonal_naive(series: Series) -> tuple[Tensor, Tensor]:
    """What needs no network: the true value of a year before, and the last known year over and over."""
    ahead = series.values[series.train_months - MONTHS : -MONTHS]
    year = series.values[series.train_months - MONTHS : series.train_months]
    return ahead, year.repeat(math.ceil(len(series.held_out) / MONTHS))[: len(series.held_out)]


def rmse(forecast: Tensor, truth: Tensor) -> float:
    """Root of the mean squared error, in the unit of the values."""
    return float((forecast.double() - truth.double()).square().mean().sqrt())

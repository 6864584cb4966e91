"""The picture of a forecast beside what came true."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from phalanx.recipes.curves import write_picture
from phalanx.recipes.series import Series, seasonal_naive


def draw_forecast(series: Series, ahead: Tensor, at_once: Tensor, picture: Path) -> bool:
    """Draw the series, both forecasts and the seasonal-naive one; False, with a word, without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError:
        print("no forecast.png: matplotlib is missing (pip install 'phalanx[recipes]')", flush=True)
        return False
    years = [series.first_year + (series.first_month + i) / 12 for i in range(len(series.values))]
    held_out = years[series.train_months :]
    figure = matplotlib.figure.Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(years, series.values.tolist(), "k-", label="passengers")
    axes.plot(held_out, ahead.tolist(), "C0.-", label="one month ahead")
    axes.plot(held_out, at_once.tolist(), "C1.-", label="all at once")
    axes.plot(held_out, seasonal_naive(series)[1].tolist(), "C7:", label="the last known year again")
    axes.axvline(years[series.train_months - 1] + 1 / 24, color="C7", linestyle="--")
    axes.set_ylabel("thousands a month")
    axes.grid(alpha=0.3)
    axes.legend()
    write_picture(figure, picture)
    return True

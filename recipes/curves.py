"""The picture of a run: its scores over its steps."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.recipes.runs import read_metrics

KEYS = ("split", "epoch", "step")  # of a line of metrics.jsonl; the rest are scores


def draw_curves(metrics: Path, picture: Path, title: str) -> bool:
    """Draw each score over the steps from metrics.jsonl; False, with a word, without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError:
        print("no curves: matplotlib is missing (pip install 'phalanx[recipes]')", flush=True)
        return False
    lines = read_metrics(metrics)
    scores = (name for line in lines for name, value in line.items() if not isinstance(value, list))
    names = [name for name in dict.fromkeys(scores) if name not in KEYS] or ["loss"]
    figure = matplotlib.figure.Figure(
        figsize=(10, 4), layout="constrained"
    )  # no pyplot: no display, no global state
    for axes, value in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for split, style in (("train", "-"), ("validation", ".-"), ("test", "*")):
            points = [
                (line["step"], line[value]) for line in lines if line["split"] == split and value in line
            ]
            if points:
                faint = 0.5 if split == "train" else 1.0
                axes.plot(*zip(*points, strict=True), style, label=split, alpha=faint)
        axes.set_xlabel("step")
        axes.set_ylabel(value.replace("_", " "))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    write_picture(figure, picture)
    return True


def write_picture(figure: Any, picture: Path) -> None:
    """Write a matplotlib figure as PNG, replacing an earlier one at one stroke."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    temporary = picture.with_name(picture.name + ".tmp")
    temporary.write_bytes(content.getvalue())
    os.replace(temporary, picture)


def picture_of(figure: Any) -> Any:
    """A matplotlib figure as an array of bytes [rows, columns, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]

"""What a model is judged by: numbers by name, such as loss and accuracy, and how they are told."""

from __future__ import annotations

import math
from collections.abc import Mapping

Scores = dict[str, float]


def judged(scores: Mapping[str, float]) -> bool:
    """Whether there was anything to judge: without a sample every score is nan."""
    return not all(math.isnan(value) for value in scores.values())


def told(scores: Mapping[str, float]) -> str:
    """For the user, in their order.

    >>> told({"loss": 0.5, "accuracy": 0.75})
    'loss 0.5000, accuracy 75.00%'
    """
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.2%}"
        if name.endswith("accuracy")
        else f"{name.replace('_', ' ')} {value:.4f}"
        for name, value in scores.items()
    )

"""Sums over every rank's samples that have the same last digit on any number of ranks, given virtual ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.dist import all_reduce_sum
from phalanx.dist.steps import StepLoader


class ShareSums:
    """Sums kept apart for each share of a loader's steps, and added up in the order of the shares.

    What an all-reduce adds up has other last digits for other numbers of ranks. With virtual ranks a share is
    a virtual rank's, whichever rank plays it: the batches are the same, and so is every bit of their sum.

    Args:
        loader: Whose batches are summed over.
        columns: How many numbers each batch has.
    """

    def __init__(self, loader: StepLoader, columns: int) -> None:
        self._loader = loader
        device = loader.device if loader.device.type == "cuda" else "cpu"  # mps has no float64
        self._sums = torch.zeros(loader.plan.shards, columns, dtype=torch.float64, device=device)

    def add(self, *values: float | Tensor) -> None:
        """Add the numbers of the batch that the loader yielded last, without waiting for the device."""
        row = self._sums[self._loader.virtual_rank]
        for column, value in enumerate(values):
            row[column] += value.detach().to(row.device) if isinstance(value, Tensor) else value

    def totals(self) -> list[float]:
        """Each column's sum over all shares. Collective."""
        # Other ranks have zeros where this one has numbers, and adding zero changes no bit.
        shares: list[list[float]] = all_reduce_sum(self._sums).tolist()
        return [sum(column) for column in zip(*shares, strict=True)]

    def reset(self) -> None:
        """Start over."""
        self._sums.zero_()

"""Metrics over all ranks: sums and counts kept here, reduced exactly, once."""

from __future__ import annotations

import contextlib
from typing import cast

import numpy as np
import torch

from phalanx.dist.arguments import require_int, require_real, short

Number = int | float | torch.Tensor


def _settle(value: torch.Tensor) -> torch.Tensor:
    """Detached, and on a device that has float64 and int64."""
    value = value.detach()
    return value.cpu() if value.device.type == "mps" else value


def _add(total: Number, more: Number) -> Number:
    """The sum, without waiting for a device: both may be tensors of different ones."""
    if isinstance(total, torch.Tensor) and isinstance(more, torch.Tensor) and more.device != total.device:
        more = more.to(total.device, non_blocking=True)
    return total + more


def _number(value: object) -> float:
    """A number that may be infinite or NaN, as a loss may: it shows in the mean."""
    plain = isinstance(value, (int, float))
    if plain or (
        isinstance(value, (np.number, np.bool_, np.ndarray))
        and value.ndim == 0
        and value.dtype.kind in "fiub"
    ):
        with contextlib.suppress(OverflowError):
            return float(cast("float", value))
    raise ValueError(f"value={short(value)}: a number or a tensor is needed.\nFix: torch.as_tensor(value)")


def _weights_for(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    try:
        return weights.to(values.device, torch.float64, non_blocking=True).expand_as(values)
    except RuntimeError:
        raise ValueError(
            f"weight of shape {tuple(weights.shape)} for a value of shape {tuple(values.shape)}: they do not match.\n"
            "Fix: one weight for each element, or one number"
        ) from None


class Mean:
    """The weighted mean of what all ranks have seen, as if one process had seen it all.

    ::

        loss = Mean()
        for x, y in loader:
            loss.update(loss_fn(model(x), y), weight=loader.local_count)
        print(loss.compute())              # on every rank

    Sums are float64 and stay on the device of the values: an update never waits for a GPU.
    """

    def __init__(self) -> None:
        self._sum: Number = 0.0
        self._weight: Number = 0
        self.reset()

    def update(self, value: Number, weight: Number = 1) -> None:
        """Add a value that counts ``weight`` times; of a larger tensor, each element does.

        Args:
            value: A number, or a tensor of any shape.
            weight: How many samples the value is the mean of. 0, as for a stand-in batch, adds nothing
                whatever the value. A tensor weighs element by element.

        Raises:
            ValueError: ``weight`` is negative or no number, or ``value`` is none.
        """
        if not isinstance(weight, torch.Tensor):
            require_real(
                "weight", weight, at_least=0, fix="the number of samples that the value is the mean of"
            )
            if weight == 0:
                return
        if not isinstance(value, torch.Tensor):
            value = _number(value)
            if not isinstance(weight, torch.Tensor):
                self._sum = _add(self._sum, value * weight)
                self._weight = _add(self._weight, weight)
                return
        values = _settle(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
        if values.is_complex():
            raise ValueError(
                f"value={short(value)}: a mean is of real numbers.\nFix: value.abs(), or its real part"
            )
        values = values.double()
        if isinstance(weight, torch.Tensor):
            weights = _weights_for(values, _settle(weight))
            # Not by the product alone: 0 * nan would be nan.
            values = torch.where(weights > 0, values * weights, 0.0)
            added: Number = weights.sum()
        else:
            values, added = values * weight, weight * values.numel()
        self._sum = _add(self._sum, values.sum())
        self._weight = _add(self._weight, added)

    def compute(self) -> float:
        """The mean over all ranks and updates; nan when nothing was counted.

        Collective: every rank must call it. One all-reduce.
        """
        from phalanx.dist.world import all_reduce_sum

        total, weight = all_reduce_sum(self._sum, self._weight)
        return float(total) / float(weight) if float(weight) else float("nan")

    def reset(self) -> None:
        """Start over."""
        self._sum, self._weight = 0.0, 0


class Accuracy:
    """The share of samples, over all ranks, whose target is among the ``topk`` highest scores.

    ::

        accuracy = Accuracy()
        for x, y in test_loader:
            accuracy.update(model(x), y)
        print(accuracy.compute())          # on every rank; 0 to 1

    Args:
        topk: A prediction is right when the target is among that many highest scores.

    Raises:
        ValueError: ``topk`` is less than 1.
    """

    def __init__(self, topk: int = 1) -> None:
        self.topk = require_int("topk", topk, at_least=1)
        self._correct: Number = 0
        self._count = 0

    def update(self, predictions: torch.Tensor, targets: torch.Tensor, *, count: int | None = None) -> None:
        """Add a batch, without waiting for the device.

        Args:
            predictions: Scores of shape ``(N, classes, ...)`` for targets of shape ``(N, ...)``, or
                predicted classes of the targets' shape.
            targets: Integers.
            count: How many samples of the batch are real, from the start; by default all. In a loop
                where stand-in batches occur: ``count=loader.local_count``.

        Raises:
            ValueError: The shapes do not match, or there are fewer than ``topk`` classes.
        """
        for name, tensor in (("predictions", predictions), ("targets", targets)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.is_complex():
                raise ValueError(
                    f"{name}={short(tensor)}: a tensor with one row per sample is needed.\n"
                    "Fix: accuracy.update(model(x), y)"
                )
        if count is not None:
            count = require_int("count", count, at_least=0)
            if count > len(targets):
                raise ValueError(
                    f"count={count} of a batch of {len(targets)} samples: it counts the real ones among them.\n"
                    "Fix: count=loader.local_count"
                )
            predictions, targets = predictions[:count], targets[:count]
        predictions, targets = _settle(predictions), _settle(targets)
        hits = self._hits(predictions, targets)
        self._correct = _add(self._correct, hits.sum())
        self._count += targets.numel()

    def _hits(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scored = predictions.dim() == targets.dim() + 1
        if scored and predictions.shape[:1] + predictions.shape[2:] == targets.shape:
            if self.topk > predictions.shape[1]:
                raise ValueError(f"Accuracy(topk={self.topk}) of scores for {predictions.shape[1]} classes.")
            if self.topk == 1:
                return predictions.argmax(dim=1) == targets
            best = predictions.topk(self.topk, dim=1).indices
            return (best == targets.unsqueeze(1)).any(dim=1)
        if (
            predictions.shape == targets.shape
            and not targets.is_floating_point()
            and not predictions.is_floating_point()
            and self.topk == 1
        ):
            return predictions == targets
        raise ValueError(
            f"Accuracy(topk={self.topk}) got {predictions.dtype} predictions of shape {tuple(predictions.shape)} for "
            f"targets of shape {tuple(targets.shape)}: neither scores (N, classes, ...) nor predicted classes.\n"
            "Fix: pass the model's output, or for one score per sample (scores > 0).long()"
        )

    def compute(self) -> float:
        """The accuracy over all ranks and updates, 0 to 1; nan when nothing was counted.

        Collective: every rank must call it. One all-reduce.
        """
        from phalanx.dist.world import all_reduce_sum

        correct, count = all_reduce_sum(self._correct, self._count)
        return float(correct) / count if count else float("nan")

    def reset(self) -> None:
        """Start over."""
        self._correct, self._count = 0, 0

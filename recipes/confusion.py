"""Which classes a model takes for which, and the mistakes that it is surest of, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.dist import all_reduce_sum, gather_objects

MISTAKES = 25  # that are shown
MOST_CLASSES = 100  # of a matrix that can still be read


class Confusion:
    """Counts of (true class, said class), and the images of the surest mistakes; for `training.evaluate`.

    Of more than 100 classes there are no counts: `counts` stays empty. Which mistakes are shown depends on the model's outputs alone, not on the number of ranks.

    >>> confusion = Confusion(["cat", "dog"])
    >>> outputs, images = torch.tensor([[9.0, 1.0], [8.0, 2.0], [0.0, 5.0]]), torch.zeros(3, 1, 2, 2)
    >>> confusion.update(outputs, torch.tensor([0, 1, 1]), images)
    >>> confusion.gather()
    >>> confusion.counts
    [[1, 0], [1, 1]]
    >>> [(mistake.label, mistake.said) for mistake in confusion.mistakes]
    [(1, 0)]

    Args:
        names: Of the classes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.counts: list[list[int]] = []
        self.mistakes: list[Mistake] = []
        self._sums = torch.zeros(len(names), len(names), dtype=torch.int64)

    def update(self, outputs: Tensor, labels: Tensor, images: Tensor) -> None:
        """Take in a batch: scores [n, classes], labels [n], images [n, channels, rows, columns]."""
        said, classes = outputs.argmax(1), len(self.names)
        cells = torch.bincount(labels * classes + said, minlength=classes**2).cpu()
        self._sums += cells.view(classes, classes)
        wrong = (said != labels).nonzero().flatten()
        sureness = outputs[wrong].float().softmax(1).amax(1)
        for place, sure in zip(wrong.tolist(), sureness.tolist(), strict=True):
            self.mistakes.append(Mistake(sure, int(labels[place]), int(said[place]), images[place]))
        self.mistakes = _surest(self.mistakes)

    def gather(self) -> None:
        """Put the ranks' counts and mistakes together. Collective."""
        counts = all_reduce_sum(self._sums).tolist()
        self.counts = counts if len(self.names) <= MOST_CLASSES else []
        for mistake in self.mistakes:
            mistake.image = mistake.image.float().cpu().clone()  # not the batch behind it
        everywhere = gather_objects(self.mistakes)
        self.mistakes = _surest([mistake for mistakes in everywhere for mistake in mistakes])

    def draw(self, folder: Path) -> list[tuple[str, Any]]:
        """Write confusion.png and mistakes.png into a run's folder, each if there is something; (name, figure) of each."""
        try:
            import matplotlib.figure
        except ImportError:  # the curves have said so
            return []
        from phalanx.recipes.curves import write_picture

        figures = []
        if any(map(sum, self.counts)):
            figures.append(("confusion", self._matrix(matplotlib.figure.Figure)))
        if self.mistakes:
            figures.append(("mistakes", self._grid(matplotlib.figure.Figure)))
        for name, figure in figures:
            write_picture(figure, folder / f"{name}.png")
        return figures

    def _matrix(self, make_figure: Any) -> Any:
        """Shares of each true class by colour; counts in the cells where they can be read."""
        counts = torch.tensor(self.counts)
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        classes = len(self.names)
        side = min(max(4.0, 0.5 * classes), 14.0)
        figure = make_figure(figsize=(side + 1, side), layout="constrained")
        axes = figure.subplots()
        figure.colorbar(
            axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1), label="share of the true class"
        )
        axes.set(xlabel="said", ylabel="true", xticks=range(classes), yticks=range(classes))
        axes.set_xticklabels(self.names, rotation=90 if max(map(len, self.names)) > 2 else 0)
        axes.set_yticklabels(self.names)
        for row in range(classes if classes <= 30 else 0):
            for column in range(classes):
                if count := self.counts[row][column]:
                    colour = "white" if shares[row, column] > 0.5 else "black"
                    axes.text(column, row, count, ha="center", va="center", color=colour, fontsize=7)
        return figure

    def _grid(self, make_figure: Any) -> Any:
        figure = make_figure(figsize=(7, 7.5), layout="constrained")
        for axes, mistake in zip(figure.subplots(5, 5).flat, self.mistakes, strict=False):
            image = mistake.image
            low, high = image.min(), image.max()
            shown = ((image - low) / (high - low).clamp(min=1e-6)).movedim(0, -1)
            axes.imshow(shown.squeeze(-1).numpy(), cmap="gray")
            title = (
                f"{self.names[mistake.said]}, not {self.names[mistake.label]}\n{mistake.sureness:.0%} sure"
            )
            axes.set_title(title, fontsize=7)
        for axes in figure.axes:
            axes.axis("off")
        return figure


class Mistake:
    """An image whose class was not the one said, and how sure the model was of that: 0 to 1."""

    def __init__(self, sureness: float, label: int, said: int, image: Tensor) -> None:
        self.sureness, self.label, self.said, self.image = sureness, label, said, image


def _surest(mistakes: list[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: -mistake.sureness)[:MISTAKES]

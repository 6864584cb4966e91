"""Random changes to one image [channels, rows, columns], drawn from torch's global generator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class RandomShift:
    """Move the image by up to ``pixels`` in each direction; what comes in from outside is background."""

    pixels: int = 2

    def __call__(self, image: Tensor) -> Tensor:
        down, right = torch.randint(0, 2 * self.pixels + 1, (2,)).tolist()
        # The corner is background in every set of handwriting and clothes; zero is not, once normalised.
        padded = F.pad(image, (self.pixels,) * 4, value=float(image.min()))
        return padded[:, down : down + image.shape[1], right : right + image.shape[2]]


@dataclass(frozen=True)
class RandomAffine:
    """Turn, stretch, slant and move the image a little, as one hand differs from another.

    Args:
        amount: Largest turn (radians), relative stretch and slant.
        pixels: Largest shift in each direction.
    """

    amount: float = 0.15
    pixels: float = 0.7

    def __call__(self, image: Tensor) -> Tensor:
        turn, stretch, slant, right, down = torch.empty(5).uniform_(-1, 1).tolist()
        turn, stretch, slant = self.amount * turn, 1 + self.amount * stretch, self.amount * slant
        rows, columns = image.shape[1:]
        matrix = torch.tensor(
            [
                [stretch * (1 - turn * turn / 2), slant - turn, 2 * self.pixels * right / columns],
                [turn, (1 - turn * turn / 2) / stretch, 2 * self.pixels * down / rows],
            ]
        )
        grid = F.affine_grid(matrix[None], [1, *image.shape], align_corners=False)
        return F.grid_sample(image[None], grid, padding_mode="border", align_corners=False)[0]

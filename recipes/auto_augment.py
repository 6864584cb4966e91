"""AutoAugment's policies for CIFAR-10: pairs of operations that a search found, carried out on whole batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from phalanx.dist.augment import Parameters, rows_to
from phalanx.dist.augment_policies import operation

if TYPE_CHECKING:
    from phalanx.dist.augment_draws import Draws

_BINS = 10  # of strength
_SIGNED = {
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
}

#: Each policy is two operations: name, chance, bin. As in the paper's table 7; "invert" is to solarize from 0.
POLICIES: tuple[tuple[tuple[str, float, int], tuple[str, float, int]], ...] = (
    (("invert", 0.1, 0), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 0), ("equalize", 0.9, 0)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 0), ("equalize", 0.5, 0)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 0), ("autocontrast", 0.4, 0)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 0)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 0), ("equalize", 0.6, 0)),
    (("color", 0.9, 9), ("equalize", 0.6, 0)),
    (("autocontrast", 0.8, 0), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 0)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 0), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 0), ("invert", 0.1, 0)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 0)),
)


def _magnitude(name: str, strength: int, side: int) -> tuple[str, float]:
    """The operation to carry out and its unsigned magnitude, in `operation`'s units."""
    share = strength / (_BINS - 1)
    if name == "invert":
        return "solarize", 0.0
    if name == "posterize":
        return name, float(8 - round(4 * share))
    if name == "solarize":
        return name, 1.0 - share
    most = {"shear_x": 0.3, "shear_y": 0.3, "rotate": 30.0, "autocontrast": 0.0, "equalize": 0.0}
    if name.startswith("translate"):
        return name, share * 150 / 331 * side
    return name, share * most.get(name, 0.9)


@dataclass(frozen=True)
class AutoAugment:
    """AutoAugment for CIFAR-10 (Cubuk et al., 2018, arXiv:1805.09501): one of 25 pairs of operations for each image.

    Operations and magnitudes are those of ``torchvision.transforms.v2.AutoAugment``; nearest pixels. Images are
    uint8, or floating point in 0..1, of 1 or 3 channels: it goes before `Normalize`.
    """

    fill: float = 0.0

    def draw(self, draws: Draws, height: int, width: int) -> Parameters:
        """For both turns: the policy, or -1 where chance leaves its operation out, and the direction."""
        policies = draws.integers(len(POLICIES))
        parameters = []
        for turn in range(2):
            chances = np.array([policy[turn][1] for policy in POLICIES])
            done = draws.uniform() < chances[policies]
            parameters += [np.where(done, policies, -1), 1 - 2 * draws.integers(2)]
        return tuple(parameters)

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        images = images.clone()
        for turn in range(2):
            policies, signs = parameters[2 * turn : 2 * turn + 2]
            for number, sign in sorted(set(zip(policies.tolist(), signs.tolist(), strict=True))):
                if number < 0:
                    continue
                name, _, strength = POLICIES[number][turn]
                side = images.shape[-1 if name == "translate_x" else -2]
                name, magnitude = _magnitude(name, strength, side)
                rows = rows_to(np.flatnonzero((policies == number) & (signs == sign)), images)
                magnitude *= sign if name in _SIGNED else 1
                images[rows] = operation(name, images[rows], magnitude, self.fill)
        return images

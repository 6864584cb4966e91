"""Augmentations keep shape and content, and draw from the global generator alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phalanx.recipes.augmentations import RandomAffine, RandomShift


@pytest.mark.parametrize("change", [RandomShift(1), RandomShift(2), RandomAffine()])
@pytest.mark.parametrize("side", [8, 28])
def test_shape_stays_and_the_generator_decides(change: Callable[[Tensor], Tensor], side: int) -> None:
    image = torch.rand(1, side, side, generator=torch.Generator().manual_seed(0))
    seen = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        seen.append(change(image))
    assert seen[0].shape == image.shape
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_a_shift_moves_the_image_by_whole_pixels_onto_background() -> None:
    image = torch.full((1, 8, 8), -0.8)
    image[0, 3, 4] = 2.0
    places = set()
    for seed in range(200):
        torch.manual_seed(seed)
        moved = RandomShift(1)(image)
        assert sorted(moved.flatten().tolist()) == sorted(image.flatten().tolist())
        places.add(divmod(int(moved.argmax()), 8))
    assert places == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}


def test_an_affine_change_of_nothing_is_the_identity() -> None:
    image = torch.rand(1, 8, 8)
    assert torch.allclose(RandomAffine(amount=0, pixels=0)(image), image, atol=1e-5)


def test_a_turn_is_a_turn() -> None:
    """A quarter turn's direction aside, a bar that is turned stays as heavy and about as long."""
    image = torch.zeros(1, 28, 28)
    image[0, 4:24, 13:15] = 1.0
    for seed in range(20):
        torch.manual_seed(seed)
        turned = RandomAffine(amount=0.15, pixels=1)(image)
        assert turned.sum().item() == pytest.approx(40, rel=0.25)

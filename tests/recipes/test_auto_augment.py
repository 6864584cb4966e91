"""AutoAugment: torchvision's policies and magnitudes, each image by its own position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.dist import augment_batch
from phalanx.recipes.auto_augment import POLICIES, AutoAugment, _magnitude

# Imported here and not within a test: it sets variables of the environment.
transforms = pytest.importorskip("torchvision.transforms", reason="compared with torchvision's tables")

THEIRS = {
    "Invert": "invert", "Contrast": "contrast", "Rotate": "rotate", "TranslateX": "translate_x", "TranslateY": "translate_y",
    "Sharpness": "sharpness", "ShearY": "shear_y", "AutoContrast": "autocontrast", "Equalize": "equalize",
    "Posterize": "posterize", "Color": "color", "Brightness": "brightness", "Solarize": "solarize",
}  # fmt: skip


def test_policies_and_magnitudes_are_torchvisions() -> None:
    theirs = transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10)
    assert [
        tuple((THEIRS[name], p, strength or 0) for name, p, strength in policy) for policy in theirs.policies
    ] == list(POLICIES)
    space = theirs._augmentation_space(10, (32, 32))
    for name, ours in THEIRS.items():
        magnitudes = space[name][0]
        for strength in range(10) if magnitudes.ndim else ():
            expected = float(magnitudes[strength]) / (255 if name == "Solarize" else 1)
            assert _magnitude(ours, strength, 32)[1] == pytest.approx(expected)


def test_each_policy_acts_and_a_row_is_its_own() -> None:
    images = torch.randint(
        0, 256, (200, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    positions = np.arange(200)
    whole = augment_batch(images, [AutoAugment()], key=3, positions=positions)
    assert whole.dtype == torch.uint8
    changed = (whole != images).flatten(1).any(1)
    assert 0.6 < changed.float().mean() < 1.0  # some by chance not at all
    part = augment_batch(images[50:90], [AutoAugment()], key=3, positions=positions[50:90])
    assert torch.equal(part, whole[50:90])


def test_invert_and_two_directions() -> None:
    images = torch.full((2, 3, 8, 8), 10, dtype=torch.uint8)
    images[:, :, :, 4:] = 200
    none, forwards = np.array([-1, -1]), np.array([1, 1])
    inverted = AutoAugment().apply(images, (np.array([0, 0]), forwards, none, forwards))
    assert torch.equal(inverted, 255 - images)
    moved = AutoAugment().apply(images, (none, forwards, np.array([1, 1]), np.array([1, -1])))
    assert not torch.equal(moved[0], moved[1])

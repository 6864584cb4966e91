"""Colour images of 32 x 32 in memory: CIFAR, Fashion-MNIST in that form, and made-up ones; split, with their colours' mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.dist import rank_zero_first
from phalanx.recipes import cifar_files, datasets
from phalanx.recipes.settings import SettingsError

FASHION_NAMES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class ColorImages:
    """A data set in three parts; images are bytes [n, 3, 32, 32]."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]  # of each colour, as values in 0..1
    std: tuple[float, ...]
    source: str  # where it came from, for the user

    def described(self) -> str:
        """One line for the user."""
        held_out = f", {len(self.validation[0])} held out" if len(self.validation[0]) else ""
        return (
            f"{self.source}: {len(self.train[0])} images to train on{held_out}, {len(self.test[0])} to test"
        )


def load(name: str, data_dir: str, download: bool, validation_fraction: float, seed: int) -> ColorImages:
    """The data set of that name, split by the seed.

    Collective: ranks of one node wait while one of them downloads, and a rank that finds no data is an error on
    all of them that names its host.

    Args:
        name: cifar10, cifar100, fashion or fake.
        data_dir: Folder to look in, and to download to.
        download: Fetch what is missing.
        validation_fraction: Share of the training images that is held out, at least 0, below 1.
        seed: Of the choice of those.

    Raises:
        SettingsError: Files are missing or damaged.
    """
    images, labels, test_images, test_labels, names, source = datasets.everywhere(
        lambda: _arrays(name, data_dir, download)
    )
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out = round(validation_fraction * len(images))
    validation_rows, train_rows = shuffled[:held_out].sort().values, shuffled[held_out:].sort().values
    if len(train_rows) == 0:
        raise SettingsError(
            f"--validation-fraction {validation_fraction} leaves nothing to train on.\nFix: a smaller one"
        )
    train_images = images[train_rows]
    mean, std = _mean_and_std(train_images)
    return ColorImages(
        train=(train_images, labels[train_rows]),
        validation=(images[validation_rows], labels[validation_rows]),
        test=(test_images, test_labels),
        class_names=names,
        mean=mean,
        std=std,
        source=source,
    )


_Arrays = tuple[Tensor, Tensor, Tensor, Tensor, tuple[str, ...], str]


def _arrays(name: str, data_dir: str, download: bool) -> _Arrays:
    if name == "fake":
        return (*_fake(), tuple(f"pattern {number}" for number in range(10)), "made-up images")
    if name == "fashion":
        (images, labels, test_images, test_labels), source = datasets.from_files(
            "fashion", data_dir, download
        )
        source += ", as 3 x 32 x 32"
        return _in_color(images), labels, _in_color(test_images), test_labels, FASHION_NAMES, source
    if download:
        with rank_zero_first(per="node"):
            cifar_files.fetch(name, Path(data_dir))
    found = cifar_files.read(name, Path(data_dir))
    source = f"{cifar_files.LAYOUTS[name].torchvision_name} in {found.folder}"
    return (
        found.train_images, found.train_labels, found.test_images, found.test_labels, found.class_names, source
    )  # fmt: skip


def _in_color(images: Tensor) -> Tensor:
    """Grey images of 28 x 28 with a black frame, three times the same colour."""
    return F.pad(images, (2, 2, 2, 2))[:, None].repeat(1, 3, 1, 1)


def _mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each colour; from exact counts, so that every rank has the same bits."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for color in images.unbind(1):
        counts = torch.bincount(color.flatten(), minlength=256).double()
        mean = float((counts * values).sum() / counts.sum())
        means.append(mean)
        deviations.append(max(float((counts * (values - mean) ** 2).sum() / counts.sum()) ** 0.5, 1e-6))
    return tuple(means), tuple(deviations)


def _fake(train_items: int = 1024, test_items: int = 256) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten coarse patterns of colour under noise: quick to learn, the same on every machine, of no other use."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(0, 156, (10, 3, 4, 4), generator=generator)
    patterns = coarse.repeat_interleave(8, 2).repeat_interleave(8, 3)
    labels = torch.randint(0, 10, (train_items + test_items,), generator=generator)
    noise = torch.randint(0, 100, (len(labels), 3, 32, 32), generator=generator)
    images = (patterns[labels] + noise).to(torch.uint8)
    return images[:train_items], labels[:train_items], images[train_items:], labels[train_items:]

"""Images in folders named by their class: decoded no finer than needed, cropped at random, handed out as bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.recipes.settings import SettingsError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, which published weights expect
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")

Box = tuple[float, float, float, float]  # left, upper, right, lower


def random_box(width: int, height: int) -> Box:
    """A box of 8 to 100 % of the area and 3:4 to 4:3, drawn from torch's global generator (Szegedy et al., 2014)."""
    for _ in range(10):
        area, shape, across, down = torch.rand(4, dtype=torch.float64).tolist()
        area = width * height * (0.08 + 0.92 * area)
        ratio = math.exp((2 * shape - 1) * math.log(4 / 3))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, upper = int(across * (width - wide + 1)), int(down * (height - high + 1))
            return left, upper, left + wide, upper + high
    return middle_box(width, height, 1.0)


def middle_box(width: int, height: int, share: float) -> Box:
    """The square in the middle, its side ``share`` of the shorter one."""
    side = min(width, height) * share
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def decode(path: Path, side: int, choose: Callable[[int, int], Box]) -> Any:
    """A box of an image file as PIL image of ``side`` x ``side``.

    The box is chosen first: a JPEG then is decoded at a half, a quarter or an eighth where that is fine enough
    for it, which saves most of the time for large photographs.
    """
    from PIL import Image

    with Image.open(path) as file:
        width, height = file.size
        left, upper, right, lower = choose(width, height)
        finest = min(right - left, lower - upper) / side
        if finest >= 2:
            file.draft("RGB", (math.ceil(width / finest), math.ceil(height / finest)))
        across, down = file.size[0] / width, file.size[1] / height
        box = (left * across, upper * down, right * across, lower * down)
        return file.convert("RGB").resize((side, side), Image.Resampling.BILINEAR, box=box)


def erased(image: Tensor) -> Tensor:
    """A rectangle of a fiftieth to a third of the image in the mean colour (Zhong et al., 2017), in place."""
    rows, columns = image.shape[1:]
    area, shape, across, down = torch.rand(4, dtype=torch.float64).tolist()
    area, ratio = rows * columns * (0.02 + 0.31 * area), math.exp((2 * shape - 1) * math.log(10 / 3))
    wide, high = min(columns, round(math.sqrt(area * ratio))), min(rows, round(math.sqrt(area / ratio)))
    left, top = int(across * (columns - wide + 1)), int(down * (rows - high + 1))
    mean = torch.tensor([round(255 * value) for value in MEAN], dtype=torch.uint8)
    image[:, top : top + high, left : left + wide] = mean.view(3, 1, 1)
    return image


def as_bytes(image: Any) -> Tensor:
    """A PIL image as uint8 [3, rows, columns], in memory as PIL has it: pixel by pixel."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def side_by_side(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """The ``collate_fn``: images stay pixel by pixel in memory (channels last), which is several times faster."""
    images = torch.stack([image.permute(1, 2, 0) for image, _ in samples]).permute(0, 3, 1, 2)
    return images, torch.tensor([label for _, label in samples])


class ImageFolder(Dataset[Any]):
    """``folder/class/image.jpg``: bytes [3, side, side] and the class's number.

    Args:
        folder: With a folder for each class.
        classes: The classes' names in order.
        side: Of the images that are handed out.
        change: For training: what to do to the decoded PIL image after a random crop and flip; None: for tests.
        erase: For training: the chance that a rectangle is blanked.
        middle: For tests: the share of the shorter side that is seen.
    """

    def __init__(
        self,
        folder: Path,
        classes: tuple[str, ...],
        side: int,
        change: Callable[[Any], Any] | None = None,
        *,
        erase: float = 0.0,
        middle: float = 1.0,
    ) -> None:
        self.side, self.change, self.erase, self.middle = side, change, erase, middle
        self.samples = [
            (path, number)
            for number, name in enumerate(classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in ENDINGS
        ]
        if not self.samples:
            raise SettingsError(f"{folder} has no images ({', '.join(ENDINGS)}) in its folders.")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        try:
            if self.change is None:
                return as_bytes(decode(path, self.side, lambda w, h: middle_box(w, h, self.middle))), label
            image = decode(path, self.side, random_box)
        except OSError as error:
            raise OSError(f"{path} cannot be read as an image: {error}") from error
        if float(torch.rand(())) < 0.5:
            from PIL import ImageOps

            image = ImageOps.mirror(image)
        pixels = as_bytes(self.change(image))
        return erased(pixels) if float(torch.rand(())) < self.erase else pixels, label


class FakeImages(Dataset[Any]):
    """Ten coarse patterns of colour under noise, made when they are asked for: of no other use than to be learnt."""

    def __init__(self, items: int, side: int, first: int) -> None:
        self.items, self.side, self.first = items, side, first
        generator = torch.Generator().manual_seed(0)
        self.patterns = torch.randint(0, 156, (10, 3, 4, 4), generator=generator)

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        label = int(torch.randint(0, 10, (), generator=generator))
        rows = torch.arange(self.side) * 4 // self.side
        pattern = self.patterns[label][:, rows][:, :, rows]
        noise = torch.randint(0, 100, pattern.shape, generator=generator)
        return (pattern + noise).to(torch.uint8), label


def class_names(data_dir: Path) -> tuple[str, ...]:
    """Those of ``train``, which ``val`` must have as well.

    Raises:
        SettingsError: A folder is missing, or they differ.
    """
    found = {}
    for part in ("train", "val"):
        folder = data_dir / part
        names = (
            tuple(sorted(path.name for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()
        )
        if not names:
            raise SettingsError(
                f"--data-dir {data_dir}: {folder} has no folders of classes.\n"
                "Fix: train/CLASS/*.jpg and val/CLASS/*.jpg under it, or --data fake"
            )
        found[part] = names
    if found["train"] != found["val"]:
        other = sorted(set(found["train"]) ^ set(found["val"]))
        raise SettingsError(
            f"--data-dir {data_dir}: train and val have other classes, {', '.join(other[:5])} only one of them: "
            "labels would be mixed up.\nFix: the same folders in both"
        )
    return found["train"]

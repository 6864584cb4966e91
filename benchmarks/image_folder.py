"""A folder of 2,000 JPEGs into the loop: the resnet recipe's loader against torchvision's reference settings.

    python benchmarks/image_folder.py [--images 2000] [--workers 2] [--runs 3] [--json]

The images are made up, of ImageNet's usual size: 500 x 375 and 375 x 500, smooth shapes under noise. torchvision's are those of its
references/classification: ImageFolder, RandomResizedCrop(224, antialias), RandomHorizontalFlip, PILToTensor, ToDtype and
Normalize, in a DataLoader with as many workers. Batches of 64; what is timed begins at the second batch. Ours end as
normalised floats as well. Runs alternate; the ratio printed is the median over runs of the ratio within a run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import arguments, conditions, in_words, told_as_json
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from phalanx.dist import ShardLoader
from phalanx.recipes.image_folder import MEAN, STD, ImageFolder, side_by_side

WANTED, BATCH, SIDE = 1.2, 64, 224


def write_images(folder: Path, count: int) -> None:
    """Two classes of JPEGs."""
    random = np.random.default_rng(0)
    for number in range(count):
        size = (500, 375) if number % 2 else (375, 500)
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = (smooth + random.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8)
        place = folder / f"class-{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy).save(place / f"{number}.jpg", quality=90)


def rate(batches: Iterable[Any], take: Callable[[Any], Any]) -> float:
    """Samples per second from the second batch on."""
    seen, start = 0, 0.0
    for number, (images, _) in enumerate(batches):
        take(images)
        if number == 0:
            start = time.perf_counter()
        else:
            seen += len(images)
    return seen / (time.perf_counter() - start)


def ours(folder: Path, workers: int) -> float:
    """The recipe's."""
    mean, std = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    images = ImageFolder(folder, ("class-0", "class-1"), SIDE, v2.Identity())
    loader = ShardLoader(
        images, global_batch_size=BATCH, shuffle=True, num_workers=workers, collate_fn=side_by_side
    )
    return rate(loader, lambda pictures: (pictures.float() - mean) / std)


def theirs(folder: Path, workers: int) -> float:
    """torchvision's references."""
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    images = datasets.ImageFolder(str(folder), transform)
    return rate(
        DataLoader(images, BATCH, shuffle=True, num_workers=workers, pin_memory=False),
        lambda pictures: pictures,
    )


def main() -> int:
    """Measure, tell, and say by the status whether what is wanted was reached."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=int, default=2000, help="JPEGs")
    parser.add_argument("--workers", type=int, default=2, help="of both loaders")
    parser.add_argument("--runs", type=int, default=3, help="of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, options.images)
        pairs = [
            (ours(folder, options.workers), theirs(folder, options.workers)) for _ in range(options.runs)
        ]
    result = {
        "samples_per_s": statistics.median(mine for mine, _ in pairs),
        "torchvision_samples_per_s": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(mine / other for mine, other in pairs),
        "wanted": WANTED,
        "images": options.images,
        "workers": options.workers,
        "runs": options.runs,
    } | conditions("torch", "torchvision", "python", "cores", "machine", "cpu", "load")
    if not told_as_json(result, options):
        print(
            f"{result['samples_per_s']:,.0f} samples/s against {result['torchvision_samples_per_s']:,.0f}: "
            f"{result['ratio']:.2f} x (wanted {WANTED} x), median of {options.runs} runs, {options.workers} workers"
        )
        print(in_words(result), f"load {result['load']}")
    return 0 if result["ratio"] >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())

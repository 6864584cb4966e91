"""TensorLoader against a DataLoader with torchvision's v2 transforms per sample, on Fashion-MNIST.

    python benchmarks/tensor_loader.py [--data FOLDER] [--runs 5] [--json]

Both load the same 28 x 28 grey images in shuffled batches; the DataLoader has 2 workers that persist over the epochs and
starts, ends and the first batches are not counted for it. Runs of the two alternate, and the ratio printed is the median
over runs of the ratio within a run, so that other load on the machine falls on both.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import arguments, conditions, told_as_json
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from phalanx.dist.augment import HorizontalFlip, Normalize, RandomCrop
from phalanx.dist.augment_policies import RandAugment
from phalanx.dist.tensor_loader import TensorLoader

MEAN, STD = 0.2860, 0.3530
TARGETS = {"crop + flip + normalise": 20.0, "RandAugment": 8.0}


class PerSample(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels, transformed one by one."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Tensor], Tensor]) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


def read_idx(path: Path) -> Tensor:
    """A gzipped IDX file of unsigned bytes."""
    data = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(data, dtype=">i4", count=data[3], offset=4)
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())


def pipelines() -> dict[str, tuple[Callable[[Tensor], Tensor], list[Any]]]:
    """By name: torchvision's transform of one image, and ours of a batch."""
    to_normal = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([MEAN], [STD])]
    crop_and_flip = [v2.RandomCrop(28, padding=4), v2.RandomHorizontalFlip()]
    normalize = Normalize(MEAN, STD)
    return {
        "crop + flip + normalise": (
            v2.Compose([*crop_and_flip, *to_normal]),
            [RandomCrop(4), HorizontalFlip(), normalize],
        ),
        "RandAugment": (v2.Compose([v2.RandAugment(), *to_normal]), [RandAugment(), normalize]),
    }


def rate(batches: Iterable[Any], seconds: float, skip: int = 0) -> float:
    """Samples per second over about ``seconds``, after the first ``skip`` batches."""
    count, start = 0, 0.0
    for number, (images, _) in enumerate(batches):
        if number == skip:
            start = time.perf_counter()
        elif number > skip:
            count += len(images)
            if time.perf_counter() - start > seconds:
                break
    return count / (time.perf_counter() - start)


def endless(loader: Iterable[Any]) -> Iterable[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def compare(name: str, images: Tensor, labels: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    per_sample, augment = pipelines()[name]
    theirs = DataLoader(
        PerSample(images, labels, per_sample),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    ours = TensorLoader(
        images, labels, global_batch_size=options.batch_size, shuffle=True, augment=augment, device="cpu"
    )
    # One pass of the workers' loader stays under way; it draws ahead between runs, so a few batches are skipped.
    their_batches, our_batches = iter(endless(theirs)), iter(endless(ours))
    ahead = 2 * options.workers + 2
    rows = []
    for _ in range(options.runs):
        their_rate = rate(their_batches, options.seconds, skip=ahead)
        our_rate = rate(our_batches, options.seconds / 2, skip=2)
        rows.append({"dataloader": their_rate, "tensor_loader": our_rate, "ratio": our_rate / their_rate})
    return {
        "pipeline": name,
        "dataloader_samples_per_s": statistics.median(row["dataloader"] for row in rows),
        "tensor_loader_samples_per_s": statistics.median(row["tensor_loader"] for row in rows),
        "ratio": statistics.median(row["ratio"] for row in rows),
        "ratio_min": min(row["ratio"] for row in rows),
        "ratio_max": max(row["ratio"] for row in rows),
        "target": TARGETS[name],
        "runs": rows,
    }


def main() -> int:
    parser = arguments(__doc__, whole=True)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--batch-size", type=int, default=512, help="samples of a batch (one process)")
    parser.add_argument("--workers", type=int, default=2, help="processes of the DataLoader")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each DataLoader run; ours take half")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for ours")
    options = parser.parse_args()
    if not (options.data / "train-images-idx3-ubyte.gz").is_file():
        print(
            f"no train-images-idx3-ubyte.gz in {options.data}\nFix: --data FOLDER (Debian: dataset-fashion-mnist)"
        )
        return 2
    torch.set_num_threads(options.threads)
    images = read_idx(options.data / "train-images-idx3-ubyte.gz").unsqueeze(1)
    labels = read_idx(options.data / "train-labels-idx1-ubyte.gz").long()
    result: dict[str, Any] = {
        **conditions("hardware", "python", "torch", "torchvision"),
        "batch_size": options.batch_size,
        "workers": options.workers,
        "threads": options.threads,
        **conditions("load_average"),
        "results": [compare(name, images, labels, options) for name in TARGETS],
    }
    if told_as_json(result, options):
        return 0
    print(", ".join(f"{name} {value}" for name, value in result.items() if name != "results"))
    for row in result["results"]:
        print(
            f"{row['pipeline']:24} DataLoader {row['dataloader_samples_per_s']:9,.0f} samples/s   TensorLoader "
            f"{row['tensor_loader_samples_per_s']:9,.0f} samples/s   ratio {row['ratio']:.1f} "
            f"({row['ratio_min']:.1f} to {row['ratio_max']:.1f} over {options.runs} runs; wanted {row['target']:.0f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

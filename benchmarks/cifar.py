"""cifar's fast network on Fashion-MNIST as 3 x 32 x 32: its accuracy, and samples/s on one core against a plain loop.

    python benchmarks/cifar.py [--data FOLDER] [--seeds 3] [--epochs 12] [--json]            # the accuracy: hours on a CPU
    python benchmarks/cifar.py --speed [--samples 1024] [--runs 3] [--json]

The plain loop has the same network and batches, its images from torchvision's v2 transforms one by one through a
DataLoader without workers, and nothing else of phalanx. Ours is the recipe's: TensorLoader, channels_last, and with
--precision and --compile whatever these say. Both have one thread; runs of the two alternate, and the ratio printed is the
median over runs of the ratio within a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from conditions import arguments, conditions, in_words, told_as_json
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from phalanx.dist import parallelize
from phalanx.recipes import cifar, color_images
from phalanx.recipes.residual import network

WANTED_ACCURACY, WANTED_RATIO = 0.935, 1.5


class PerSample(Dataset[Any]):
    """Images and labels, transformed one by one."""

    def __init__(self, images: color_images.ColorImages, cutout: int) -> None:
        self.images, self.labels = images.train
        share = (cutout / 32) ** 2
        self.transform = v2.Compose(
            [
                v2.RandomCrop(32, padding=2, padding_mode="reflect"),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(images.mean, images.std),
                v2.RandomErasing(1.0, scale=(share, share), ratio=(1.0, 1.0)),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index]), int(self.labels[index])


def plain_rate(settings: cifar.CifarSettings, images: color_images.ColorImages, samples: int) -> float:
    """Samples per second of a loop as tutorials have it."""
    torch.manual_seed(0)
    model = network(settings.model, 10, settings.width or 16).to(memory_format=torch.contiguous_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loader = DataLoader(PerSample(images, settings.cutout), settings.global_batch_size, shuffle=True)
    seen, start = -1, 0.0
    for pictures, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(pictures), labels, label_smoothing=0.1).backward()
        optimizer.step()
        if seen < 0:  # the first step warms up
            seen, start = 0, time.perf_counter()
            continue
        seen += len(labels)
        if seen >= samples:
            break
    return seen / (time.perf_counter() - start)


def our_rate(settings: cifar.CifarSettings, images: color_images.ColorImages, samples: int) -> float:
    """Samples per second of the recipe's loop."""
    loader, _, _ = cifar.loaders(settings, images)
    torch.manual_seed(0)
    made = network(settings.model, 10, settings.width or 16)
    if settings.compile:
        made.compile()
    model, _, engine = parallelize(
        made,
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        precision=settings.precision,
        loader=loader,
    )
    seen, start = -1, 0.0
    for pictures, labels in loader:
        with engine.micro_step(loader.key, last=loader.is_last_micro):
            loss_sum = F.cross_entropy(model(pictures), labels, reduction="sum", label_smoothing=0.1)
            engine.backward(loss_sum, loader.global_count)
        engine.step()
        if seen < 0:
            seen, start = 0, time.perf_counter()
            continue
        seen += len(labels)
        if seen >= samples:
            break
    return seen / (time.perf_counter() - start)


def speed(settings: cifar.CifarSettings, options: Any) -> dict[str, Any]:
    """Rates of both in turn."""
    torch.set_num_threads(1)
    images = color_images.load("fashion", options.data, False, 0.0, 0)
    pairs = []
    for _ in range(options.runs):
        pairs.append(
            (our_rate(settings, images, options.samples), plain_rate(settings, images, options.samples))
        )
    return {
        "samples_per_s": statistics.median(ours for ours, _ in pairs),
        "plain_samples_per_s": statistics.median(plain for _, plain in pairs),
        "ratio": statistics.median(ours / plain for ours, plain in pairs),
        "wanted": WANTED_RATIO,
        "precision": settings.precision,
        "compile": settings.compile,
        "runs": options.runs,
    }


def accuracy(settings: cifar.CifarSettings, options: Any) -> dict[str, Any]:
    """Test accuracy of whole runs, seed by seed."""
    found, seconds = [], []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = dataclasses.replace(
                settings,
                seed=seed,
                epochs=options.epochs,
                output_dir=str(Path(folder) / "run"),
                log_every_steps=10**9,
            )
            start = time.monotonic()
            with contextlib.redirect_stdout(io.StringIO()):
                found.append(cifar.train(run))
            seconds.append(time.monotonic() - start)
        print(f"seed {seed}: {found[-1]:.2%} in {seconds[-1]:.0f} s", file=sys.stderr, flush=True)
    half = 1.96 * statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None
    return {"accuracies": found, "mean": statistics.mean(found), "half_width": half, "wanted": WANTED_ACCURACY,
            "seconds": seconds, "epochs": options.epochs}  # fmt: skip


def main() -> int:
    """Measure, tell, and say by the status whether what is wanted was reached."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--data", default="/usr/share/datasets/fashion-mnist", help="folder of Fashion-MNIST's files"
    )
    parser.add_argument("--speed", action="store_true", help="measure samples/s instead of the accuracy")
    parser.add_argument("--samples", type=int, default=1024, help="of each timed run")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each loop")
    parser.add_argument("--seeds", type=int, default=3, help="whole runs for the accuracy")
    parser.add_argument("--epochs", type=int, default=12, help="of each of those")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="of our forward pass")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1" if options.speed else str(len(os.sched_getaffinity(0))))
    settings = cifar.CifarSettings(
        data="fashion", data_dir=options.data, validation_fraction=0.0, precision=options.precision, compile=options.compile
    ).resolved()  # fmt: skip
    measured = speed(settings, options) if options.speed else accuracy(settings, options)
    result = measured | conditions("torch", "torchvision", "python", "cores", "machine", "cpu", "load")
    reached = result["ratio"] >= WANTED_RATIO if options.speed else result["mean"] >= WANTED_ACCURACY
    if not told_as_json(result, options):
        if options.speed:
            print(
                f"{result['samples_per_s']:,.0f} samples/s against {result['plain_samples_per_s']:,.0f} of the plain loop: "
                f"{result['ratio']:.2f} x (wanted {WANTED_RATIO} x), median of {options.runs} runs"
            )
        else:
            spread = f" +- {result['half_width']:.2%}" if result["half_width"] is not None else ""
            print(
                f"test accuracy {result['mean']:.2%}{spread}, {options.seeds} seeds (wanted {WANTED_ACCURACY:.1%})"
            )
        print(in_words(result), f"load {result['load']}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())

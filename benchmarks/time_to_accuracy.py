"""Seconds of training until Fashion-MNIST's test accuracy reaches 90 %: the tutorial's settings, ours, and a plain loop.

    python benchmarks/time_to_accuracy.py               three rows, minutes each; needs Fashion-MNIST's files
    python benchmarks/time_to_accuracy.py --rows recipe plain

before   docs/first-steps/before.py's network, data path and settings (batch 50, Adam 5e-4, weight decay 1e-4, Resize(32)
         and ToTensor per sample in 2 worker processes): one process with all cores
recipe   `phalanx run --nproc-per-node 2 mnist --data fashion` with its default settings
plain    one process with all cores, the recipe's network, batch size, learning rate and schedule, images as tensors in
         memory, no phalanx: what is left of the difference is ours

The test set is looked at after each epoch; looking, starting up and reading the files are not counted. The accuracies
at the epochs' ends stand beside the times.
"""

from __future__ import annotations

import argparse
import gzip
import json
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from conditions import arguments, conditions, in_words, told_as_json

ROOT = Path(__file__).resolve().parent.parent
Curve = list[tuple[float, float]]  # seconds of training so far, test accuracy


def _timed_epochs(
    epochs: int, train_epoch: Callable[[], None], test: Callable[[], float], enough: float | None
) -> Curve:
    curve: Curve = []
    spent_s = 0.0
    for _ in range(epochs):
        begun = time.perf_counter()
        train_epoch()
        spent_s += time.perf_counter() - begun
        curve.append((spent_s, test()))
        if enough is not None and curve[-1][1] >= enough:
            break
    return curve


def before(data_dir: Path, enough: float) -> Curve:
    """The tutorial's settings until ``enough`` is reached."""
    import torch
    from torch.utils.data import DataLoader, random_split
    from torchvision import datasets, transforms

    script = runpy.run_path(str(ROOT / "docs" / "first-steps" / "before.py"))
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for packed in data_dir.glob("*.gz"):
            with gzip.open(packed) as source, (raw / packed.stem).open("wb") as target:
                shutil.copyfileobj(source, target)
        transform = transforms.Compose([transforms.Resize(32), transforms.ToTensor()])
        train_set = datasets.FashionMNIST(folder, train=True, transform=transform)
        test_set = datasets.FashionMNIST(folder, train=False, transform=transform)
    train_set, _ = random_split(train_set, [0.9, 0.1], torch.Generator().manual_seed(0))
    loader = DataLoader(train_set, batch_size=50, shuffle=True, num_workers=2)
    torch.manual_seed(0)
    model, device = script["Network"](), torch.device("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, weight_decay=1e-4)
    loss_function = torch.nn.CrossEntropyLoss()

    def train_epoch() -> None:
        model.train()
        for images, labels in loader:
            loss = loss_function(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return _timed_epochs(8, train_epoch, lambda: script["accuracy"](model, test_set, device), enough)


def plain(data_dir: Path) -> Curve:
    """The recipe's network and settings in a loop without phalanx, one process with all cores."""
    import torch
    from torch.nn import functional as F

    from phalanx.recipes import datasets
    from phalanx.recipes.mnist import MnistSettings, network
    from phalanx.recipes.schedules import OneCycle

    settings = MnistSettings().resolved("fashion")
    assert settings.epochs is not None
    assert settings.global_batch_size is not None
    sets = datasets.load("fashion", str(data_dir), False, settings.validation_fraction, 0)
    torch.manual_seed(0)
    model = network(sets.side, sets.classes, settings.dropout)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=settings.lr or 0.0, weight_decay=settings.weight_decay
    )
    size, items = settings.global_batch_size, len(sets.train)
    cycle = OneCycle(settings.epochs * -(-items // size))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cycle)

    def train_epoch() -> None:
        model.train()
        for rows in torch.randperm(items).split(size):
            images, labels = sets.train.__getitems__(rows.tolist())
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    @torch.no_grad()
    def test() -> float:
        model.eval()
        correct = 0
        for rows in torch.arange(len(sets.test)).split(1000):
            images, labels = sets.test.__getitems__(rows.tolist())
            correct += int((model(images).argmax(1) == labels).sum())
        return correct / len(sets.test)

    return _timed_epochs(settings.epochs, train_epoch, test, None)


def recipe(data_dir: Path, ranks: int) -> Curve:
    """The command, with the test set looked at after each epoch instead of the held-out images."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curve.json"
        words = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(ranks), __file__]
        words += ["--as-rank", str(out), "--data-dir", str(data_dir)]
        subprocess.run(words, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        curve: Curve = [(spent_s, accuracy) for spent_s, accuracy in json.loads(out.read_text())]
    return curve


def _as_rank(out: Path, data_dir: Path) -> None:
    """The recipe itself; only what it evaluates after an epoch is exchanged, and noted."""
    from phalanx.recipes import mnist, training
    from phalanx.recipes.display import Display

    shown, curve, tested = Display.epoch_done, [], training.evaluate
    test_loader: list[Any] = []

    def evaluate(model: Any, loader: Any) -> dict[str, float]:
        if not test_loader:
            from phalanx.dist import ShardLoader
            from phalanx.recipes import datasets

            sets = datasets.load("fashion", str(data_dir), False, 0.1, 0)
            test_loader.append(
                ShardLoader(sets.test, global_batch_size=1000, collate_fn=datasets.whole_batch)
            )
        return tested(model, test_loader[0])

    def epoch_done(self: Any, epoch: int, scores: dict[str, float]) -> None:
        curve.append((self.train_s, scores["accuracy"]))
        shown(self, epoch, scores)

    training.evaluate = evaluate
    Display.epoch_done = epoch_done  # type: ignore[method-assign]
    mnist.train(mnist.MnistSettings(data="fashion", data_dir=str(data_dir)))
    if training.rank() == 0:
        out.write_text(json.dumps(curve))


def seconds_to(curve: Curve, goal: float) -> float | None:
    """When the goal was first met."""
    return next((spent_s for spent_s, accuracy in curve if accuracy >= goal), None)


def main() -> None:
    parser = arguments(__doc__, whole=True)
    parser.add_argument(
        "--rows", nargs="+", default=["before", "recipe", "plain"], choices=["before", "recipe", "plain"]
    )
    parser.add_argument("--goal", type=float, default=0.90)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--data-dir", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank is not None:
        _as_rank(args.as_rank, args.data_dir)
        return
    import torch

    torch.set_num_threads(psutil.cpu_count() or 1)
    found: dict[str, Any] = {"goal": args.goal, "ranks": args.ranks, "rows": {}}
    measured: dict[str, Callable[[], Curve]] = {
        "before": lambda: before(args.data_dir, args.goal),
        "recipe": lambda: recipe(args.data_dir, args.ranks),
        "plain": lambda: plain(args.data_dir),
    }
    for row in args.rows:
        curve = measured[row]()
        found["rows"][row] = {
            "seconds_to_goal": seconds_to(curve, args.goal),
            "last_accuracy": curve[-1][1],
            "curve": curve,
        }
        if not args.json:
            steps = ", ".join(f"{accuracy:.2%} after {spent_s:.0f} s" for spent_s, accuracy in curve)
            print(
                f"{row:8} {args.goal:.0%} after {seconds_to(curve, args.goal) or float('nan'):.0f} s   ({steps})",
                flush=True,
            )
    times = {row: values["seconds_to_goal"] for row, values in found["rows"].items()}
    for row in ("before", "plain"):
        if times.get(row) and times.get("recipe"):
            found[f"recipe_to_{row}"] = times["recipe"] / times[row]
    found |= conditions("torch", "python", "cpus")
    if told_as_json(found, args):
        return
    for row in ("before", "plain"):
        if f"recipe_to_{row}" in found:
            print(f"recipe / {row}: {found[f'recipe_to_{row}']:.2f} of the time")
    print(f"{in_words(found)}, 1 run each")


if __name__ == "__main__":
    main()

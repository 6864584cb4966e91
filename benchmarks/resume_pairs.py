"""Save with one strategy, resume with another: the losses that follow are the first one's own.

    python benchmarks/resume_pairs.py                       single, ddp on 2 and 4 ranks, fsdp on 2: 36 pairs, CPU
    python benchmarks/resume_pairs.py --strategies single:1 fsdp:2 fsdp:4 --json

Each strategy trains a small net in float64 (dropout off) with SGD + momentum, Adam and AdamW under a scheduler, saves
in the middle of an epoch, and goes on. Then every other one resumes each of those checkpoints. The loss of the next
step shows that the weights are the same ones; those of the steps after it, that optimizer, scheduler and sample order
are. Losses are sums over all ranks; summation order alone differs, so the tolerance is 1e-10 (float64), relative.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.dist import CheckpointManager, ShardLoader, all_reduce_sum, init_world, parallelize

DEFAULT = ("single:1", "ddp:2", "ddp:4", "fsdp:2")
TOLERANCE = 1e-10
SAVED_AT, STEPS = 7, 5
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


class Job:
    """A user's script: model, optimizer, scheduler, loader, manager."""

    def __init__(self, folder: Path, strategy: str, optimizer: str) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(203, 12, generator=generator, dtype=torch.float64)
        self.loader = ShardLoader(
            TensorDataset(x, x[:, :3].argmax(1)), global_batch_size=18, shuffle=True, seed=3
        )
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 17), nn.LayerNorm(17), nn.Linear(17, 3)
        )
        self.model, self.optimizer, _ = parallelize(
            net.double(), OPTIMIZERS[optimizer], strategy, loader=self.loader, device="cpu"
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)
        self.checkpoints = CheckpointManager(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            scheduler=self.scheduler,
        )

    def train(self, until: int, save_at: int | None = None) -> list[float]:
        """Steps up to this number; the loss of each, over all ranks."""
        losses = []
        while self.loader.progress.step < until:
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                total, count = all_reduce_sum(loss.item() * self.loader.local_count, self.loader.local_count)
                losses.append(total / count)
                if self.loader.progress.step == save_at:
                    self.checkpoints.save()
                if self.loader.progress.step >= until:
                    break
        self.checkpoints.close()
        return losses


def play(folder: Path, me: str, others: list[str]) -> None:
    """On every rank: save with each optimizer, or (`others`) resume what those saved; rank 0 notes the losses."""
    world = init_world(device="cpu")
    strategy = me.partition(":")[0]
    found: dict[str, list[float]] = {}
    for optimizer in OPTIMIZERS:
        if not others:
            losses = Job(folder / f"{me}-{optimizer}", strategy, optimizer).train(SAVED_AT + STEPS, SAVED_AT)
            found[optimizer] = losses[SAVED_AT:]
        for other in others:
            job = Job(folder / f"{other}-{optimizer}", strategy, optimizer)
            restored = job.checkpoints.restore()
            assert restored.step == SAVED_AT
            found[f"{other}-{optimizer}"] = job.train(SAVED_AT + STEPS)
    if world.is_rank_zero:
        (folder / f"{me}-{'resumed' if others else 'saved'}.json").write_text(json.dumps(found))


def start(folder: Path, me: str, others: list[str]) -> dict[str, list[float]]:
    """One strategy's ranks, under ``phalanx run``."""
    words = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", me.partition(":")[2]]
    words += ["--log-dir", str(folder / "logs"), __file__, "--play", str(folder), me, *others]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{me} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, list[float]] = json.loads(
        (folder / f"{me}-{'resumed' if others else 'saved'}.json").read_text()
    )
    return found


def difference(found: list[float], expected: list[float]) -> float:
    """The largest relative one."""
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", nargs="+", default=DEFAULT, metavar="NAME:RANKS")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        torch.set_num_threads(1)
        play(Path(options.play[0]), options.play[1], options.play[2:])
        return
    pairs = []
    with tempfile.TemporaryDirectory(prefix="resume-pairs-") as name:
        folder = Path(name)
        saved = {me: start(folder, me, []) for me in options.strategies}
        for me in options.strategies:
            others = [other for other in options.strategies if other != me]
            resumed = start(folder, me, others)
            for other, optimizer in product(others, OPTIMIZERS):
                losses, expected = resumed[f"{other}-{optimizer}"], saved[other][optimizer]
                pairs.append(
                    {
                        "saved_by": other,
                        "resumed_by": me,
                        "optimizer": optimizer,
                        "next_step": difference(losses[:1], expected[:1]),
                        f"{STEPS}_steps": difference(losses, expected),
                    }
                )
    equal = sum(pair[f"{STEPS}_steps"] <= TOLERANCE for pair in pairs)
    result = {
        "pairs": pairs,
        "equal": equal,
        "tolerance": TOLERANCE,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "cpus": os.cpu_count(),
    }
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"torch {torch.__version__}, {os.cpu_count()} CPUs, float64, losses relative to those of the run that saved"
    )
    for pair in pairs:
        print(
            f"  {pair['saved_by']:>13} -> {pair['resumed_by']:<13} {pair['optimizer']:<6}"
            f" next step {pair['next_step']:.1e}, {STEPS} steps {pair[f'{STEPS}_steps']:.1e}"
        )
    print(f"{equal} of {len(pairs)} pairs equal to {TOLERANCE:g}")
    sys.exit(0 if equal == len(pairs) else 1)


if __name__ == "__main__":
    main()

"""Save with one strategy, resume with another: the losses that follow are the first one's own.

    python benchmarks/resume_pairs.py                       every strategy, 2 ranks and some 4: 330 pairs, CPU
    python benchmarks/resume_pairs.py --strategies single:1 zero3:2 zero3:4 --json

Each strategy trains a small net (dropout off) with SGD + momentum, Adam and AdamW under a scheduler, saves in the middle
of an epoch, and goes on. Then every other one resumes each of those checkpoints. The loss of the next step shows that
the weights are the same ones; those of the steps after it, that optimizer, scheduler and sample order are. Losses are
sums over all ranks; summation order alone differs. In float64 the tolerance is 1e-10, relative. DeepSpeed (zero0 to
zero3) keeps its weights in fp32: pairs with it run in float32, and their next step's loss must agree to 1e-6; later
ones to 1e-4, as Adam divides by gradients that rounding has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from conditions import arguments, conditions, told_as_json
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.dist import CheckpointManager, ShardLoader, all_reduce_sum, init_world, parallelize

PLAIN = ("single:1", "ddp:2", "ddp:4", "fsdp:2", "accelerate:2")
ZERO = ("zero0:2", "zero1:2", "zero2:2", "zero2:4", "zero3:2", "zero3:4")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
#: Of the next step, and of all that follow.
TOLERANCES = {"float64": (1e-10, 1e-10), "float32": (1e-6, 1e-4)}
SAVED_AT, STEPS = 7, 5
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def is_zero(me: str) -> bool:
    """Whether it is DeepSpeed's."""
    return me.startswith("zero")


class Job:
    """A user's script: model, optimizer, scheduler, loader, manager."""

    def __init__(self, folder: Path, me: str, optimizer: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(203, 12, generator=generator, dtype=torch.float64).to(dtype)
        self.loader = ShardLoader(
            TensorDataset(x, x[:, :3].argmax(1)), global_batch_size=18, shuffle=True, seed=3
        )
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 17), nn.LayerNorm(17), nn.Linear(17, 3)
        )
        name = me.partition(":")[0]
        options: dict[str, Any] = {"zero_stage": int(name[4:])} if is_zero(me) else {}
        self.model, self.optimizer, self.engine = parallelize(
            net.to(dtype),
            OPTIMIZERS[optimizer],
            "deepspeed" if is_zero(me) else name,
            loader=self.loader,
            device="cpu",
            **options,
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
                with self.engine.micro_step():
                    loss = nn.functional.cross_entropy(self.model(x).double(), y, reduction="sum")
                    self.engine.backward(loss, self.loader.global_count)
                self.engine.step()
                self.scheduler.step()
                total = all_reduce_sum(loss.item() if self.loader.local_count else 0.0)
                losses.append(float(total) / self.loader.global_count)
                if self.loader.progress.step == save_at:
                    self.checkpoints.save()
                if self.loader.progress.step >= until:
                    break
        self.checkpoints.close()
        return losses


def dtype_of(first: str, second: str) -> str:
    """What this pair runs in."""
    return "float32" if is_zero(first) or is_zero(second) else "float64"


def play(folder: Path, me: str, others: list[str]) -> None:
    """On every rank: save with each optimizer, or (`others`) resume what those saved; rank 0 notes the losses."""
    world = init_world(device="cpu")
    found: dict[str, list[float]] = {}
    for optimizer in OPTIMIZERS:
        for dtype in [] if others else ["float32"] if is_zero(me) else DTYPES:
            name = f"{me}-{optimizer}-{dtype}"
            losses = Job(folder / name, me, optimizer, DTYPES[dtype]).train(SAVED_AT + STEPS, SAVED_AT)
            found[name] = losses[SAVED_AT:]
        for other in others:
            dtype = dtype_of(me, other)
            name = f"{other}-{optimizer}-{dtype}"
            job = Job(folder / name, me, optimizer, DTYPES[dtype])
            restored = job.checkpoints.restore()
            assert restored.step == SAVED_AT
            found[name] = job.train(SAVED_AT + STEPS)
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
    parser = arguments(__doc__, whole=True)
    default = PLAIN + (ZERO if find_spec("deepspeed") else ())
    parser.add_argument("--strategies", nargs="+", default=default, metavar="NAME:RANKS")
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
                pairs.append(compare(other, me, optimizer, resumed, saved[other]))
    report(pairs, options)


def compare(
    other: str, me: str, optimizer: str, resumed: dict[str, list[float]], saved: dict[str, list[float]]
) -> dict[str, Any]:
    """One pair: how far the losses after the resumption are from those of the run that saved."""
    dtype = dtype_of(me, other)
    losses, expected = (found[f"{other}-{optimizer}-{dtype}"] for found in (resumed, saved))
    next_step, following = difference(losses[:1], expected[:1]), difference(losses, expected)
    return {
        "saved_by": other,
        "resumed_by": me,
        "optimizer": optimizer,
        "dtype": dtype,
        "next_step": next_step,
        f"{STEPS}_steps": following,
        "equal": next_step <= TOLERANCES[dtype][0] and following <= TOLERANCES[dtype][1],
    }


def report(pairs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print all of it and end: with 1 if a pair differs."""
    equal = sum(pair["equal"] for pair in pairs)
    result: dict[str, Any] = {
        "pairs": pairs,
        "equal": equal,
        "tolerances": TOLERANCES,
        "versions": {
            **conditions("torch", "python"),
            **conditions(*(name for name in ("accelerate", "deepspeed") if find_spec(name))),
        },
        **conditions("cpus"),
    }
    if told_as_json(result, options):
        return
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    print(f"{versions}, {result['cpus']} cores, losses relative to those of the run that saved")
    for pair in pairs:
        print(
            f"  {pair['saved_by']:>13} -> {pair['resumed_by']:<13} {pair['optimizer']:<6} {pair['dtype']}"
            f" next step {pair['next_step']:.1e}, {STEPS} steps {pair[f'{STEPS}_steps']:.1e}"
            + ("" if pair["equal"] else "  DIFFERS")
        )
    for dtype, (next_step, following) in TOLERANCES.items():
        of_it = [pair for pair in pairs if pair["dtype"] == dtype]
        worst = max((pair["next_step"] for pair in of_it), default=0.0)
        print(
            f"{dtype}: {sum(pair['equal'] for pair in of_it)} of {len(of_it)} pairs, next step within {worst:.1e} "
            f"(tolerance {next_step:g}, {STEPS} steps {following:g})"
        )
    print(f"{equal} of {len(pairs)} pairs equal")
    sys.exit(0 if equal == len(pairs) else 1)


if __name__ == "__main__":
    main()

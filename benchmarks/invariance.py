"""Are losses and weights the same to the bit on every world size, and what does a step cost beside plain DDP?

    python benchmarks/invariance.py                       200 steps on 1, 2, 4, 8 and (V = 6) 3, 6, 1 ranks; then the cost
    python benchmarks/invariance.py --steps 20 --blocks 6 --json

*Equality*: a network with batch norm and dropout on randomly augmented images, SGD with momentum and Adam, gradients
clipped, an uneven last step in each epoch. The losses, gradient norms, weights and buffers of all steps are compared bit for bit.

*Cost*: wall time per step on 2 ranks beside DistributedDataParallel with ``no_sync`` on the same micro batches (4 a
rank, V = 8), in the same processes, in blocks that alternate; once for that network, once for one of 1.6 million weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from conditions import arguments, conditions, in_words, told_as_json
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.utils.data import Dataset

from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.world import barrier, gather_objects, init_world

LIMIT = 1.3
RUNS = {8: (1, 2, 4, 8), 6: (3, 6, 1)}  # virtual ranks: world sizes
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(Adam, lr=1e-2),
}
MICRO_BATCH, STEPS_PER_BLOCK = 16, 10


class Images(Dataset[tuple[Tensor, int]]):
    """500 noise images, flipped, shifted and made noisy at random each time they are read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(500, 1, 12, 12, generator=generator)
        self.labels = torch.randint(0, 10, (500,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        shift = int(np.random.randint(-2, 3))
        return image.roll(shift, -1) + 0.1 * torch.randn(image.shape), self.labels[index]


def network(width: int = 16) -> nn.Module:
    """Two convolutions, batch norm after each and before the end, dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(72 * width, 16 * width), nn.BatchNorm1d(16 * width)),
        *(nn.ReLU(), nn.Dropout(0.3), nn.Linear(16 * width, 10)),
    )


def train(rank: int, steps: int, virtual_ranks: int, optimizer: str) -> dict[str, Any]:
    """Hashes of what a run leaves."""
    loader = ShardLoader(Images(), global_batch_size=48, shuffle=True)
    model, _, engine = parallelize(
        network(), OPTIMIZERS[optimizer], loader=loader, virtual_ranks=virtual_ranks, max_grad_norm=1.0
    )
    losses, done = hashlib.sha256(), 0
    loss = float("nan")
    while done < steps:
        for x, y in loader:
            with engine.micro_step():
                engine.backward(F.cross_entropy(model(x), y, reduction="sum"), loader.global_count)
            if not loader.is_last_micro:
                continue
            info = engine.step()
            assert info.loss is not None
            loss = float(info.loss)
            losses.update(repr((loss, info.grad_norm)).encode())
            done += 1
            if done == steps:
                break
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        weights.update(value.contiguous().numpy().tobytes())
    return {"losses": losses.hexdigest()[:16], "weights": weights.hexdigest()[:16], "last_loss": loss}


def ddp_step(model: nn.Module, optimizer: Any, batches: list[tuple[Tensor, Tensor]], count: int) -> None:
    """One step of plain DDP with accumulation, as its manual has it."""
    for number, (x, y) in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
            (F.cross_entropy(model(x), y, reduction="sum") * (2 / count)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def our_step(model: nn.Module, engine: Any, batches: list[tuple[Tensor, Tensor]], count: int) -> None:
    """The same with virtual ranks."""
    for x, y in batches:
        with engine.micro_step():
            engine.backward(F.cross_entropy(model(x), y, reduction="sum"), count)
    engine.step()


def cost(rank: int, blocks: int, width: int) -> list[list[float]]:
    """Seconds per step of plain DDP and of ours, block by block, mean over the ranks."""
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (
            torch.randn(MICRO_BATCH, 1, 12, 12, generator=generator),
            torch.randint(0, 10, (MICRO_BATCH,), generator=generator),
        )
        for _ in range(4)
    ]
    count = 8 * MICRO_BATCH
    plain = DistributedDataParallel(network(width), gradient_as_bucket_view=True)
    plain_optimizer = OPTIMIZERS["adam"](plain.parameters())
    model, _, engine = parallelize(network(width), OPTIMIZERS["adam"], virtual_ranks=8)

    def timed(step: Callable[[], None]) -> float:
        barrier()
        begun = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            step()
        return (time.perf_counter() - begun) / STEPS_PER_BLOCK

    ways: list[Callable[[], None]] = [
        lambda: ddp_step(plain, plain_optimizer, batches, count),
        lambda: our_step(model, engine, batches, count),
    ]
    for way in ways:
        timed(way)
    rows = []
    for block in range(blocks):
        order = (0, 1) if block % 2 == 0 else (1, 0)
        found = {way: timed(ways[way]) for way in order}
        rows.append([found[0], found[1]])
    mean: list[list[float]] = np.mean(gather_objects(rows), axis=0).tolist()
    return mean


def _rank_main(rank: int, world_size: int, port: int, out: str, function: Any, *args: Any) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    init_world(device="cpu")
    value = function(rank, *args)
    every = gather_objects(value)
    if rank == 0:
        Path(out).write_text(json.dumps(every))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def on_ranks(world_size: int, function: Any, *args: Any) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "values.json")
        mp.spawn(_rank_main, (world_size, port, out, function, *args), nprocs=world_size)
        values: list[Any] = json.loads(Path(out).read_text())
        return values


def measure_equality(only: list[int], steps: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each number of virtual ranks and optimizer."""
    rows = []
    for virtual_ranks in only:
        world_sizes = RUNS[virtual_ranks]
        for optimizer in OPTIMIZERS:
            found = {w: on_ranks(w, train, steps, virtual_ranks, optimizer) for w in world_sizes}
            different = {(rank["losses"], rank["weights"]) for ranks in found.values() for rank in ranks}
            row = {
                "virtual_ranks": virtual_ranks,
                "optimizer": optimizer,
                "world_sizes": list(world_sizes),
                "equal": len(different) == 1,
                "last_loss": found[world_sizes[0]][0]["last_loss"],
                "weights": {str(w): ranks[0]["weights"] for w, ranks in found.items()},
            }
            rows.append(row)
            say(
                f"V = {virtual_ranks}, {optimizer:4}: {steps} steps on {', '.join(map(str, world_sizes))} ranks: "
                f"{'equal to the bit' if row['equal'] else 'DIFFERENT'} (last loss {row['last_loss']:.4f}, "
                f"weights {', '.join(sorted(set(row['weights'].values())))})"
            )
    return rows


def measure_cost(blocks: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each network."""
    rows = []
    for width in (16, 36):
        found = np.array(on_ranks(2, cost, blocks, width)[0])
        ratios = found[:, 1] / found[:, 0]
        drawn = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
        low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
        row = {
            "weights": sum(parameter.numel() for parameter in network(width).parameters()),
            "ddp_ms": float(np.median(found[:, 0]) * 1e3),
            "phalanx_ms": float(np.median(found[:, 1]) * 1e3),
            "ratio": float(np.median(ratios)),
            "ratio_95": [float(low), float(high)],
        }
        rows.append(row)
        say(
            f"{row['weights']:9,} weights: DDP {row['ddp_ms']:.2f} ms a step, virtual ranks {row['phalanx_ms']:.2f} ms; "
            f"paired ratio {row['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}; limit {LIMIT})"
        )
    return rows


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each run; 0: no equality")
    parser.add_argument("--virtual-ranks", type=int, nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument(
        "--blocks", type=int, default=30, help=f"paired blocks of {STEPS_PER_BLOCK} steps; 0: no cost"
    )
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    equality = measure_equality(options.virtual_ranks, options.steps, say) if options.steps else []
    costs = measure_cost(options.blocks, say) if options.blocks else []
    result = {
        "equality": equality,
        "cost": costs,
        "limit": LIMIT,
        "steps": options.steps,
        "blocks": options.blocks,
        **conditions("torch", "python", "cores", "machine", "cpu_capability"),
    }
    if not told_as_json(result, options):
        print(
            f"{in_words(result)} ({result['cpu_capability']}), {options.blocks} paired blocks of {STEPS_PER_BLOCK} steps"
        )
    return int(not all(row["equal"] for row in equality) or any(row["ratio"] > LIMIT for row in costs))


if __name__ == "__main__":
    sys.exit(main())

"""CPU time per step of the phalanx loop against a bare DDP loop, paired in the same processes.

    python benchmarks/step_overhead.py [--ranks 2] [--blocks 20] [--json]

Both loops train the same small network on the same tensors with the same batches per rank, on gloo. A block is one
epoch of each; which goes first alternates. The bare loop is DistributedDataParallel, DataLoader and DistributedSampler; ours is
ShardLoader, parallelize and (where there is one) CheckpointManager.maybe_save. CPU time is that of the whole process, all threads.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from conditions import arguments, conditions, in_words, told_as_json
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.world import barrier, gather_objects, init_world

STEPS, GLOBAL_BATCH, FEATURES, CLASSES = 100, 32, 64, 10
LIMIT_US = 200.0

Epoch = Callable[[], None]


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * GLOBAL_BATCH, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (len(x),), generator=generator))


def bare_loop(rank: int, ranks: int) -> Epoch:
    """DDP as the tutorials write it."""
    model = DistributedDataParallel(_network())
    optimizer = Adam(model.parameters(), lr=1e-3)
    dataset = _dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, ranks, rank)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // ranks, sampler=sampler)
    epochs = iter(range(1 << 30))

    def epoch() -> None:
        sampler.set_epoch(next(epochs))
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return epoch


def our_loop(folder: str) -> tuple[Epoch, list[str]]:
    """The same loop, and the parts that it has."""
    loader = ShardLoader(_dataset(), global_batch_size=GLOBAL_BATCH, shuffle=True)
    model, optimizer, _ = parallelize(_network(), lambda params: Adam(params, lr=1e-3), loader=loader)
    parts = ["ShardLoader", "parallelize"]
    maybe_save: Callable[[], Any] = lambda: None  # noqa: E731
    try:
        from phalanx.dist.checkpoints import CheckpointManager
    except ImportError:
        pass
    else:
        maybe_save = CheckpointManager(folder, model=model, optimizer=optimizer, loader=loader).maybe_save
        parts.append("maybe_save")

    def epoch() -> None:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            maybe_save()

    return epoch, parts


def _timed(epoch: Epoch) -> tuple[float, float]:
    """CPU and wall microseconds per step."""
    barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    epoch()
    return (time.process_time() - cpu) * 1e6 / STEPS, (time.perf_counter() - wall) * 1e6 / STEPS


def _rank_main(rank: int, ranks: int, port: int, blocks: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    init_world(device="cpu")
    bare = bare_loop(rank, ranks)
    ours, parts = our_loop(folder)
    bare(), ours()  # warm up
    rows = []
    for block in range(blocks):
        if block % 2:
            mine = _timed(ours)
            theirs = _timed(bare)
        else:
            theirs = _timed(bare)
            mine = _timed(ours)
        rows.append([*theirs, *mine])
    every = np.mean(gather_objects(rows), axis=0)  # over ranks
    if rank == 0:
        with open(f"{folder}/result.json", "w") as file:
            json.dump({"parts": parts, "blocks": every.tolist()}, file)


def summarize(blocks: np.ndarray) -> dict[str, Any]:
    """Means, paired difference and ratio, with 95 % bootstrap intervals over blocks."""
    generator = np.random.default_rng(0)
    drawn = blocks[generator.integers(0, len(blocks), (4000, len(blocks)))].mean(axis=1)
    mean = blocks.mean(axis=0)

    def interval(values: np.ndarray) -> list[float]:
        return [float(v) for v in np.percentile(values, [2.5, 97.5])]

    return {
        "bare_cpu_us": float(mean[0]),
        "phalanx_cpu_us": float(mean[2]),
        "difference_cpu_us": float(mean[2] - mean[0]),
        "difference_cpu_us_95": interval(drawn[:, 2] - drawn[:, 0]),
        "ratio_cpu": float(mean[2] / mean[0]),
        "ratio_cpu_95": interval(drawn[:, 2] / drawn[:, 0]),
        "ratio_wall": float(mean[3] / mean[1]),
        "ratio_wall_95": interval(drawn[:, 3] / drawn[:, 1]),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=20, help=f"paired epochs of {STEPS} steps")
    options = parser.parse_args()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (options.ranks, port, options.blocks, folder), nprocs=options.ranks)
        with open(f"{folder}/result.json") as file:
            found = json.load(file)
    result = {
        **summarize(np.array(found["blocks"])),
        "parts": found["parts"],
        "limit_us": LIMIT_US,
        "ranks": options.ranks,
        "blocks": options.blocks,
        "steps_per_block": STEPS,
        **conditions("torch", "python", "cores", "machine"),
    }
    if not told_as_json(result, options):
        low, high = result["ratio_cpu_95"]
        print(
            f"bare DDP loop     {result['bare_cpu_us']:8.0f} us of CPU per step\n"
            f"phalanx loop      {result['phalanx_cpu_us']:8.0f} us ({', '.join(result['parts'])})\n"
            f"difference        {result['difference_cpu_us']:8.0f} us (limit {LIMIT_US:.0f}), 95 %: "
            f"{result['difference_cpu_us_95'][0]:.0f} to {result['difference_cpu_us_95'][1]:.0f}\n"
            f"ratio             {result['ratio_cpu']:8.3f}, 95 %: {low:.3f} to {high:.3f}\n"
            f"ratio, wall time  {result['ratio_wall']:8.3f}, 95 %: {result['ratio_wall_95'][0]:.3f} to "
            f"{result['ratio_wall_95'][1]:.3f}\n"
            f"{options.ranks} ranks, {options.blocks} paired blocks of {STEPS} steps, "
            f"{in_words(result)}"
        )
    return int(result["difference_cpu_us"] > LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())

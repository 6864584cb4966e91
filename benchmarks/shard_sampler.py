"""ShardSampler beside torch's DistributedSampler: time and memory to the first index, and a whole epoch.

    python benchmarks/shard_sampler.py                  100 million items, 8 ranks
    python benchmarks/shard_sampler.py --items 10000000 --torch-runs 3 --json

Every run is a fresh process that goes through one rank's epoch as a DataLoader would: ``for index in sampler``.
Memory is the peak resident size above that of a process with the same imports that does nothing. torch's
sampler needs some 5 GB for 100 million items.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from conditions import arguments, conditions, told_as_json

CHILD = """
import json, resource, sys, time
import numpy, torch
from torch.utils.data import DistributedSampler
from phalanx.dist.samplers import ShardSampler
kind, num_items, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

found = {}
start = time.perf_counter()
if kind == "ours":
    indices = iter(ShardSampler(num_items, world_size - 1, world_size, seed=0))
elif kind == "torch":
    indices = iter(DistributedSampler(range(num_items), world_size, world_size - 1, seed=0))
if kind != "empty":
    next(indices)
    found["first_index_ms"] = (time.perf_counter() - start) * 1e3
    found["first_index_peak_mb"] = peak_mb()
    for index in indices:
        pass
    found["epoch_s"] = time.perf_counter() - start
found["peak_mb"] = peak_mb()
print(json.dumps(found))
"""


def run(kind: str, num_items: int, world_size: int) -> dict[str, float]:
    """One fresh process; what it measured."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, kind, str(num_items), str(world_size)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def summary(kind: str, num_items: int, world_size: int, runs: int, empty_mb: float) -> dict[str, float]:
    """Medians over ``runs`` processes."""
    found = [run(kind, num_items, world_size) for _ in range(runs)]
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    return {
        "first_index_ms": medians["first_index_ms"],
        "first_index_mb_above_empty": medians["first_index_peak_mb"] - empty_mb,
        "epoch_s": medians["epoch_s"],
        "epoch_mb_above_empty": medians["peak_mb"] - empty_mb,
        "runs": runs,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--items", type=int, default=100_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3, help="fresh processes for ours")
    parser.add_argument("--torch-runs", type=int, default=1, help="fresh processes for torch's")
    options = parser.parse_args()

    empty_mb = statistics.median(run("empty", options.items, options.ranks)["peak_mb"] for _ in range(3))
    ours = summary("ours", options.items, options.ranks, options.runs, empty_mb)
    theirs = summary("torch", options.items, options.ranks, options.torch_runs, empty_mb)
    result = {
        "schema": 1,
        "items": options.items,
        "ranks": options.ranks,
        "machine": conditions("cpu", "cores", "memory_gb", "python", "torch", "numpy"),
        "empty_process_mb": empty_mb,
        "ShardSampler": ours,
        "DistributedSampler": theirs,
        "ratio": {name: ours[name] / theirs[name] for name in ("first_index_ms", "epoch_s")},
    }
    if told_as_json(result, options):
        return
    print(f"{options.items:,} items, {options.ranks} ranks, one rank's epoch; medians of fresh processes")
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(
        f"{'':20} {'first index':>14} {'memory then':>13} {'whole epoch':>13} {'peak memory':>13} {'runs':>5}"
    )
    for name, row in (("ShardSampler", ours), ("DistributedSampler", theirs)):
        print(
            f"{name:20} {row['first_index_ms']:11.2f} ms {row['first_index_mb_above_empty']:10.1f} MB "
            f"{row['epoch_s']:11.2f} s {row['epoch_mb_above_empty']:10.1f} MB {row['runs']:5}"
        )
    print(
        f"ratio, ours / torch's: first index {result['ratio']['first_index_ms']:.2g}, epoch {result['ratio']['epoch_s']:.2f}"
    )


if __name__ == "__main__":
    main()

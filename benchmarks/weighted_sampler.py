"""WeightedShardSampler: time and memory to the first index for many weights, and whether the draws are right.

    python benchmarks/weighted_sampler.py                     20 million weights, 8 ranks
    python benchmarks/weighted_sampler.py --items 16000000    where torch's sampler can still be run beside it
    python benchmarks/weighted_sampler.py --json

Every run is a fresh process. Time counts from the weights (an array of float64) to the first index, making the sampler
included (CPU time beside it: what the clock would show on an idle machine); memory is the peak resident size above that of the same process before it made the sampler. torch's
WeightedRandomSampler is run on the same weights where it can: ``torch.multinomial`` refuses more than 2**24 of them, and
what it said is printed. It draws all samples before it gives the first, and knows nothing of ranks. Runs of the kinds
alternate, and the ratio is the median over runs of the ratio within a run.

Draws: as many as asked for are counted in 1000 bins of equal numbers of neighbouring items and compared with the weights
by chi-square (p should not be tiny), and the ranks' draws, dealt back together, must be one process's to the last index.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
from conditions import arguments, conditions, told_as_json

KINDS = ("with replacement", "without replacement", "torch, with replacement")
TARGET_S = 2.0

CHILD = """
import json, resource, sys, time
import numpy as np, torch
from torch.utils.data import WeightedRandomSampler
from phalanx.dist.weighted_sampler import WeightedShardSampler
kind, items, samples, ranks = sys.argv[1], *map(int, sys.argv[2:])

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

weights = np.random.default_rng(0).exponential(size=items)
before_mb = peak_mb()
start, cpu_start = time.perf_counter(), time.process_time()
found = {}
try:
    if kind == "torch, with replacement":
        indices = iter(WeightedRandomSampler(weights, samples))
    else:
        replacement = kind == "with replacement"
        indices = iter(WeightedShardSampler(weights, samples, ranks - 1, ranks, replacement=replacement))
    next(indices)
except RuntimeError as error:
    found["refused"] = str(error).splitlines()[0]
else:
    found["first_index_s"] = time.perf_counter() - start
    found["first_index_cpu_s"] = time.process_time() - cpu_start
    found["first_index_mb"] = peak_mb() - before_mb
    count = 1 + sum(1 for _ in indices)
    found["epoch_s"] = time.perf_counter() - start
    found["indices_per_s"] = count / found["epoch_s"]
print(json.dumps(found))
"""


def run(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One fresh process; what it measured."""
    numbers = map(str, (options.items, options.samples, options.ranks))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, kind, *numbers], stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_draws(options: argparse.Namespace) -> dict[str, Any]:
    """Chi-square of the draws against the weights, and whether the ranks' union is one process's draw."""
    from phalanx.dist.weighted_sampler import WeightedShardSampler

    weights = np.random.default_rng(0).exponential(size=options.items)
    alone = list(WeightedShardSampler(weights, options.samples, 0, 1))
    bins = min(1000, options.items)
    edges = np.linspace(0, options.items, bins + 1).astype(np.int64)
    counts, _ = np.histogram(alone, edges)
    expected = np.add.reduceat(weights, edges[:-1]) / weights.sum() * len(alone)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = bins - 1
    # Wilson and Hilferty: the cube root of a chi-square over its freedom is close to normal.
    deviations = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    ranks = [
        list(WeightedShardSampler(weights, options.samples, rank, options.ranks))
        for rank in range(options.ranks)
    ]
    dealt = [index for row in itertools.zip_longest(*ranks) for index in row if index is not None]
    return {
        "draws": len(alone),
        "bins": bins,
        "chi_square": statistic,
        "p": 0.5 * math.erfc(deviations / math.sqrt(2)),
        "union_over_ranks_is_the_one_process_draw": dealt == alone,
    }


def main() -> None:
    parser = arguments(__doc__, whole=True)
    parser.add_argument("--items", type=int, default=20_000_000)
    parser.add_argument("--samples", type=int, default=2_000_000, help="draws of an epoch over all ranks")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes of each kind")
    options = parser.parse_args()

    rows = [{kind: run(kind, options) for kind in KINDS} for _ in range(options.runs)]
    result: dict[str, Any] = {
        "schema": 1,
        "items": options.items,
        "samples": options.samples,
        "ranks": options.ranks,
        "runs": options.runs,
        "machine": conditions("cpu", "cores", "python", "torch", "numpy", "load_average"),
        "target_first_index_s": TARGET_S,
    }
    for kind in KINDS:
        if "refused" in rows[0][kind]:
            result[kind] = rows[0][kind]
            continue
        result[kind] = {name: statistics.median(row[kind][name] for row in rows) for name in rows[0][kind]}
        result[kind]["first_index_s_max"] = max(row[kind]["first_index_s"] for row in rows)
    theirs = KINDS[2]
    if "refused" not in rows[0][theirs]:
        result["ratio_first_index"] = statistics.median(
            row[KINDS[0]]["first_index_s"] / row[theirs]["first_index_s"] for row in rows
        )
    result["draws"] = check_draws(options)
    if told_as_json(result, options):
        return
    print(
        f"{options.items:,} weights, {options.samples:,} draws over {options.ranks} ranks, medians of {options.runs} "
        "fresh processes"
    )
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(
        f"{'':24} {'first index':>12} {'slowest':>9} {'its CPU':>9} {'memory then':>13} {'its epoch':>10} {'indices/s':>11}"
    )
    for kind in KINDS:
        row = result[kind]
        if "refused" in row:
            print(f"{kind:24} refused: {row['refused']}")
            continue
        print(
            f"{kind:24} {row['first_index_s']:10.2f} s {row['first_index_s_max']:7.2f} s {row['first_index_cpu_s']:7.2f} s {row['first_index_mb']:10.0f} MB "
            f"{row['epoch_s']:8.2f} s {row['indices_per_s']:11,.0f}"
        )
    if "ratio_first_index" in result:
        print(f"ratio of first index, ours / torch's: {result['ratio_first_index']:.2f}")
    draws = result["draws"]
    print(
        f"{draws['draws']:,} draws in {draws['bins']} bins: chi-square {draws['chi_square']:.0f}, p {draws['p']:.3f}; "
        f"union over ranks is the one-process draw: {draws['union_over_ranks_is_the_one_process_draw']}"
    )
    print(f"wanted: first index within {TARGET_S} s")


if __name__ == "__main__":
    main()

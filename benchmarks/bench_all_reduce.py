"""Figures of `phalanx bench all-reduce` (gloo) beside those of a loop written by hand.

    python benchmarks/bench_all_reduce.py               101 pairs, sizes of 1 KiB to 16 MiB, 2 ranks
    python benchmarks/bench_all_reduce.py --pairs 5 --ranks 4 --json

The tool's own measurement and the loop run in one process group and take turns, size by size, with as many operations: on
two starts of the same loop the same figure differs by half, by where the system puts the ranks. The ratio is of the time
of one all-reduce, mean over ranks; the median over pairs is printed, and what half of the pairs lie between. Each rank has
a core of its own where there are enough.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from conditions import arguments, conditions, in_words, told_as_json

SIZES = tuple(1 << power for power in (10, 14, 16, 18, 20, 24))
OPERATIONS, WARMUP, LARGE = 200, 20, 1 << 20


def _operations(size: int) -> int:
    return OPERATIONS if size <= LARGE else OPERATIONS // 10


def by_hand(size: int) -> float:
    """Seconds of one all-reduce of ``size`` bytes, as anybody would time it."""
    numbers = torch.zeros(size // 4)
    for _ in range(WARMUP):
        dist.all_reduce(numbers)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(_operations(size)):
        dist.all_reduce(numbers)
    each = torch.tensor((time.perf_counter() - begun) / _operations(size))
    dist.all_reduce(each)
    return float(each) / dist.get_world_size()


def by_tool(size: int, world: Any) -> float:
    """The same from the code behind the command."""
    from phalanx.tools.bench.measuring import measure_sizes
    from phalanx.tools.bench.settings import BenchSettings

    settings = BenchSettings(
        kind="all-reduce", min_bytes=size, max_bytes=size, iterations=_operations(size), warmup=WARMUP
    )
    (result,) = measure_sizes(settings, world)
    assert result["correct"]
    return float(result["time_us"]) / 1e6


def rank(pairs: int) -> None:
    """What each rank runs; rank 0 prints the times."""
    from phalanx.dist import init_world

    cores = sorted(os.sched_getaffinity(0))
    if int(os.environ["LOCAL_WORLD_SIZE"]) <= len(cores):  # before gloo's own threads start
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
    world = init_world(backend="gloo", device="cpu")
    for size in SIZES:
        for number in range(pairs + 1):  # the first pair warms up
            if number % 2:
                tool, loop = by_tool(size, world), by_hand(size)
            else:
                loop, tool = by_hand(size), by_tool(size, world)
            if number and world.is_rank_zero:
                print("PAIR", size, tool, loop, flush=True)


def measure(pairs: int, ranks: int) -> dict[str, Any]:
    """Per size: medians of both, and of the paired ratios."""
    words = ["run", "--gpus", "none", "--nproc-per-node", str(ranks), "--show", "rank0", __file__]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words, "--rank", "--pairs", str(pairs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for line in done.stdout.splitlines():
        at = line.find("PAIR ")
        if at >= 0:
            _, size, tool, loop = line[at:].split()
            found[int(size)].append((float(tool), float(loop)))
    return {str(size): _summary(found[size]) for size in SIZES}


def _summary(times: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = sorted(tool / loop for tool, loop in times)
    quarter = len(ratios) // 4
    return {
        "tool_us": statistics.median(tool for tool, _ in times) * 1e6,
        "loop_us": statistics.median(loop for _, loop in times) * 1e6,
        "ratio": statistics.median(ratios),
        "middle_half": [ratios[quarter], ratios[-1 - quarter]],
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=101)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", action="store_true", help="be one of the ranks")
    options = parser.parse_args()
    if options.rank:
        rank(options.pairs)
        return
    result = {
        **conditions("python", "torch", "cores", "machine"),
        "ranks": options.ranks,
        "pairs": options.pairs,
        "sizes": measure(options.pairs, options.ranks),
    }
    if told_as_json(result, options):
        return
    print(f"{in_words(result)}, {options.ranks} ranks, {options.pairs} pairs")
    for size, each in result["sizes"].items():
        low, high = each["middle_half"]
        print(
            f"{size:>10} bytes   bench {each['tool_us']:10.1f} us   loop {each['loop_us']:10.1f} us   "
            f"x {each['ratio']:.3f}  (half of the pairs: {low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()

"""Figures of `phalanx bench all-reduce` (gloo) beside those of a loop written by hand.

    python benchmarks/bench_all_reduce.py               9 pairs, sizes of 64 KiB, 1 MiB and 16 MiB, 2 ranks
    python benchmarks/bench_all_reduce.py --runs 3 --json

Both start their ranks by `phalanx run` and take turns; the ratio is of the time of one all-reduce, the median over pairs. The
tool's own --iterations and --warmup are the loop's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json

SIZES = (1 << 16, 1 << 20, 1 << 24)
ITERATIONS, WARMUP = 400, 20

LOOP = f"""
import json, os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for size in {SIZES}:
    numbers = torch.zeros(size // 4)
    for _ in range({WARMUP}):
        dist.all_reduce(numbers)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range({ITERATIONS}):
        dist.all_reduce(numbers)
    each = (time.perf_counter() - begun) / {ITERATIONS}
    if dist.get_rank() == 0:
        print("LOOP", size, each * 1e6, flush=True)
dist.destroy_process_group()
"""


def by_hand(folder: Path, ranks: int) -> dict[int, float]:
    """Microseconds of one all-reduce by size, timed by the loop."""
    script = folder / "loop.py"
    script.write_text(LOOP)
    words = ["run", "--gpus", "none", "--nproc-per-node", str(ranks), "--show", "rank0", "--log-dir"]
    out = _phalanx([*words, str(folder / "logs"), str(script)])
    lines = [line.split() for line in out.splitlines() if line.startswith("LOOP")]
    return {int(size): float(each) for _, size, each in lines}


def by_tool(ranks: int) -> dict[int, float]:
    """The same from `phalanx bench`."""
    words = ["bench", "all-reduce", "--backend", "gloo", "--nproc-per-node", str(ranks), "--json"]
    words += [
        "--min-bytes",
        str(SIZES[0]),
        "--max-bytes",
        str(SIZES[-1]),
        "--factor",
        str(SIZES[1] // SIZES[0]),
    ]
    report = json.loads(_phalanx([*words, "--iterations", str(ITERATIONS), "--warmup", str(WARMUP)]))
    assert report["correct"]
    return {result["size_bytes"]: result["time_us"] for result in report["results"]}


def _phalanx(words: list[str]) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def measure(runs: int, ranks: int) -> dict[str, Any]:
    """Per size: medians of both, and of the paired ratios."""
    tool: dict[int, list[float]] = {size: [] for size in SIZES}
    loop: dict[int, list[float]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory() as name:
        for number in range(runs):
            order = [(tool, lambda: by_tool(ranks)), (loop, lambda: by_hand(Path(name), ranks))]
            for kept, run in order if number % 2 else reversed(order):
                for size, each in run().items():
                    kept[size].append(each)
    ratios = {size: [a / b for a, b in zip(tool[size], loop[size], strict=True)] for size in SIZES}
    return {
        "tool_us": {size: statistics.median(tool[size]) for size in SIZES},
        "loop_us": {size: statistics.median(loop[size]) for size in SIZES},
        "ratio": {size: statistics.median(ratios[size]) for size in SIZES},
        "ratio_of_medians": {
            size: statistics.median(tool[size]) / statistics.median(loop[size]) for size in SIZES
        },
        "ratio_of_best": {size: min(tool[size]) / min(loop[size]) for size in SIZES},
        "ratio_range": {size: [min(ratios[size]), max(ratios[size])] for size in SIZES},
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    result = {
        **conditions("python", "torch", "cores", "machine"),
        "ranks": options.ranks,
        "runs": options.runs,
        **measure(options.runs, options.ranks),
    }
    if told_as_json(result, options):
        return
    print(f"{in_words(result)}, {options.ranks} ranks, {options.runs} runs of {ITERATIONS} operations")
    for size in SIZES:
        low, high = result["ratio_range"][size]
        print(
            f"{size:10} bytes   bench {result['tool_us'][size]:10.1f} us   loop {result['loop_us'][size]:10.1f} us   "
            f"x {result['ratio'][size]:.3f}  ({low:.2f} to {high:.2f}; medians x {result['ratio_of_medians'][size]:.3f}, best x {result['ratio_of_best'][size]:.3f})"
        )


if __name__ == "__main__":
    main()

"""Wall time of a command that starts 2 ranks, does one all-reduce and ends: `phalanx run` beside torchrun.

    python benchmarks/launch_start.py               9 pairs, after one of each to warm the file cache
    python benchmarks/launch_start.py --runs 3 --json

The two take turns, so that other load on the machine meets both; the ratio is the median over pairs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.ones(1)
dist.all_reduce(numbers)
assert numbers.item() == dist.get_world_size()
dist.destroy_process_group()
"""


def commands(folder: Path, ranks: int) -> dict[str, list[str]]:
    """What a user would type, by name."""
    script = str(folder / "script.py")
    ours = [
        sys.executable,
        "-m",
        "phalanx",
        "run",
        "--nproc-per-node",
        str(ranks),
        "--log-dir",
        str(folder / "logs"),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return {
        "phalanx run": [*ours, script],
        "phalanx run --no-preload": [*ours, "--no-preload", script],
        "torchrun": [*torchrun, script],
    }


def wall_s(words: list[str]) -> float:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True, env=environ)
    return time.perf_counter() - begun


def measure(runs: int, ranks: int) -> dict[str, Any]:
    """Medians per command and the paired ratios to torchrun's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        by_name = commands(folder, ranks)
        for words in by_name.values():
            wall_s(words)
        times: dict[str, list[float]] = {name: [] for name in by_name}
        for _ in range(runs):
            for name, words in by_name.items():
                times[name].append(wall_s(words))
    ratios = {
        name: [ours / theirs for ours, theirs in zip(values, times["torchrun"], strict=True)]
        for name, values in times.items()
    }
    return {
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "ratio_to_torchrun": {name: statistics.median(values) for name, values in ratios.items()},
        "ratio_range": {name: [min(values), max(values)] for name, values in ratios.items()},
        "times_s": times,
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
    print(f"{in_words(result)}, {options.ranks} ranks, {options.runs} runs")
    for name, median in result["median_s"].items():
        low, high = result["ratio_range"][name]
        print(
            f"{name:26} {median:6.2f} s   x {result['ratio_to_torchrun'][name]:.2f}  ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()

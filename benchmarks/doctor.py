"""`phalanx doctor` without its self-test beside ``python -c "import torch"``: the import is most of what it does.

    python benchmarks/doctor.py                 10 pairs, taken in turn
    python benchmarks/doctor.py --runs 3 --json

Every run is a fresh process, files in the page cache; the two take turns, so that whatever else the machine does
meets both. `--node`, which imports no torch, is timed as well.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from conditions import arguments, conditions, in_words, told_as_json

PROGRAMS = {
    "import_torch": ["-c", "import torch"],
    "doctor": ["-m", "phalanx", "doctor", "--no-self-test", "--json"],
    "doctor_node": ["-m", "phalanx", "doctor", "--node", "--json"],
}


def seconds(words: list[str]) -> float:
    """One fresh process, from its start to its end."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=False)
    took = time.perf_counter() - start
    if done.returncode not in (0, 1):  # 1: it found something, as it may
        raise SystemExit(f"python {' '.join(words)} ended with {done.returncode}")
    return took


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="pairs of runs, after one that warms up")
    options = parser.parse_args()
    for words in PROGRAMS.values():
        seconds(words)
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(options.runs):
        for name, words in PROGRAMS.items():
            taken[name].append(seconds(words))
    ratios = [ours / theirs for ours, theirs in zip(taken["doctor"], taken["import_torch"], strict=True)]
    result = {
        "schema": 1,
        "machine": conditions("cpu", "cores", "load", "python", "torch"),
        "runs": options.runs,
        "seconds": {name: statistics.median(values) for name, values in taken.items()},
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
    }
    if told_as_json(result, options):
        return
    print(f"{in_words(result['machine'])}, load {result['machine']['load']}")
    for name, value in result["seconds"].items():
        print(f"{name:>14}: {value:.2f} s (median of {options.runs})")
    ratio = result["ratio"]
    print(f"doctor / import torch: {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})")


if __name__ == "__main__":
    main()

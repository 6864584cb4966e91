"""The rnn recipe's results: airline passengers against seasonal-naive, and characters against gzip.

    python benchmarks/rnn.py                        every cell, seeds 0 to 9, 2 ranks
    python benchmarks/rnn.py --cells rnn --seeds 3 --json
    python benchmarks/rnn.py --text --seeds 1       the character model on the default text

Each run is a fresh `phalanx run rnn` with the recipe's defaults for the cell. Seasonal-naive is the same month of the year
before (one month ahead), and the last known year over and over (all at once), on the same 44 months. The interval of a mean
is Student's, 95 %.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json

CELLS = ("hand", "rnn", "lstm", "gru")
#: Student's t, 97.5 %, by degrees of freedom.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14, 19: 2.09}


def run(words: list[str], ranks: int) -> tuple[dict[str, Any], str]:
    """One command: the last line of its log, and what it printed."""
    command = [sys.executable, "-m", "phalanx", "run", "--gpus", "none", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "rnn", *words], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        last = json.loads((Path(folder) / "runs" / "rnn" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["split"] == "test"
    return last, done.stdout


def number(pattern: str, text: str) -> float:
    """The number that the recipe printed."""
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


def summary(values: list[float]) -> dict[str, float | None]:
    """Mean with the half width of its interval, smallest, largest."""
    count = len(values)
    half = _T.get(count - 1, 1.96) * statistics.stdev(values) / math.sqrt(count) if count > 1 else None
    return {"mean": statistics.mean(values), "interval": half, "min": min(values), "max": max(values)}


def passengers(cells: list[str], seeds: int, ranks: int) -> dict[str, Any]:
    """Errors of every cell, in thousands of passengers, and those of seasonal-naive."""
    result: dict[str, Any] = {"cells": {}}
    for cell in cells:
        ahead, at_once = [], []
        for seed in range(seeds):
            scores, said = run(["--cell", cell, "--seed", str(seed)], ranks)
            ahead.append(scores["rmse"])
            at_once.append(scores["rmse_all_at_once"])
            result["naive_ahead"] = number(r"the month a year before: ([\d.]+)", said)
            result["naive_at_once"] = number(r"the last known year again: ([\d.]+)", said)
        result["cells"][cell] = {"ahead": summary(ahead), "at_once": summary(at_once)}
        print(f"{cell}: {_words(result['cells'][cell])}", file=sys.stderr, flush=True)
    return result


def _words(errors: dict[str, Any]) -> str:
    parts = []
    for name, title in (("ahead", "one month ahead"), ("at_once", "all at once")):
        each = errors[name]
        interval = f" +- {each['interval']:.1f}" if each["interval"] is not None else ""
        parts.append(f"{title} {each['mean']:.1f}{interval} ({each['min']:.1f} to {each['max']:.1f})")
    return ", ".join(parts)


def characters(seeds: int, ranks: int) -> dict[str, Any]:
    """Bits per character of the test part, and gzip's."""
    bits, seconds, gzip_bits = [], [], 0.0
    for seed in range(seeds):
        scores, said = run(["--data", "text", "--seed", str(seed)], ranks)
        bits.append(scores["bits_per_character"])
        seconds.append(number(r"trained for ([\d.]+) s", said))
        gzip_bits = number(r"gzip needs ([\d.]+)", said)
    return {"bits_per_character": summary(bits), "gzip": gzip_bits, "longest_training_s": max(seconds)}


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__, whole=True)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    about = {"seeds": options.seeds, "ranks": options.ranks, **conditions("torch", "python", "cores")}
    if options.text:
        result = about | characters(options.seeds, options.ranks)
    else:
        result = about | passengers(options.cells.split(","), options.seeds, options.ranks)
    if told_as_json(result, options):
        return
    print(f"{in_words(result)}, {options.ranks} ranks, {options.seeds} seeds")
    if options.text:
        each = result["bits_per_character"]
        print(f"{each['mean']:.3f} bits per character ({each['min']:.3f} to {each['max']:.3f})", end=", ")
        print(f"gzip {result['gzip']:.3f}; longest training {result['longest_training_s']:.0f} s")
        return
    print(f"seasonal-naive: one month ahead {result['naive_ahead']}, all at once {result['naive_at_once']}")
    for cell, errors in result["cells"].items():
        print(f"{cell}: {_words(errors)}")


if __name__ == "__main__":
    main()

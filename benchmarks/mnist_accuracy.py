"""Test accuracy and training time of `phalanx run --nproc-per-node 2 mnist`, several seeds.

    python benchmarks/mnist_accuracy.py                 the digits that come along, seeds 0 to 4
    python benchmarks/mnist_accuracy.py --data fashion --seeds 1

Each seed is a fresh command with the recipe's default settings. The time is that of the training loop, as the
recipe reports it: validation, checkpoints and start-up apart; the wall time of the whole command stands beside it.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json


def run(data: str, seed: int, ranks: int) -> dict[str, float]:
    """One command; what it reached and how long it took."""
    words = [
        sys.executable,
        "-m",
        "phalanx",
        "run",
        "--nproc-per-node",
        str(ranks),
        "mnist",
        "--data",
        data,
        "--seed",
        str(seed),
    ]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
        wall_s = time.perf_counter() - begun
        last = json.loads((Path(folder) / "runs" / "mnist" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["split"] == "test"
    trained = re.search(r"trained for ([\d.]+) s", done.stdout)
    assert trained is not None
    return {
        "seed": seed,
        "accuracy": last["accuracy"],
        "training_s": float(trained[1]),
        "wall_s": round(wall_s, 1),
    }


def main() -> None:
    parser = arguments(__doc__, whole=True)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    rows = []
    for seed in range(args.seeds):
        rows.append(run(args.data, seed, args.ranks))
        if not args.json:
            row = rows[-1]
            print(
                f"seed {seed}: test accuracy {row['accuracy']:.2%}, {row['training_s']:.1f} s of training, "
                f"{row['wall_s']:.1f} s in all",
                flush=True,
            )
    found: dict[str, Any] = {
        "data": args.data,
        "ranks": args.ranks,
        "runs": rows,
        "mean_accuracy": statistics.mean(row["accuracy"] for row in rows),
        "longest_training_s": max(row["training_s"] for row in rows),
        **conditions("torch", "python", "cpus"),
    }
    if not told_as_json(found, args):
        print(
            f"mean {found['mean_accuracy']:.2%} of {len(rows)} seeds on {args.ranks} ranks, longest training "
            f"{found['longest_training_s']:.1f} s; {in_words(found)}"
        )


if __name__ == "__main__":
    main()

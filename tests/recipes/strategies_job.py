"""A script for launchers: the mnist recipe once by each strategy in the arguments, in one job; rank 0 notes how each ended.

Starting a launcher and importing torch takes longer than a short run of the recipe, so that a job goes through them all.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """``strategies_job.py FOLDER STRATEGY...``: a strategy is a name, or ``deepspeed:STAGE``."""
    from phalanx.dist import init_world
    from phalanx.recipes import mnist
    from phalanx.recipes.runs import read_metrics

    folder, *strategies = sys.argv[1:]
    os.chdir(folder)
    found = {}
    for strategy in strategies:
        name, _, stage = strategy.partition(":")
        words = ["--strategy", name, *(["--zero-stage", stage] if stage else []), "--output-dir", strategy]
        code: object = 0
        try:
            mnist.main(
                ["--data", "digits", "--epochs", "1", "--global-batch-size", "256", "--lr", "0.01", *words]
            )
        except SystemExit as error:
            code = error.code
        gc.collect()
        metrics = Path(strategy) / "metrics.jsonl"
        found[strategy] = [code, read_metrics(metrics)[-1] if metrics.is_file() else None]
    world = init_world()
    if world.is_rank_zero:
        report = {"world_size": world.world_size, "source": world.source, "strategies": found}
        Path("report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()

"""Rank 1 raises, rank 0 raises 60 ms later because of it: whom does the launcher name?

python benchmarks/first_failure.py              20 runs of each
python benchmarks/first_failure.py --runs 3 --json
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json

SCRIPT = """
import time
import torch.distributed as dist
{preparation}
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    time.sleep(0.06)
    raise RuntimeError("the other rank has a problem")

main()
"""


RECORD = "from torch.distributed.elastic.multiprocessing.errors import record\n@record"


def named(words: list[str], pattern: str, folder: Path) -> str:
    """The rank that a run's output calls the first failure; "none" where it names none."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = re.search(pattern, done.stderr, re.DOTALL)
    return found[1] if found else "none"


def measure(runs: int) -> dict[str, Any]:
    """How often each rank was named, per launcher; for torchrun also with @record in the script, as its manual asks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, recorded = folder / "script.py", folder / "recorded.py"
        plain.write_text(SCRIPT.replace("{preparation}", ""))
        recorded.write_text(SCRIPT.replace("{preparation}", RECORD))
        ours = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", str(plain)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        root_cause = r"Root Cause.*?rank\s*: (\d+) "
        counts: dict[str, Counter[str]] = {
            "phalanx run": Counter(),
            "torchrun": Counter(),
            "torchrun, script with @record": Counter(),
        }
        for _ in range(runs):
            counts["phalanx run"][named(ours, r"First failure: rank (\d+) ", folder)] += 1
            counts["torchrun"][named([*torchrun, str(plain)], root_cause, folder)] += 1
            counts["torchrun, script with @record"][
                named([*torchrun, str(recorded)], root_cause, folder)
            ] += 1
    return {launcher: dict(count) for launcher, count in counts.items()}


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    counts = measure(options.runs)
    ours, theirs = (counts[name].get("1", 0) for name in ("phalanx run", "torchrun"))
    result = {
        **conditions("python", "torch", "cores", "machine"),
        "runs": options.runs,
        "named": counts,
        "ratio": ours / theirs if theirs else None,
    }
    if told_as_json(result, options):
        return
    print(f"{in_words(result)}, {options.runs} runs of each")
    for launcher, count in counts.items():
        print(
            f"{launcher:29} names rank 1, the cause, {count.get('1', 0)} times of {options.runs}; all: {count}"
        )


if __name__ == "__main__":
    main()

"""`phalanx explain`: time and memory for logs of a gigabyte, and the time for a small one.

    python benchmarks/explain.py                  three logs of 1 GB each, and 9 starts on a small log
    python benchmarks/explain.py --gb 0.1 --json

The logs: `steps`, eight ranks that print a line a step; `prose`, lines of words of which none repeats (samples
that a script prints), one in twenty with an alarming word; `nccl`, what NCCL_DEBUG=INFO prints between the steps. Each ends with one rank's traceback.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json

TRACEBACK = """\
[rank5]: Traceback (most recent call last):
[rank5]:   File "/home/user/train.py", line 88, in <module>
[rank5]:     loss.backward()
[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 5 has a total capacity of \
24.00 GiB of which 1.10 GiB is free. Including non-PyTorch memory, this process has 22.90 GiB memory in use.
"""
WORDS = """the model was trained on a corpus of sentences and prints one sample per step while it learns to write about
rivers mountains people machines letters numbers colours seasons birds winter evening garden river bridge stone"""
ALARMS = ["memory", "failed", "error", "device", "not found"]


def _steps() -> Iterator[str]:
    step = 0
    while True:
        step += 1
        for rank in range(8):
            yield (
                f"[rank{rank}]: 2026-03-01 10:{step // 60 % 60:02d}:{step % 60:02d},123 - INFO - train - epoch {step // 1000} "
                f"step {step} loss {random.random():.4f} lr 0.001 samples/s {random.randint(100, 999)}\n"
            )


def _prose() -> Iterator[str]:
    words = WORDS.split()
    while True:
        alarm = random.choice(ALARMS) if random.random() < 0.05 else "calm"
        yield " ".join([*random.choices(words, k=18), alarm]) + "\n"


def _nccl() -> Iterator[str]:
    steps, count = _steps(), 0
    while True:
        count += 1
        yield f"node1:{1000 + count % 8}:{2000 + count % 97} [{count % 8}] NCCL INFO Channel {count % 24:02d}/0 : {count % 8}[{count % 8}] -> {(count + 1) % 8}[{(count + 1) % 8}] via P2P/CUMEM/read\n"
        yield next(steps)


LOGS: dict[str, Callable[[], Iterator[str]]] = {"steps": _steps, "prose": _prose, "nccl": _nccl}


def write_log(path: Path, name: str, size: int) -> None:
    """A log of about ``size`` bytes: one piece of 16 MB that is repeated, other numbers in each."""
    random.seed(0)
    lines, piece = LOGS[name](), ""
    parts: list[str] = []
    length = 0
    for line in lines:
        parts.append(line)
        length += len(line)
        if length >= min(size, 16 << 20):
            break
    piece = "".join(parts)
    with path.open("w") as file:
        written = 0
        while written < size:
            file.write(piece)
            written += len(piece)
        file.write(TRACEBACK)


def explain(path: Path) -> tuple[float, float, str]:
    """Seconds, MB at the peak, and what was found."""
    words = [sys.executable, "-m", "phalanx", "explain", "--json", str(path)]
    begun = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    out = process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    found = json.loads(out)
    first = found["diagnoses"][0]["id"] if found["diagnoses"] else found["outcome"]
    return time.perf_counter() - begun, usage.ru_maxrss / 1000, first


def measure(size_gb: float, runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        large = {}
        for log in LOGS:
            path = Path(name, f"{log}.log")
            write_log(path, log, int(size_gb * 1e9))
            seconds, megabytes, found = explain(path)
            large[log] = {"s": seconds, "peak_mb": megabytes, "found": found}
            path.unlink()
        small = Path(name, "small.log")
        write_log(small, "steps", 20_000)
        explain(small)
        times = [explain(small)[0] for _ in range(runs)]
    return {"large": large, "small_s": statistics.median(times), "small_range_s": [min(times), max(times)]}


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    result = {
        **conditions("python", "cores", "machine"),
        "gb": options.gb,
        "runs": options.runs,
        "own_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        **measure(options.gb, options.runs),
    }
    if told_as_json(result, options):
        return
    print(f"{in_words(result)}, {options.gb} GB each, {options.runs} starts")
    for name, row in result["large"].items():
        print(f"{name:8} {row['s']:6.1f} s  {row['peak_mb']:6.0f} MB  {row['found']}")
    low, high = result["small_range_s"]
    print(f"small    {result['small_s']:6.2f} s  ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()

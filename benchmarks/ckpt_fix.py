"""`phalanx ckpt fix` on a large .pt against `cp` and `sync`, and how long `phalanx ckpt inspect` takes.

    python benchmarks/ckpt_fix.py                  4 GB, in turn, three times
    python benchmarks/ckpt_fix.py --gb 1 --runs 5 --json

Needs three times the size on disk (in --folder, removed afterwards). The file holds fp32 weights of a model that DDP wrapped;
`fix` writes it without the wrapper's prefix and syncs it. `cp` copies the same file, then syncs it. Both run in processes of
their own, caches warm from the writing before; memory is the peak of what was resident in `fix`'s process (VmHWM, sampled
by the kernel, taken by a wrapper in the same process).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

LAYER = (4096, 4096)
RATIO_LIMIT, MEMORY_LIMIT_MB, INSPECT_LIMIT_S = 1.5, 300.0, 0.5

# The command, and at its end the peak of this process.
WATCHED = """
import sys
from phalanx.launch.entry import command
code = command(sys.argv[1:])
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM:")), file=sys.stderr)
sys.exit(code)
"""


def write_source(folder: Path, num_bytes: int) -> int:
    """A wrapped model's weights; how many layers."""
    layers = max(1, num_bytes // (4 * LAYER[0] * LAYER[1]))
    torch.save({f"module.layers.{n}.weight": torch.randn(LAYER) for n in range(layers)}, folder / "in.pt")
    (folder / "keys.txt").write_text("\n".join(f"layers.{n}.weight" for n in range(layers)))
    os.sync()
    return layers


def timed(words: list[str]) -> tuple[float, str]:
    """Seconds, and what was printed on standard error."""
    start = time.perf_counter()
    done = subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return time.perf_counter() - start, done.stderr


def one_run(folder: Path) -> dict[str, float]:
    """cp and sync, fix, inspect."""
    source, copy, fixed = (folder / name for name in ("in.pt", "copy.pt", "out.pt"))
    copied_s, _ = timed(["sh", "-c", f"cp {source} {copy} && sync {copy}"])
    copy.unlink()
    words = [
        sys.executable,
        "-c",
        WATCHED,
        "ckpt",
        "fix",
        str(source),
        "--like",
        str(folder / "keys.txt"),
        "-o",
        str(fixed),
    ]
    fixed_s, peak = timed(words)
    inspect_s, _ = timed([sys.executable, "-m", "phalanx", "ckpt", "inspect", str(source), "--json"])
    loaded = torch.load(fixed, weights_only=True, mmap=True)
    assert next(iter(loaded)) == "layers.0.weight"
    del loaded
    fixed.unlink()
    return {
        "cp_s": copied_s,
        "fix_s": fixed_s,
        "ratio": fixed_s / copied_s,
        "fix_mb": int(peak) / 1024,
        "inspect_s": inspect_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=4.0, help="size of the file, in 10^9 bytes")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckpt-fix-", dir=options.folder))
    try:
        layers = write_source(folder, int(options.gb * 1e9))
        runs = [one_run(folder) for _ in range(options.runs)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result: dict[str, Any] = {
        "gb": options.gb,
        "layers": layers,
        "ratio": statistics.median(run["ratio"] for run in runs),
        "fix_mb": max(run["fix_mb"] for run in runs),
        "inspect_s": max(run["inspect_s"] for run in runs),
        "runs": runs,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "cpus": os.cpu_count(),
    }
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{options.gb} GB in {layers} tensors, torch {torch.__version__}, {os.cpu_count()} CPUs, {options.runs} runs in turn"
    )
    for run in runs:
        print("  " + ", ".join(f"{name} {value:.3g}" for name, value in run.items()))
    print(f"  fix takes {result['ratio']:.2f} x cp + sync (at most {RATIO_LIMIT}), {result['fix_mb']:.0f} MB (at most "
          f"{MEMORY_LIMIT_MB:.0f}); inspect {result['inspect_s']:.2f} s (at most {INSPECT_LIMIT_S})")  # fmt: skip


if __name__ == "__main__":
    main()

"""How long a save holds up training, and what a restore takes in memory, against torch.save and torch.load.

    python benchmarks/checkpoint_save.py                        4 GB: weights and Adam's two moments, fp32
    python benchmarks/checkpoint_save.py --gb 0.5 --saves 4 --json

Needs twice the size in memory and three times on disk (in --folder, removed afterwards). `torch.save + fsync` writes
the same tensors to one file. Each save is timed until it returns, and until it is on disk; between two saves the
weights are changed. Restores run in processes of their own; memory is the peak of what is resident (VmHWM, after
clear_refs) above what it was with the model built, and above what it is in the end: the latter leaves out the
moments, which a fresh optimizer does not have yet. Lastly one bit of each file is flipped, and each must be found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from conditions import arguments, conditions, in_words, told_as_json
from torch import nn

from phalanx.dist import CheckpointManager

LAYER_BYTES = 64 << 20
SAVE_TARGET, MEMORY_TARGET = 0.15, 0.3


def build(num_bytes: int, with_moments: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of equal layers that makes a checkpoint of about this size."""
    share = 3 if with_moments else 1
    count = max(1, round(num_bytes / share / LAYER_BYTES))
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(4096, LAYER_BYTES // 4 // 4096) for _ in range(count)])
    kind: Any = torch.optim.Adam if with_moments else torch.optim.SGD
    return model, kind(model.parameters(), lr=1e-3)


def fill_moments(optimizer: torch.optim.Optimizer) -> None:
    """What a first step of Adam would make; without its temporary memory."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.rand_like(parameter),
                "exp_avg_sq": torch.rand_like(parameter),
            }


def torch_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of torch.save and fsync."""
    start = time.perf_counter()
    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start


def measure_saves(folder: Path, num_bytes: int, saves: int) -> dict[str, Any]:
    """Saves and torch.saves in turn, so that other load falls on both."""
    model, optimizer = build(num_bytes, with_moments=True)
    fill_moments(optimizer)
    manager = CheckpointManager(folder / "ours", model=model, optimizer=optimizer, keep=1)
    rows = []
    for _ in range(saves):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        theirs = torch_save(folder / "theirs.pt", model, optimizer)
        (folder / "theirs.pt").unlink()
        start = time.perf_counter()
        manager.save()
        returned = time.perf_counter() - start
        manager.wait()
        rows.append(
            {
                "torch_save_s": theirs,
                "save_returns_s": returned,
                "on_disk_s": time.perf_counter() - start,
                "ratio": returned / theirs,
            }
        )
    manager.close()
    later = [row["ratio"] for row in rows[1:]]
    return {
        "first_ratio": rows[0]["ratio"],
        "ratio": statistics.median(later),
        "ratio_max": max(later),
        "runs": rows,
    }


def status_mb(name: str) -> float:
    """A line of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def measure_restore(folder: Path, num_bytes: int, with_moments: bool, how: str) -> dict[str, float]:
    """Peak memory of one restore, in this process."""
    model, optimizer = build(num_bytes, with_moments)
    before = status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.perf_counter()
    if how == "torch.load":
        saved = torch.load(folder / "theirs.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        del saved
    else:
        CheckpointManager(folder / "ours", model=model, optimizer=optimizer).restore()
    elapsed_s = time.perf_counter() - start
    peak = status_mb("VmHWM")
    return {
        "above_model_mb": peak - before,
        "above_end_mb": peak - status_mb("VmRSS"),
        "elapsed_s": elapsed_s,
    }


def restores(folder: Path, num_bytes: int, with_moments: bool) -> dict[str, Any]:
    """Save once in both ways, then restore each in a process of its own."""
    model, optimizer = build(num_bytes, with_moments)
    if with_moments:
        fill_moments(optimizer)
    with CheckpointManager(
        folder / "ours", model=model, optimizer=optimizer, keep=1, asynchronous=False
    ) as manager:
        path = manager.save()
    size_mb = sum(file.stat().st_size for file in path.iterdir()) / 2**20
    torch_save(folder / "theirs.pt", model, optimizer)
    del model, optimizer, manager
    found: dict[str, Any] = {"checkpoint_mb": size_mb}
    for how in ("phalanx", "torch.load"):
        words = [__file__, "--restore", how, "--folder", str(folder), "--gb", str(num_bytes / 1e9)]
        words += ["--moments"] if with_moments else []
        row = json.loads(subprocess.run([sys.executable, *words], check=True, capture_output=True).stdout)
        found[how] = {
            **row,
            "above_model": row["above_model_mb"] / size_mb,
            "above_end": row["above_end_mb"] / size_mb,
        }
    (folder / "theirs.pt").unlink()
    return found


def flipped_bits(folder: Path, num_bytes: int, flips: int) -> dict[str, int]:
    """Flip random single bits, most of them somewhere in the tensors; how many are found."""
    model, optimizer = build(num_bytes, with_moments=True)
    manager = CheckpointManager(folder / "ours", model=model, optimizer=optimizer)
    path = manager.latest()
    assert path is not None
    files = sorted(path.iterdir())
    found = 0
    for number in range(flips):
        file = files[number % len(files)]
        place = random.randrange(file.stat().st_size)
        flip(file, place)
        found += bool(manager.verify())
        flip(file, place)
    assert manager.verify() == []
    return {"flipped": flips, "found": found}


def flip(file: Path, place: int) -> None:
    """Change one bit of a file."""
    with file.open("r+b") as handle:
        handle.seek(place)
        value = handle.read(1)[0]
        handle.seek(place)
        handle.write(bytes([value ^ 1 << place % 8]))


def main() -> None:
    parser = arguments(__doc__, whole=True)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint, in 10^9 bytes")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--flips", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--restore", choices=("phalanx", "torch.load"), help=argparse.SUPPRESS)
    parser.add_argument("--moments", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_bytes = int(options.gb * 1e9)
    if options.restore:
        print(json.dumps(measure_restore(options.folder, num_bytes, options.moments, options.restore)))
        return
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-save-", dir=options.folder))
    try:
        result: dict[str, Any] = {
            "gb": options.gb,
            "save": measure_saves(folder, num_bytes, options.saves),
        }
        shutil.rmtree(folder / "ours")
        result["restore weights alone"] = restores(folder, num_bytes, with_moments=False)
        shutil.rmtree(folder / "ours")
        result["restore with Adam"] = restores(folder, num_bytes, with_moments=True)
        result["bits"] = flipped_bits(folder, num_bytes, options.flips)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result |= {
        "versions": conditions("torch", "python"),
        **conditions("cpus"),
    }
    if told_as_json(result, options):
        return
    save = result["save"]
    print(f"{options.gb} GB, {in_words(result['versions'] | result)}, {options.saves} saves in turn")
    for row in save["runs"]:
        print("  " + ", ".join(f"{name} {value:.3g}" for name, value in row.items()))
    print(
        f"  save returns in {save['ratio']:.3f} x torch.save + fsync (first {save['first_ratio']:.3f}; at most {SAVE_TARGET})"
    )
    for name in ("restore weights alone", "restore with Adam"):
        for how in ("phalanx", "torch.load"):
            row = result[name][how]
            print(
                f"  {name}, {how}: {row['elapsed_s']:.1f} s, memory above the built model {row['above_model']:.2f} x, "
                f"above the end's {row['above_end']:.2f} x the checkpoint (at most {MEMORY_TARGET})"
            )
    print(f"  {result['bits']['found']} of {result['bits']['flipped']} flipped bits found")


if __name__ == "__main__":
    main()

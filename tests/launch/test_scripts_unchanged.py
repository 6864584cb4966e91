"""Scripts written for torchrun, accelerate or multiprocessing run under `phalanx run` as they are."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

READS_LOCAL_RANK = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
print("local rank", parser.parse_args().local_rank)
"""

OWN_GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("total", total.item())
dist.destroy_process_group()
"""

SPAWNS = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def child(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    if rank == 0:
        print("total", total.item(), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(child, args=(port,), nprocs=2)
"""

LOADER_WORKERS = """
import sys, torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=method)
        print(method, sum(batch.sum().item() for batch in loader))
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0), "sum")
print("process", accelerator.process_index, "of", accelerator.num_processes, "total", total.item())
accelerator.end_training()
"""


def run(folder: Path, text: str, nproc: int) -> list[str]:
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(nproc), "script.py"],
        cwd=folder,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line.partition("] ")[2] or line for line in done.stdout.splitlines())


def test_a_script_that_reads_local_rank(tmp_path: Path) -> None:
    """Like torchrun: no --local-rank among the arguments, LOCAL_RANK in the environment."""
    assert run(tmp_path, READS_LOCAL_RANK, 2) == ["local rank 0", "local rank 1"]


def test_a_script_that_makes_its_own_group(tmp_path: Path) -> None:
    assert run(tmp_path, OWN_GROUP, 2) == ["total 3.0", "total 3.0"]


def test_a_script_that_spawns_its_own_ranks(tmp_path: Path) -> None:
    assert run(tmp_path, SPAWNS, 1) == ["total 3.0"]


def test_loader_workers_by_fork_and_by_spawn(tmp_path: Path) -> None:
    assert run(tmp_path, LOADER_WORKERS, 1) == ["fork 28", "spawn 28"]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_an_accelerate_script(tmp_path: Path) -> None:
    assert run(tmp_path, ACCELERATE, 2) == [f"process {rank} of 2 total 3.0" for rank in (0, 1)]

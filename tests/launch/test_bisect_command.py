"""`phalanx bisect` on unchanged scripts: exit codes, words and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from phalanx.dist import ShardLoader, init_world, parallelize, seed_everything
init_world(device="cpu")
seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
loader = ShardLoader(data, global_batch_size=10, shuffle=True)
model, optimizer, _ = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)
print("noise on stdout")
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
raise AssertionError("one step was asked for")
"""

PLAIN = """
import os
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(8, 4)[rank::world_size]
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    model(x).square().mean().backward()
    optimizer.step()
"""


def bisect(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "bisect", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_a_healthy_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = bisect(tmp_path, "--gpus", "none", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("The same on 2 ranks and on 1: ")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_plain_script_with_batch_norm_in_json(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    done = bisect(tmp_path, "--gpus", "none", "--json", "--output-dir", "kept", "plain.py")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert (found["schema"], found["same"], found["world_sizes"]) == (1, False, [1, 2])
    assert (found["divergence"]["kind"], found["divergence"]["name"]) == ("output", "1")
    assert "batch norm" in found["divergence"]["reason"]
    assert (tmp_path / "kept" / "world-2" / "rank-1-step-0.pt").is_file()


def test_a_script_that_fails(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemError('so it is')\n")
    done = bisect(tmp_path, "--gpus", "none", "train.py")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("phalanx bisect: The script failed on 1 rank (exit code 1)")
    assert "SystemError: so it is" in done.stderr
    assert "Traceback" not in done.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "TARGET is missing"),
        (["none.py"], "There is no script 'none.py'"),
        (["--world-sizes", "1", "mnist"], "--world-sizes 1: two or more"),
        (["--world-sizes", "1,x", "mnist"], "--world-sizes 1,x: two or more"),
        (["--world-sizes", "2,2", "mnist"], "--world-sizes 2,2: two or more"),
        (["--world-sizes", "0,1", "mnist"], "--world-sizes 0,1: two or more"),
        (["--steps", "0", "mnist"], "--steps 0: a number of steps"),
        (["--tolerance", "nan", "mnist"], "--tolerance nan: a relative difference"),
        (["--tolerance", "x", "mnist"], "--tolerance x: a relative difference"),
        (["--no-such", "mnist"], "There is no option --no-such"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    from phalanx.launch.entry import command

    assert command(["bisect", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Fix: " in said

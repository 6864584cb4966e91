"""`phalanx bench` as a user types it: with ranks of its own, and under other launchers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = ["phalanx", "bench"]
RANK = ["phalanx.tools.bench"]
QUICK = ["--max-bytes", "4K", "--iterations", "2", "--warmup", "0"]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=120,
    )


def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    done = run(tmp_path, *BENCH, "all-reduce", *QUICK, "--backend", "gloo", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["world_size"], report["correct"]) == (1, 2, True)
    assert [result["size_bytes"] for result in report["results"]] == [1024, 4096]
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []  # no log folder is left


def test_one_rank_has_no_bus_bandwidth(tmp_path: Path) -> None:
    done = run(tmp_path, *BENCH, "all-gather", *QUICK, "--gpus", "none", "--nproc-per-node", "1")
    assert done.returncode == 0, done.stderr
    assert "BUSBW: n/a with one rank" in done.stdout
    assert done.stdout.count(" n/a  yes") == 2


@pytest.mark.parametrize(
    "launcher",
    [["phalanx", "run", "--log-dir", "logs", "--show", "rank0"], ["torch.distributed.run"]],
    ids=["phalanx run", "torchrun"],
)
def test_under_another_launcher(tmp_path: Path, launcher: list[str]) -> None:
    done = run(tmp_path, *launcher, "--nproc-per-node", "2", "-m", *RANK, "broadcast", *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2


def test_a_loader(tmp_path: Path) -> None:
    script = "import torch\ndef make():\n    return torch.utils.data.DataLoader(torch.arange(64.0), batch_size=4)\n"
    (tmp_path / "train.py").write_text(script)
    done = run(tmp_path, *BENCH, "loader", "train.py:make", "--workers", "0", "--iterations", "8", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["results"][0]["samples_per_s"] == pytest.approx(4 * report["results"][0]["batches_per_s"])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["all-redcue"], 2, "Fix: phalanx bench all-reduce"),
        ([], 2, "KIND"),
        (["all-reduce", "extra"], 2, "takes no target"),
        (["all-reduce", "--min-bytes", "two"], 2, "--min-bytes two"),
        (["all-reduce", "--gpus", "none", "--nproc-per-node", "0"], 2, "a node needs at least one rank"),
        (["loader"], 2, "Fix: phalanx bench loader train.py:make_loader"),
        (["loader", "train.py:make", "--workers", "0,x"], 2, "--workers 0,x"),
        (["loader", "nowhere.py:make"], 2, "there is no file nowhere.py"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], code: int, message: str) -> None:
    done = run(tmp_path, *BENCH, *words)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.startswith("phalanx bench: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_without_a_gpu_nccl_cannot_be_measured(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(tmp_path, *BENCH, "all-reduce", "--backend", "nccl", *QUICK)
    assert (done.returncode, done.stdout) == (3, "")
    assert "Fix: --backend gloo" in done.stderr

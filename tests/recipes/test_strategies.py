"""The mnist recipe by every strategy under every launcher, on 1 to 4 ranks: a short run of the digits for each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.launch.slurm_lab import missing, slurm_lab

JOB = ROOT / "tests" / "recipes" / "strategies_job.py"
ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
SHARDED = ["fsdp", "deepspeed:0", "deepspeed:1", "deepspeed:2", "deepspeed:3", "accelerate"]
EVERY = ["ddp", *SHARDED, "single", "dp"]
#: Each launcher with several ranks and, where it can, with one: on one rank "single" trains, on several it has a word.
JOBS = [
    ("python", 1, EVERY),
    ("phalanx run", 4, EVERY),
    ("phalanx run", 1, ["single"]),
    ("torchrun", 3, EVERY),
    ("torchrun", 1, ["single"]),
    ("accelerate launch", 2, EVERY),
    ("accelerate launch", 1, ["single"]),
    ("mpirun", 2, EVERY),
    ("mpirun", 1, ["single"]),
    ("srun", 4, EVERY),
    ("srun", 1, ["single"]),
]


def _start(words: list[str], folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=os.environ | ENVIRON | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def _by_srun(ranks: int, job: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    if (why := missing()) is not None:
        pytest.skip(f"Slurm lab: {why}")
    with slurm_lab() as lab:  # two nodes where the ranks are two each
        nodes = f"-N{2 if ranks == 4 else 1}"
        return lab.srun(nodes, f"-n{ranks}", *job, environ=ENVIRON, cwd=folder, timeout_s=500)


def _command(launcher: str, ranks: int) -> list[str]:
    if launcher == "python":
        return [sys.executable]
    if launcher == "phalanx run":
        return [sys.executable, "-m", "phalanx", "run", "--gpus", "none", "--nproc-per-node", str(ranks)]
    if launcher == "torchrun":
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        ]  # fmt: skip
    if launcher == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("no mpirun (Debian: apt install openmpi-bin)")
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun", *root, "--oversubscribe", "-n", str(ranks), sys.executable]
    several = ["--multi_gpu", "--main_process_port", "0"] if ranks > 1 else ["--cpu"]
    return [
        sys.executable, "-m", "accelerate.commands.launch", *several, "--num_processes", str(ranks),
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
    ]  # fmt: skip


@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    ("launcher", "ranks", "strategies"), JOBS, ids=[f"{launcher}-{ranks}" for launcher, ranks, _ in JOBS]
)
def test_every_strategy_under_every_launcher(
    launcher: str, ranks: int, strategies: list[str], tmp_path: Path
) -> None:
    absent = [name for name in ("accelerate", "deepspeed") if find_spec(name) is None]
    if absent:
        pytest.skip(f"no {' and no '.join(absent)} (pip install 'phalanx[all]')")
    job = [str(JOB), str(tmp_path), *strategies]
    if launcher == "srun":
        done = _by_srun(ranks, [sys.executable, *job], tmp_path)
    else:
        # Open MPI's own folder holds sockets, so that its path must be short.
        with tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True) as own:
            environ = {"OMPI_MCA_orte_tmpdir_base": own}
            done = _start([*_command(launcher, ranks), *job], tmp_path, environ)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["world_size"] == ranks, said
    _check(report["strategies"], ranks, said)


def _check(found: dict[str, Any], ranks: int, said: str) -> None:
    """All that can train end alike; ``single`` on several ranks and ``dp`` without a GPU have their word."""
    refused = {"dp"} | ({"single"} if ranks > 1 else set())
    trained = {name: end for name, end in found.items() if name not in refused}
    first = next(iter(trained.values()))[1]
    for name, (code, test) in trained.items():
        assert code == 0, f"{name}: {said}"
        assert test["split"] == "test"
        assert test["loss"] == pytest.approx(first["loss"], rel=1e-3), f"{name}: {trained}"
        assert test["accuracy"] > 0.5  # of ten classes, after six steps
    for name in refused & set(found):
        assert found[name] == [2, None], f"{name}: {said}"
    for name, text in (("dp", "strategy='dp'"), ("single", "strategy='single' on")):
        assert said.count(text) == (name in refused and name in found), said

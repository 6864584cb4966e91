"""gpus and bench in a real Slurm allocation of two nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm_lab import SlurmLab, missing, slurm_lab
from tests.nvml.machine import GIB, Machine, StandInGpu, build_libraries, uuid_of

_WHY_NOT = missing()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=f"Slurm lab: {_WHY_NOT}")

ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
PHALANX = [sys.executable, "-m", "phalanx"]


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    with slurm_lab() as running:
        yield running


def test_an_allocation_is_one_table(lab: SlurmLab, tmp_path: Path) -> None:
    """The batch script's own host is no node of its own; each node is asked by srun, and both are this machine."""
    described = Machine(
        build_libraries(tmp_path), tmp_path, [StandInGpu(uuid=uuid_of("a"), used_bytes=3 * GIB)]
    )
    environ = {name: described.environ()[name] for name in ("LD_LIBRARY_PATH", "STAND_IN_NVML")}
    words = ["-N2", "-n4", *PHALANX, "gpus", "--json"]
    done = lab.salloc(*words, environ={**ENVIRON, **environ}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert [gpu["host"] for gpu in found["gpus"]] == ["n1", "n2"]
    assert [host["error"] for host in found["hosts"]] == ["", ""]


def test_collectives_between_two_nodes(lab: SlurmLab, tmp_path: Path) -> None:
    quick = ["--max-bytes", "1K", "--iterations", "2", "--json"]
    words = [
        "-N2",
        "-n2",
        sys.executable,
        "-m",
        "phalanx.tools.bench",
        "all-reduce",
        "--backend",
        "gloo",
        *quick,
    ]
    done = lab.srun(*words, environ=ENVIRON, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["world_size"], report["correct"]) == (2, True)
    assert report["slowest_pair"]["ranks"] == [0, 1]

"""The batch scripts of docs/slurm, as they are, in a real Slurm."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm_lab import SlurmLab, missing, slurm_lab

_WHY_NOT = missing()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=f"Slurm lab: {_WHY_NOT}")

FILES = Path(__file__).parents[2] / "docs" / "slurm"
RANKS = {"one-task-per-node": 2, "one-task-per-gpu": 4, "self-start": 2, "plain-python": 4}

SCRIPT = """
from phalanx.dist import all_reduce_sum, init_world

world = init_world(device="cpu")
print(f"sum {all_reduce_sum(1)} {world.rank}/{world.world_size} node {world.node_rank}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    with slurm_lab() as running:
        yield running


def test_every_file_is_tested() -> None:
    assert sorted(path.stem for path in FILES.glob("*.sh")) == sorted(RANKS)


@pytest.mark.parametrize("name", RANKS)
def test_the_file_runs_as_it_is(lab: SlurmLab, tmp_path: Path, name: str) -> None:
    shutil.copy(FILES / f"{name}.sh", tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path}
    job = lab.sbatch(f"{name}.sh", environ=environ, cwd=tmp_path)
    found = lab.wait_for_job(job)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert found["JobState"] == "COMPLETED", output
    ranks = RANKS[name]
    shown = sorted(line[line.index("sum ") :] for line in output.splitlines() if "sum " in line)
    assert shown == [f"sum {ranks} {r}/{ranks} node {r * 2 // ranks}" for r in range(ranks)], output

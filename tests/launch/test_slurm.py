"""`srun python script.py` is a world: a real Slurm with two nodes on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm_lab import SlurmLab, missing, slurm_lab

_WHY_NOT = missing()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=f"Slurm lab: {_WHY_NOT}")

# Every daemon and task is on this machine, so gloo stays on the loopback interface.
ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

SCRIPT = """
from phalanx.dist import all_reduce_sum, init_world

world = init_world(device="cpu")
total = all_reduce_sum(world.rank + 1)
words = [world.source, f"{world.rank}/{world.world_size}", f"{world.local_rank}/{world.local_world_size}",
         f"node {world.node_rank}", f"sum {total}"]
print(" ".join(words) + "\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    with slurm_lab() as running:
        yield running


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_two_tasks_on_one_node_are_a_world(lab: SlurmLab, script: Path) -> None:
    done = lab.srun("-N1", "-n2", sys.executable, script, environ=ENVIRON, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"slurm {rank}/2 {rank}/2 node 0 sum 3" for rank in range(2)]


def test_tasks_on_two_nodes_meet_at_the_first_node(lab: SlurmLab, script: Path) -> None:
    done = lab.srun("-N2", "-n2", sys.executable, script, environ=ENVIRON, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"slurm {rank}/2 0/1 node {rank} sum 3" for rank in range(2)]


def test_the_step_has_its_own_size_within_a_larger_job(lab: SlurmLab, tmp_path: Path, script: Path) -> None:
    """A job of 4 tasks in which a step of 2 runs: the batch script is no rank, and the world has 2."""
    batch = tmp_path / "batch.sh"
    command = shlex.join([sys.executable, str(script)])
    batch.write_text(f"srun -n 2 {command}\n{command}\n")
    done = lab.srun("-N1", "-n1", "-c4", "sh", "-c", "env | grep -c SLURM_STEP_ID", cwd=tmp_path)
    assert done.stdout.strip() == "1"
    done = lab.salloc("-N1", "-n4", "sh", batch, environ=ENVIRON, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    step = [f"slurm {rank}/2 {rank}/2 node 0 sum 3" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == ["single 0/1 0/1 node 0 sum 1", *step]


def test_a_rank_that_fails_ends_the_step(lab: SlurmLab, tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(SCRIPT + "if world.rank == 1:\n    raise SystemExit(7)\nimport time\ntime.sleep(300)\n")
    done = lab.srun("-N1", "-n2", sys.executable, path, environ=ENVIRON, cwd=tmp_path)
    assert done.returncode != 0


def test_the_recipe_runs_under_srun(lab: SlurmLab, tmp_path: Path) -> None:
    done = lab.srun(
        *("-N1", "-n2", sys.executable, "-m", "phalanx.recipes.mnist"),
        *("--data", "fake", "--epochs", "1", "--output-dir", tmp_path / "out"),
        environ=ENVIRON,
        cwd=tmp_path,
        timeout_s=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "metrics.jsonl").exists()

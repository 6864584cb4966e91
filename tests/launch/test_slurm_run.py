"""`srun phalanx run` and a bare `phalanx run` in an allocation: a real Slurm on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.launch.slurm_state import ending, node_state
from tests.launch.launching import wait_until
from tests.launch.slurm_lab import SlurmLab, missing, slurm_lab

_WHY_NOT = missing()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=f"Slurm lab: {_WHY_NOT}")

ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
RUN = [sys.executable, "-m", "phalanx", "run"]
TIMEOUT_S = 240.0

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")
print("sum", int(total), *(os.environ[name] for name in names), *sys.argv[1:], flush=True)
dist.barrier()
if "fail" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("bad thing")
dist.barrier()
if "saved" in sys.argv:
    sys.exit(75)
"""

WAIT = """
import os, sys, time
from pathlib import Path
Path(f"waiting-{os.environ['RANK']}").write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    with slurm_lab(nodes=4) as running:
        yield running


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train it.py"
    path.write_text(SCRIPT)
    return path


def _sums(text: str) -> list[str]:
    return sorted(line[line.index("sum ") :] for line in text.splitlines() if "sum " in line)


@pytest.mark.parametrize("nodes", [2, 4])
def test_one_task_per_node_is_that_nodes_agent(lab: SlurmLab, script: Path, nodes: int) -> None:
    words = [f"-N{nodes}", f"-n{nodes}", *RUN, "--nproc-per-node", "2", script, "--x", "a b"]
    done = lab.srun(*words, environ=ENVIRON, cwd=script.parent, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    world = nodes * 2
    assert _sums(done.stdout) == [f"sum {world} {r} {r % 2} 2 {r // 2} {world} --x a b" for r in range(world)]
    (folder,) = (script.parent / "phalanx-logs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [f"node-{node}" for node in range(nodes)]


def test_several_tasks_per_node_are_ranks(lab: SlurmLab, script: Path) -> None:
    """Three ranks on two nodes; no agent, and no log folder."""
    done = lab.srun(
        *("-N2", "-n3", "--distribution=block", *RUN, script, "--y"), environ=ENVIRON, cwd=script.parent
    )
    assert done.returncode == 0, done.stderr
    assert _sums(done.stdout) == ["sum 3 0 0 2 0 3 --y", "sum 3 1 1 2 0 3 --y", "sum 3 2 0 1 1 3 --y"]
    assert not (script.parent / "phalanx-logs").exists()


def test_ranks_that_are_tasks_start_no_ranks(lab: SlurmLab, script: Path) -> None:
    done = lab.srun("-N1", "-n2", *RUN, "--nproc-per-node", "2", script, environ=ENVIRON, cwd=script.parent)
    assert done.returncode == 2
    assert "--nproc-per-node 2, but srun started 2 tasks" in done.stderr
    assert "Fix: leave --nproc-per-node out" in done.stderr


def test_nnodes_that_the_step_has_not(lab: SlurmLab, script: Path) -> None:
    words = ["--kill-on-bad-exit=0", "-N2", "-n2", *RUN, "--nnodes", "3", script]
    done = lab.srun(*words, environ=ENVIRON, cwd=script.parent)
    assert done.returncode == 2
    assert "--nnodes 3, but this Slurm step has 2 nodes" in done.stderr


def test_two_steps_at_once_meet_apart(lab: SlurmLab, script: Path) -> None:
    one = f"srun --overlap -N2 -n2 {' '.join(RUN)} 'train it.py' & "
    done = lab.salloc(
        "-N2",
        "-n2",
        "sh",
        "-c",
        one + one + "wait",
        environ=ENVIRON,
        cwd=script.parent,
        timeout_s=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert _sums(done.stdout) == sorted(["sum 2 0 0 1 0 2", "sum 2 1 0 1 1 2"] * 2)


def test_saved_is_kept_through_srun(lab: SlurmLab, script: Path) -> None:
    done = lab.srun(
        "--kill-on-bad-exit=0", "-N2", "-n2", *RUN, script, "saved", environ=ENVIRON, cwd=script.parent
    )
    assert done.returncode == 75, done.stdout + done.stderr


def test_a_bare_run_starts_itself_on_all_nodes(lab: SlurmLab, script: Path) -> None:
    nodes = 4
    words = [f"-N{nodes}", *RUN, "--log-dir", "logs", script, "--x", "a b"]
    done = lab.salloc(*words, environ=ENVIRON, cwd=script.parent, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert _sums(done.stdout) == [f"sum {nodes} {r} 0 1 {r} {nodes} --x a b" for r in range(nodes)]
    assert f"{nodes} ranks on {nodes} nodes (1 on each)" in done.stderr
    run = json.loads((script.parent / "logs" / "run.json").read_text())
    assert run["exit_code"] == 0


def test_tasks_per_node_of_the_job_are_ranks_of_a_bare_run(lab: SlurmLab, script: Path) -> None:
    words = ["-N2", "--ntasks-per-node=2", *RUN, script]
    done = lab.salloc(*words, environ=ENVIRON, cwd=script.parent, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert _sums(done.stdout) == [f"sum 4 {r} {r % 2} 2 {r // 2} 4" for r in range(4)]


def test_one_node_of_a_job_is_one_node(lab: SlurmLab, script: Path) -> None:
    done = lab.salloc("-N1", *RUN, "--nproc-per-node", "2", script, environ=ENVIRON, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert _sums(done.stdout) == ["sum 2 0 0 2 0 2", "sum 2 1 1 2 0 2"]


def test_a_failure_on_the_second_node_is_named(lab: SlurmLab, script: Path) -> None:
    done = lab.salloc("-N2", *RUN, script, "fail", environ=ENVIRON, cwd=script.parent, timeout_s=TIMEOUT_S)
    assert done.returncode == 1
    assert "First failure: rank 1 (local rank 0, node 1" in done.stderr
    assert "ValueError: bad thing" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_a_bare_run(lab: SlurmLab, tmp_path: Path, signum: signal.Signals) -> None:
    (tmp_path / "wait.py").write_text(WAIT)
    (tmp_path / "job.sh").write_text(f"echo $$ > pid\nexec {' '.join(RUN)} --grace-s 1 wait.py\n")
    process = subprocess.Popen(
        ["salloc", "--quiet", "--immediate=20", "-N2", "sh", "job.sh"],
        cwd=tmp_path,
        env=lab.environ | ENVIRON,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    pids = [tmp_path / f"waiting-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids), "both ranks", timeout_s=120)
    os.kill(int((tmp_path / "pid").read_text()), signum)
    process.communicate(timeout=60)
    # The ranks are forks of their agents, and have their names.
    wait_until(lambda: "phalanx" not in lab.inside("ps", "-eo", "args"), "no rank is left", timeout_s=60)
    lab.wait_for_steps()


def test_slurms_word_on_a_job_that_was_cancelled(lab: SlurmLab, tmp_path: Path) -> None:
    job = lab.sbatch("-N1", "--output=/dev/null", "--wrap", "sleep 300", cwd=tmp_path)
    inside = lab.environ | {"SLURM_JOB_ID": job}
    wait_until(lambda: lab.job(job)["JobState"] == "RUNNING", "the job runs")
    assert ending(inside) == ""
    lab.scancel(job)
    lab.wait_for_job(job)
    assert ending(inside) == f"Slurm: job {job} is CANCELLED: it was cancelled (scancel)"


def test_a_node_whose_slurmd_dies_is_named(lab: SlurmLab, tmp_path: Path) -> None:
    """With its slurmstepd, as when the machine goes down; last in this file, the node stays away."""
    (tmp_path / "wait.py").write_text(WAIT)
    process = subprocess.Popen(
        ["salloc", "--quiet", "--no-kill", "--immediate=20", "-N2", "-wn3,n4", *RUN, "wait.py"],
        cwd=tmp_path,
        env=lab.environ | ENVIRON,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [tmp_path / f"waiting-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids), "both ranks", timeout_s=120)
    lab.end_node("n4", pids[1].read_text())
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "First failure: rank 1 (local rank 0, node 1" in err, err
    assert "its node n1 (n4) was lost" in err
    lab.inside("scontrol", "update", "nodename=n4", "state=down", "reason=test")
    inside = lab.environ | {"SLURM_JOB_ID": "1"}
    assert node_state("n4", inside).startswith("Slurm: node n4 is DOWN")
    assert node_state("n1", inside) == node_state("n4", lab.environ) == ""
    wait_until(lambda: "phalanx" not in lab.inside("ps", "-eo", "args"), "no rank is left", timeout_s=60)

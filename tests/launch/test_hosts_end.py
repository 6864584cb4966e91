"""How a job on several hosts ends: signals, deaths, cuts; nothing of it is left on any host, and others' stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, lab, missing
from tests.launch.host_jobs import ALL_REDUCE, WAIT, Job
from tests.launch.launching import marked_processes, wait_until

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Lab]:
    with lab(("n1", "n2", "n3")) as running:
        yield running


@pytest.fixture
def job(hosts: Lab, tmp_path: Path) -> Iterator[Job]:
    tmp_path.chmod(0o755)
    made = Job(hosts, tmp_path)
    yield made
    for pid in marked_processes(made.mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    hosts.settle()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_on_every_host(job: Job, signum: int) -> None:
    process = job.start("--hosts", "n1,n2", "train.py", script=WAIT)
    wait_until(lambda: job.waiting(2), "ranks", timeout_s=180)
    os.kill(job.driver(), signum)
    _, err = process.communicate(timeout=120)
    assert process.returncode == (130 if signum == signal.SIGINT else 143), err
    assert job.gone()


def test_a_dead_launching_machine_ends_this_job_and_no_other(job: Job, hosts: Lab, tmp_path: Path) -> None:
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = Job(hosts, other_folder)
    process = job.start("--hosts", "n1,n2", "--grace-s", 1, "train.py", script=WAIT)
    beside = other.start("--hosts", "n2", "train.py", script=WAIT)
    try:
        wait_until(lambda: job.waiting(2) and other.waiting(1), "ranks", timeout_s=180)
        os.kill(job.driver(), signal.SIGKILL)
        process.communicate(timeout=60)
        wait_until(job.gone, "end of every process of the job", timeout_s=60)
        assert beside.poll() is None
    finally:
        os.kill(other.driver(), signal.SIGINT)
        beside.communicate(timeout=120)
    assert other.gone()


def test_a_killed_ssh_is_a_lost_node(job: Job) -> None:
    process = job.start("--hosts", "n1,n2", "--grace-s", 1, "train.py", script=WAIT)
    wait_until(lambda: job.waiting(2), "ranks", timeout_s=180)
    mine = [
        p
        for p, words in marked_processes(job.mark).items()
        if words.startswith(("ssh", "/usr/bin/ssh")) and "-- n2 " in words
    ]
    os.kill(mine[0], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "n1 (n2) was lost" in err
    wait_until(job.gone, "end of every process", timeout_s=60)


def test_a_cut_network_ends_both_sides_within_the_stated_time(job: Job) -> None:
    process = job.start(
        "--hosts", "n1,n2", "--grace-s", 1, "train.py", script=WAIT, PHALANX_LINK_TIMEOUT_S="4"
    )
    wait_until(lambda: job.waiting(2), "ranks", timeout_s=180)
    n1, n2 = job.hosts["n1"], job.hosts["n2"]
    n1.cut(n2)
    n2.cut(n1)
    try:
        _, err = process.communicate(timeout=120)
        wait_until(job.gone, "end of every process, on both sides of the cut", timeout_s=60)
    finally:
        n1.mend(n2)
        n2.mend(n1)
    assert process.returncode == 1, err
    assert "n1 (n2)" in err


def test_a_cut_that_ends_in_time_is_waited_for(job: Job) -> None:
    script = """
import os, time
from pathlib import Path
Path(f"waiting-{os.environ['RANK']}").touch()
while not Path("go-on").exists():
    time.sleep(0.02)
print("went on", flush=True)
"""
    process = job.start("--hosts", "n1,n2", "train.py", script=script, PHALANX_LINK_TIMEOUT_S="600")
    wait_until(lambda: job.waiting(2), "ranks", timeout_s=180)
    n1, n2 = job.hosts["n1"], job.hosts["n2"]
    n1.cut(n2)
    n2.cut(n1)
    (job.folder / "go-on").touch()
    log = job.logs / "node-1" / "rank-1.log"
    wait_until(lambda: log.exists() and "went on" in log.read_text(), "the line beyond the cut", timeout_s=60)
    n1.mend(n2)
    n2.mend(n1)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["[n0 rank 0] went on", "[n1 rank 1] went on"]
    assert job.gone()


def test_the_first_failure_is_named_with_its_host(job: Job) -> None:
    script = ALL_REDUCE + "if dist.get_rank() == 1: raise ValueError('no such colour')\ndist.barrier()\n"
    code, _out, err = job.run("--hosts", "n1,n2", "train.py", script=script)
    assert code == 1, err
    assert err.count("First failure: ") == 1
    assert "First failure: rank 1 (local rank 0, node 1): ValueError: no such colour" in err
    assert job.gone()

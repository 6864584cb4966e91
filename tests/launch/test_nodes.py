"""Jobs on two nodes whose agents were started by hand: one report, one exit code, nothing left anywhere."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lab as labs
from tests.lab import Lab
from tests.launch.node_jobs import NodeJob

pytestmark = pytest.mark.skipif(labs.missing() is not None, reason=f"no lab: {labs.missing()}")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with labs.lab(("n1", "n2")) as made:
        yield made


@pytest.fixture
def job(lab: Lab, tmp_path: Path) -> Iterator[NodeJob]:
    made = NodeJob(lab, tmp_path)
    yield made
    made.clean_up()


@pytest.mark.parametrize(
    ("what", "who", "said"),
    [("raise", 1, "ValueError: boom on purpose"), ("kill", 0, "SIGKILL: "), ("exit", 1, "exit code 7")],
)
def test_a_rank_that_fails_ends_the_job_on_all_nodes_with_one_report(
    job: NodeJob, what: str, who: int, said: str
) -> None:
    job.start_all(what, who)
    assert job.end() == {"n1": 1, "n2": 1}
    assert f"First failure: rank {who} (local rank 0, node {who}): {said}" in job.text("n1")
    assert "First failure" not in job.text("n2")
    assert f"first failure: rank {who} (local rank 0, node {who}): {said}" in job.text("n2")
    first = job.failure()["first"]
    assert (first["rank"], first["node"], first["host"]) == (who, who, f"n{who + 1}")
    if what == "raise":
        assert 'raise ValueError("boom on purpose")' in job.text("n1"), "the traceback of the other node"


def test_a_killed_rank_restarts_the_ranks_of_both_nodes(job: NodeJob) -> None:
    job.start_all("kill", 1, options=["--max-restarts", 1])
    assert job.end() == {"n1": 0, "n2": 0}
    for node, rank in (("n1", 0), ("n2", 1)):
        assert job.text(node).count(f"rank {rank} of 2 is here") == 2
        assert "attempt 1 of 2 failed: rank 1: SIGKILL" in job.text(node)


@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_an_agent_that_is_killed_is_named_by_the_other(job: NodeJob, lost: str) -> None:
    number = int(lost == "n2")
    left = "n1" if number else "n2"
    job.start_all("wait", 0, job.folder / "go")
    job.wait_for(left, "is here")
    job.wait_for(lost, "is here")
    job.kill_agent(lost)
    assert job.end()[left] == 1
    assert (
        f"First failure: rank {number} (local rank 0, node {number}): node {number} ({lost}) lost its agent"
        in job.text(left)
    )
    assert f"its rank {number} is lost with it" in job.text(left)


def test_a_signal_to_one_agent_ends_the_job_on_all_nodes(job: NodeJob) -> None:
    job.start_all("wait", 0, job.folder / "go")
    job.wait_for("n1", "is here")
    job.wait_for("n2", "is here")
    job.kill_agent("n2", signal.SIGTERM)
    assert job.end() == {"n1": 143, "n2": 143}
    assert "node 1 (n2) was ended by SIGTERM; ending here too" in job.text("n1")


def test_a_wrong_interface_is_the_failure_of_the_node_that_has_it(job: NodeJob) -> None:
    job.start_all("nothing", 0, of={"n2": {"environ": {"GLOO_SOCKET_IFNAME": "eth7"}}})
    assert job.end() == {"n1": 1, "n2": 1}
    first = job.failure()["first"]
    assert (first["rank"], first["host"]) == (1, "n2")
    assert "eth7" in first["message"]


def test_a_name_that_means_loopback_does_no_harm(job: NodeJob, lab: Lab) -> None:
    before = lab["n2"].hosts.read_text()
    lab["n2"].hosts.write_text(before.replace(f"{lab['n2'].address} n2", "127.0.1.1 n2"))
    try:
        assert lab["n2"].must("getent", "hosts", "n2").startswith("127.0.1.1")
        job.start_all("nothing", 0)
        assert job.end() == {"n1": 0, "n2": 0}
    finally:
        lab["n2"].hosts.write_text(before)


def test_clocks_that_are_apart_do_not_turn_the_order_of_failures(job: NodeJob) -> None:
    if shutil.which("faketime") is None:
        pytest.skip("needs faketime (Debian: faketime)")
    # By its own clock the node that fails second was an hour earlier.
    job.start_all("raise", 0, of={"n2": {"before": ["faketime", "-f", "-1h"]}})
    assert job.end() == {"n1": 1, "n2": 1}
    found = job.failure()
    assert found["first"]["rank"] == 0
    assert all(abs(other["time"] - found["first"]["time"]) < 600 for other in found["others"])


def test_another_torch_on_a_node_is_named_before_ranks_start(job: NodeJob) -> None:
    older = job.folder / "older"
    (older / "torch-2.0.9.dist-info").mkdir(parents=True)
    (older / "torch-2.0.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.0.9\n"
    )
    job.start_all("nothing", 0, of={"n2": {"environ": {"PYTHONPATH": str(older)}}})
    assert job.end() == {"n1": 3, "n2": 3}
    for node in ("n1", "n2"):
        assert "different versions of torch: node 0 (n1) has " in job.text(node)
        assert "node 1 (n2) has 2.0.9" in job.text(node)
        assert "is here" not in job.text(node)


def test_a_full_disk_is_named_with_its_rank_and_node(job: NodeJob, lab: Lab) -> None:
    small = job.folder / "small"
    small.mkdir()
    lab["n2"].must("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small)
    try:
        job.start_all("fill", 1, small)
        assert job.end() == {"n1": 1, "n2": 1}
    finally:
        lab["n2"].must("umount", small)
    first = job.failure()["first"]
    assert (first["rank"], first["host"], first["exception"]) == (1, "n2", "OSError")
    assert "No space left on device" in first["message"]


def test_the_diagnosis_of_a_failure_elsewhere_is_in_failure_json(job: NodeJob) -> None:
    job.start_all("kill", 1)
    assert job.end() == {"n1": 1, "n2": 1}
    assert "killed-from-outside" in json.dumps(job.failure()["diagnoses"])

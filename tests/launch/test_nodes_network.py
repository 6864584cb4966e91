"""Jobs on two nodes whose network, or a node itself, fails: each goes on, or ends with the node named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lab as labs
from tests.lab import Lab
from tests.launch.node_jobs import NodeJob

pytestmark = pytest.mark.skipif(labs.missing() is not None, reason=f"no lab: {labs.missing()}")
#: Seconds of silence after which a node is given up; 60 without it.
SHORT = {"environ": {"PHALANX_LINK_TIMEOUT_S": "12"}}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with labs.lab(("n1", "n2")) as made:
        yield made


@pytest.fixture
def job(lab: Lab, tmp_path: Path) -> Iterator[NodeJob]:
    made = NodeJob(lab, tmp_path)
    yield made
    made.clean_up()


def test_a_job_goes_on_after_its_link_was_cut_for_a_while(job: NodeJob, lab: Lab) -> None:
    job.start_all("wait", 0, job.folder / "go")
    job.wait_for("n1", "is here")
    lab["n1"].cut(lab["n2"])
    try:
        job.wait_for("n1", "node 1 (n2) has not answered for 10 s")
        job.wait_for("n2", "node 0 (n1) has not answered for 10 s")
    finally:
        lab["n1"].mend(lab["n2"])
    (job.folder / "go").touch()
    assert job.end() == {"n1": 0, "n2": 0}


def test_a_link_that_stays_cut_ends_both_nodes_each_naming_the_other(job: NodeJob, lab: Lab) -> None:
    job.start_all("wait", 0, job.folder / "go", of={"n1": SHORT, "n2": SHORT})
    job.wait_for("n2", "is here")
    lab["n1"].cut(lab["n2"])
    try:
        assert job.end() == {"n1": 1, "n2": 1}
    finally:
        lab["n1"].mend(lab["n2"])
    assert "First failure: rank 1 (local rank 0, node 1): node 1 (n2) has not answered for 12 s" in job.text(
        "n1"
    )
    assert "First failure: rank 0 (local rank 0, node 0): node 0 (n1) has not answered for 12 s" in job.text(
        "n2"
    )


def test_a_closed_port_is_named_with_both_nodes(job: NodeJob, lab: Lab) -> None:
    rules = "add table inet closed; add chain inet closed in { type filter hook input priority 0; }; "
    rules += "add rule inet closed in ip saddr 10.77.0.2 tcp dport != 29500 tcp flags syn drop"
    refused = lab["n1"].run("nft", rules)
    if refused.returncode:
        pytest.skip(f"needs nftables: {refused.stderr.strip()}")
    try:
        job.start_all("nothing", 0)
        assert job.end() == {"n1": 3, "n2": 3}
    finally:
        lab["n1"].must("nft", "delete table inet closed")
    assert "node 1 (n2) cannot reach 10.77.0.1 port " in job.text("n2")
    assert "node 1 came to the rendezvous, but did not reach node 0 (n1)" in job.text("n1")
    assert "is here" not in job.text("n1") + job.text("n2")


def test_lost_packets_cost_nothing_but_time(job: NodeJob, lab: Lab) -> None:
    rules = "add table inet lossy; add chain inet lossy in { type filter hook input priority 0; }; "
    rules += 'add rule inet lossy in iifname "eth0" numgen random mod 100 < 5 drop'
    refused = lab["n1"].run("nft", rules)
    if refused.returncode:
        pytest.skip(f"needs nftables with numgen: {refused.stderr.strip()}")
    try:
        job.start_all("kill", 1, options=["--max-restarts", 1])
        assert job.end() == {"n1": 0, "n2": 0}
    finally:
        lab["n1"].must("nft", "delete table inet lossy")
    assert "attempt 1 of 2 failed: rank 1: SIGKILL" in job.text("n1")


def test_a_slow_line_costs_nothing_but_time(job: NodeJob, lab: Lab) -> None:
    netem = ("tc", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "100ms", "loss", "5%")
    refused = [lab[name].run(*netem) for name in ("n1", "n2")]
    if any(one.returncode for one in refused):
        pytest.skip(f"needs netem in the kernel: {refused[0].stderr.strip()}")
    try:
        job.start_all("raise", 1)
        assert job.end() == {"n1": 1, "n2": 1}
    finally:
        for name in ("n1", "n2"):
            lab[name].must("tc", "qdisc", "del", "dev", "eth0", "root")
    assert "First failure: rank 1 (local rank 0, node 1): ValueError: boom" in job.text("n1")


def test_a_node_that_comes_late_is_waited_for(job: NodeJob, lab: Lab) -> None:
    meet = ["--nnodes", 2, "--master-addr", lab["n1"].address]
    job.start(lab["n1"], "nothing", 0, options=[*meet, "--node-rank", 0])
    job.wait_for("n1", "1 rank on this node")
    job.start(lab["n2"], "nothing", 0, options=[*meet, "--node-rank", 1])
    assert job.end() == {"n1": 0, "n2": 0}


def test_a_checkpoint_folder_that_is_not_shared_is_named(job: NodeJob, lab: Lab) -> None:
    folder = job.folder / "checkpoints"
    folder.mkdir()
    job.script.write_text(
        "import sys, torch\n"
        "from phalanx.dist import CheckpointManager, init_world, parallelize\n"
        "init_world()\n"
        "model, optimizer, _ = parallelize(torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=1.0))\n"
        "CheckpointManager(sys.argv[3], model=model, optimizer=optimizer).restore()\n"
    )
    lab["n2"].must("mount", "-t", "tmpfs", "tmpfs", folder)
    try:
        job.start_all("nothing", 0, folder)
        assert job.end() == {"n1": 1, "n2": 1}
    finally:
        lab["n2"].must("umount", folder)
    assert "choose a folder on storage that all nodes share" in job.text("n1")


def test_a_node_that_dies_is_named_by_the_other(tmp_path: Path) -> None:
    with labs.lab(("n1", "n2")) as lab:
        job = NodeJob(lab, tmp_path)
        try:
            job.start_all("wait", 0, job.folder / "go", of={"n1": SHORT})
            job.wait_for("n1", "is here")
            lab.kill("n2")
            assert job.end()["n1"] == 1
        finally:
            job.clean_up()
    assert "First failure: rank 1 (local rank 0, node 1): node 1 (n2) " in job.text("n1")

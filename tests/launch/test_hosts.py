"""`--hosts` and `--hostfile`: nodes that are network namespaces, each with a real sshd."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, lab, missing
from tests.launch.host_jobs import ALL_REDUCE, WAIT, Job
from tests.launch.launching import marked_processes, wait_until

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

#: An ssh without the lab's key, that leaves nothing behind.
_STRANGER = "ssh -F /dev/null -oUserKnownHostsFile=/dev/null -oIdentityFile=/dev/null -oIdentityAgent=none"


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


def test_two_hosts_have_one_world_and_the_environment_as_it_is(job: Job) -> None:
    odd = "a'b\"c $HOME `x` \\ ü\n2nd"
    code, out, err = job.run("--hosts", "n1,n2", "train.py", "--lr", "a b", ODD=odd, SLURM_JOB_NAME="")
    assert code == 0, err
    place = f"{job.folder} {odd!r} ['--lr', 'a b']"
    assert sorted(out.splitlines()) == [
        f"[n0 rank 0] sum 2 0 n1 {place}",
        f"[n1 rank 1] sum 2 1 n2 {place}",
    ]
    assert "node 0 at 10.77.0.1:" in err
    assert job.gone()


def test_a_hostfile_has_slots_users_ports_and_comments(job: Job) -> None:
    (job.folder / "hosts.txt").write_text("# two\nroot@10.77.0.2 slots=2 port=22  # fast\n\nn3 slots=1\n")
    code, out, err = job.run("--hostfile", "hosts.txt", "train.py")
    assert code == 0, err
    assert sorted(line.split(" sum ")[0] for line in out.splitlines()) == [
        "[n0 rank 0]",
        "[n0 rank 1]",
        "[n1 rank 2]",
    ]
    assert "3 ranks on 2 nodes (2, 1 in their order)" in err


def test_hosts_may_be_ipv6_addresses(job: Job) -> None:
    places = {name: f"fd77::{number}/64" for number, name in enumerate(("n1", "n2"), start=1)}
    for node, place in places.items():
        job.hosts[node].must("ip", "-6", "address", "add", place, "dev", "eth0", "nodad")
    try:
        code, out, err = job.run("--hosts", "[fd77::1],root@[fd77::2]", "train.py")
    finally:
        for node, place in places.items():
            job.hosts[node].must("ip", "-6", "address", "del", place, "dev", "eth0")
    assert code == 0, err
    assert out.count("sum 2") == 2
    assert "node 0 at [fd77::1]:" in err


def test_a_name_that_means_loopback_to_its_own_host_is_no_harm(job: Job) -> None:
    before = {}
    try:
        for name in ("n1", "n2"):
            path = job.hosts[name].hosts
            before[path] = path.read_text()
            path.write_text(f"127.0.1.1 {name}\n{before[path]}")
        code, out, err = job.run("--hosts", "n1,n2", "train.py")
    finally:
        for path, text in before.items():
            path.write_text(text)
    assert code == 0, err
    assert out.count("sum 2") == 2


def test_what_a_login_shell_prints_does_no_harm(job: Job) -> None:
    noisy = job.folder / "noisy"
    noisy.write_text('#!/bin/sh\necho "Welcome to $1"\nexec ssh "$@"\n')
    noisy.chmod(0o755)
    code, out, err = job.run("--hosts", "n1,n2", "--ssh", noisy, "train.py")
    assert code == 0, err
    assert "Welcome" not in out


def test_no_variable_stands_in_a_command_line(job: Job) -> None:
    process = job.start("--hosts", "n1,n2", "train.py", script=WAIT, TOKEN="hush-4711")
    wait_until(lambda: job.waiting(2), "ranks", timeout_s=180)
    words = "\n".join(
        (entry / "cmdline").read_bytes().decode(errors="replace")
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (entry / "cmdline").exists()
    )
    os.kill(job.driver(), signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert "phalanx.launch.node" in words
    assert "hush-4711" not in words
    assert job.gone()


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--hosts", "n2,nowhere"], ["1 of 2 nodes is", "nowhere: ssh does not know this name", "Fix: check its spelling"]),
        (["--hosts", "n2,n3", "--ssh-port", "77"], ["2 of 2 nodes", "n2: nothing listens", "n3: nothing listens"]),
        (["--hosts", "n2,n2"], ["n2"]),
        (["--hosts", "n2", "--ssh-port", "x"], ["--ssh-port x: not a whole number"]),
        (["--hosts", "n2", "--ssh", "/no/ssh"], ["--ssh /no/ssh: there is no such program"]),
        (["--hosts", "n2", "--ssh", f"{_STRANGER} -oStrictHostKeyChecking=no"], ["ssh was not let in", "ssh-copy-id"]),
        (["--hosts", "n2", "--ssh", f"{_STRANGER} -oStrictHostKeyChecking=yes"], ["does not trust the host's key"]),
        (["--hostfile", "no.txt"], ["--hostfile no.txt: it cannot be read"]),
        (["--hosts", "n2,n3", "--gpus", "97"], ["n2: --gpus 97", "n3: --gpus 97"]),
        (["--hosts", "n2,n3", "--nnodes", "3"], ["--nnodes 3 with --hosts n2,n3"]),
    ],
)  # fmt: skip
def test_a_host_that_is_not_fit_is_named_and_nothing_starts(
    job: Job, words: list[str], messages: list[str]
) -> None:
    code, out, err = job.run(*words, "train.py", script="print('ran')")
    assert code in (2, 3), err
    for message in messages:
        assert message in err
    assert "Fix:" in err
    assert "Traceback" not in err
    assert "ran" not in out
    assert not job.logs.exists()
    assert job.gone()


def test_another_torch_another_script_and_a_missing_folder_are_found_before_the_start(job: Job) -> None:
    faked = job.folder / "faked"
    faked.mkdir()
    (faked / "sitecustomize.py").write_text(
        "import importlib.metadata as m, os\nreal = m.version\n"
        "if os.uname().nodename == 'n3':\n"
        "    m.version = lambda name: '1.2.3' if name == 'torch' else real(name)\n"
    )
    code, _out, err = job.run("--hosts", "n1,n2,n3", "train.py", PYTHONPATH=str(faked))
    assert code == 3, err
    assert "1 of 3 nodes" in err
    assert "n3: torch 1.2.3 there, " in err
    job.hosts["n2"].must("mount", "-t", "tmpfs", "none", job.folder)
    try:
        code, _out, err = job.run("--hosts", "n1,n2", "train.py")
        assert code in (2, 3), err
        assert f"n2: {job.folder}/train.py is not there" in err
        job.hosts["n2"].must("sh", "-c", f"echo other > {job.folder}/train.py")
        code, _out, err = job.run("--hosts", "n1,n2", "train.py")
        assert "train.py has another content there" in err
        (job.hosts.folder / "train.py").write_text(ALL_REDUCE)
        job.hosts["n2"].must("cp", job.hosts.folder / "train.py", f"{job.folder}/train.py")
        code, _out, err = job.run("--hosts", "n1,n2", "train.py")
        assert "is another folder there than here" in err
    finally:
        job.hosts["n2"].must("umount", job.folder)
    job.hosts["n2"].must("mount", "-t", "tmpfs", "none", job.folder.parent)
    try:
        code, _out, err = job.run("--hosts", "n1,n2", "train.py")
    finally:
        job.hosts["n2"].must("umount", job.folder.parent)
    assert code == 3, err
    assert f"n2: the working folder {job.folder} cannot be used there (No such file or directory)" in err
    assert job.gone()


def test_clocks_apart_are_told_and_do_no_harm(job: Job) -> None:
    faked = job.folder / "faked"
    faked.mkdir()
    (faked / "sitecustomize.py").write_text(
        "import os, sys, time\nreal = time.time\n"
        "if os.uname().nodename == 'n2':\n    time.time = lambda: real() - 3600\n"
    )
    script = ALL_REDUCE + "if dist.get_rank() == 0: raise ValueError('no such colour')\ndist.barrier()\n"
    code, _out, err = job.run("--hosts", "n1,n2", "train.py", script=script, PYTHONPATH=str(faked))
    assert code == 1, err
    assert "clocks differ from this machine's: n2 by -3" in err
    assert "First failure: rank 0" in err


@pytest.mark.skipif(
    shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin") is None, reason="needs nft (Debian: nftables)"
)
def test_a_closed_port_of_node_0_is_found_before_the_start(job: Job) -> None:
    n1 = job.hosts["n1"]
    n1.must("nft", "add", "table", "inet", "lab")
    try:
        n1.must("nft", "add", "chain", "inet", "lab", "in", "{ type filter hook input priority 0; }")
        n1.must(
            "nft", "add", "rule", "inet", "lab", "in", "iifname", "eth0", "tcp", "dport", "23456", "reject"
        )
        code, _out, err = job.run("--hosts", "n1,n2", "--master-port", 23456, "train.py")
        assert code == 3, err
        assert (
            "n2: it does not reach n1, where the nodes meet (port 23456: 10.77.0.1: Connection refused)"
            in err
        )
    finally:
        n1.must("nft", "delete", "table", "inet", "lab")
    assert job.gone()

"""What the driver makes of what it heard of its hosts, with made-up hosts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from phalanx.dist.environments.hostfile import Host
from phalanx.launch.driver_node import DriverNode
from phalanx.launch.host_problems import common_address, message_of, problems_of, warnings_of
from phalanx.launch.node_link import Link
from phalanx.launch.preflight import versions


def node(number: int, **values: Any) -> DriverNode:
    link = Link.__new__(Link)
    link.noise = b""
    process: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)
    return DriverNode(number, Host(name=f"host{number}", user="me", port=2222), process, link, **values)


def facts(**values: Any) -> dict[str, Any]:
    fit = {
        "hostname": "x",
        "python": sys.executable,
        "versions": versions(),
        "folder_problem": None,
        "files": {},
        "sees_token": True,
        "sees_logs": True,
        "addresses": ["10.0.0.1"],
        "port": 1234,
    }
    return fit | values


@pytest.mark.parametrize(
    ("said", "cause", "fix"),
    [
        ("ssh: Could not resolve hostname host0: Name or service not known", "does not know this name", "spelling"),
        ("me@host0: Permission denied (publickey).", "was not let in", "ssh-copy-id -p 2222 me@host0"),
        ("Host key verification failed.", "does not trust the host's key", "ssh -p 2222 me@host0 once"),
        ("ssh: connect to host host0 port 22: Connection refused", "nothing listens", "--ssh-port"),
        ("ssh: connect to host host0 port 22: Connection timed out", "does not answer", "firewall"),
        ("ssh: connect to host host0 port 22: No route to host", "no way to the host", "network"),
        (f"{sys.executable}: No module named phalanx", "phalanx is not installed", "pip install phalanx"),
        (f"env: '{sys.executable}': No such file or directory", "this Python is not there", sys.executable),
        ("a word that nobody knows", "a word that nobody knows", "ssh -p 2222 me@host0 true"),
    ],
)  # fmt: skip
def test_what_ssh_says_has_a_cause_and_a_fix(said: str, cause: str, fix: str) -> None:
    silent = node(0, lost="the link to it was cut (ssh ended: exit code 255)", stderr=f"{said}\n".encode())
    (problem,) = problems_of([silent, node(1, facts=facts())], {}, same_machine=True)
    assert cause in problem.what
    assert said.rstrip(".") in problem.what
    assert fix in problem.fix
    text, code = message_of([problem], [silent, silent])
    assert text.startswith("1 of 2 nodes is not ready; nothing was started.\nhost0: ")
    assert code == 3


def test_every_host_has_its_own_line() -> None:
    other_torch = facts(versions={**versions(), "torch": "1.2.3"})
    nodes = [
        node(0, facts=facts(files={"/a.py": "one"})),
        node(1, facts=other_torch | {"files": {"/a.py": "two"}}),
        node(2, facts=facts(folder_problem="No such file or directory")),
        node(3, facts=facts(files={"/a.py": None}), refused={"message": "no GPU.\nFix: buy one", "exit_code": 2}),
    ]  # fmt: skip
    found = problems_of(nodes, {"/a.py": "one"}, same_machine=False)
    assert [(p.host, p.what.partition(" there")[0]) for p in found] == [
        ("host1", "torch 1.2.3"),
        ("host1", "/a.py has another content"),
        ("host2", found[2].what.partition(" there")[0]),
        ("host3", "/a.py is not"),
        ("host3", "no GPU."),
    ]
    assert "No such file or directory" in found[2].what
    assert found[4].fix == "buy one"


def test_the_first_address_that_all_reach_is_taken() -> None:
    nodes = [
        node(0, facts=facts(), answers={"10.0.0.1": "", "10.9.9.9": ""}),
        node(1, facts=facts(), answers={"10.0.0.1": "No route to host", "10.9.9.9": ""}),
    ]
    assert common_address(nodes) == "10.9.9.9"
    assert problems_of(nodes, {}, same_machine=False) == []


def test_a_host_that_does_not_reach_node_0_is_named() -> None:
    nodes = [
        node(0, facts=facts(), answers={"10.0.0.1": ""}),
        node(1, facts=facts(), answers={"10.0.0.1": "timed out"}),
    ]
    (problem,) = problems_of(nodes, {}, same_machine=False)
    assert problem.host == "host1"
    assert "does not reach host0, where the nodes meet (port 1234: 10.0.0.1: timed out)" in problem.what


def test_folders_apart_and_clocks_apart_are_warnings() -> None:
    nodes = [
        node(0, facts=facts()),
        node(1, facts=facts(sees_token=False, sees_logs=False)),
        node(2, facts=facts(sees_logs=False), clock_offset_s=-7.25),
    ]
    apart, logs, clocks = warnings_of(nodes, same_machine=False)
    assert "host1: " in apart
    assert "not a shared one" in apart
    assert logs.startswith("host2: the log folder")
    assert "host2 by -7.2 s" in clocks
    assert warnings_of(nodes, same_machine=True) == []

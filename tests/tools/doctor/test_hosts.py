"""Several hosts: real ones by ssh between network namespaces, and what their answers mean."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from phalanx.tools.doctor.facts import DriverFacts, Facts, GpuFacts, TorchFacts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.host_findings import HostsReport, judge
from phalanx.tools.doctor.host_peer import MARK
from phalanx.tools.doctor.hosts import PEER, HostView, examine
from tests.conftest import ROOT
from tests.lab import Lab, lab, missing
from tests.tools.doctor.live import quick_torch

_WHY_NOT = missing()
needs_lab = pytest.mark.skipif(_WHY_NOT is not None, reason=f"lab of network namespaces: {_WHY_NOT}")
PATIENCE_S = 60.0


def view(name: str, **more: Any) -> HostView:
    facts = Facts(torch=TorchFacts(installed=True, version="2.6.0+cu126", cuda="12.6"))
    values = {
        "name": name,
        "version": "1",
        "machine": name,
        "facts": facts,
        "listening": True,
        "clock_s": (0.0, 0.001),
    }
    return HostView(**{**values, **more})


def ids(findings: Sequence[Finding]) -> list[str]:
    return [finding.id for finding in findings if finding.status in ("fail", "warn")]


def own(findings: Sequence[Finding]) -> list[Finding]:
    """Findings about the hosts together: those of each host are the checks' matter."""
    mine = ("host-", "hosts-", "rendezvous-", "clock-", "hostname-resolves")
    return [finding for finding in findings if finding.id.startswith(mine)]


def test_hosts_that_are_alike() -> None:
    (finding,) = own(judge([view("a"), view("b")], port=29500))
    assert (finding.id, finding.status) == ("hosts-alike", "ok")


def test_a_host_without_an_answer() -> None:
    finding = judge([view("a"), view("b", problem="Permission denied (publickey).", facts=None)], port=1)[0]
    assert (finding.id, finding.status) == ("host-does-not-answer", "fail")
    assert finding.evidence == ("b: Permission denied (publickey).",)


def test_a_host_without_phalanx() -> None:
    problem = "/usr/bin/python: No module named phalanx"
    finding = judge([view("b", problem=problem, facts=None)], port=1)[0]
    assert "install phalanx" in finding.fix[0]


def test_versions_that_break_a_job() -> None:
    other = Facts(torch=TorchFacts(installed=True, version="2.5.1+cu124", cuda="12.4"))
    finding = own(judge([view("a"), view("b"), view("c", facts=other)], port=1))[0]
    assert (finding.id, finding.status) == ("hosts-differ", "fail")
    assert finding.evidence[0] == "torch: 2.6.0+cu126 on a, b; 2.5.1+cu124 on c"


def test_gpus_that_differ_are_a_warning() -> None:
    base = view("a").facts
    assert base is not None
    h100 = dataclasses.replace(base, gpus=(GpuFacts(index=0, name="H100"), GpuFacts(index=1, name="H100")))
    a100 = dataclasses.replace(base, gpus=(GpuFacts(index=0, name="A100"),))
    none = dataclasses.replace(base, driver=DriverFacts(error="Driver Not Loaded"))
    finding = own(judge([view("a", facts=h100), view("b", facts=a100), view("c", facts=none)], port=1))[0]
    assert (finding.id, finding.status) == ("hosts-differ", "warn")
    assert "GPUs: 2 x H100 on a; 1 x A100 on b; none on c" in finding.evidence


def test_what_one_host_does_not_know_is_no_difference() -> None:
    assert own(judge([view("a"), view("b", facts=Facts())], port=1))[0].status == "ok"


def test_clocks() -> None:
    found = own(judge([view("a"), view("b", clock_s=(-7.5, 0.01)), view("c")], port=1))
    (finding,) = [finding for finding in found if finding.id == "clock-skew"]
    assert finding.title.endswith("and b are 7.5 s apart")
    # Not surer than the answers were quick.
    assert own(judge([view("a"), view("b", clock_s=(1.5, 0.8))], port=1))[0].id == "hosts-alike"


def test_ways_that_are_closed() -> None:
    one = view("a", reached={"b": {"error": "Connection refused"}})
    other = view("b", reached={"a": {"by": "name"}})
    finding = own(judge([one, other], port=4711))[0]
    assert finding.id == "rendezvous-port-unreachable"
    assert finding.title == "1 of 2 ways between these hosts are closed on port 4711"
    assert finding.evidence == ("a -> b port 4711: Connection refused",)


def test_a_name_that_only_its_address_replaces() -> None:
    one = view("a", reached={"b": {"by": "10.0.0.2", "name_error": "Name or service not known"}})
    finding = own(judge([one, view("b")], port=1))[0]
    assert (finding.id, finding.status) == ("host-name-not-usable", "warn")
    assert "10.0.0.2" in finding.evidence[0]


def test_a_name_that_is_loopback_elsewhere() -> None:
    one = view("a", names={"b": {"addresses": ["127.0.1.1"], "error": None}})
    finding = own(judge([one, view("b", names={"b": {"addresses": ["127.0.1.1"]}})], port=1))[0]
    assert (finding.id, finding.evidence) == ("hostname-resolves-to-loopback", ("b is 127.0.1.1 on a",))


def test_a_name_with_two_meanings() -> None:
    views = [
        view("a", names={"c": {"addresses": ["10.0.0.3"]}}),
        view("b", names={"c": {"addresses": ["10.9.9.9"]}}),
        view("c", names={"c": {"addresses": ["127.0.1.1"]}}),
    ]
    finding = own(judge(views, port=1))[0]
    assert finding.id == "host-name-differs"
    assert finding.evidence == ("c is 10.0.0.3 on a", "c is 10.9.9.9 on b")


def test_what_is_skipped() -> None:
    views = [view("a"), view("b", clock_s=(99.0, 0.0))]
    assert "clock-skew" not in ids(judge(views, port=1, skip={"clock-skew"}))


def test_the_json() -> None:
    views = (view("a"), view("b", problem="gone", facts=None))
    report = json.loads(json.dumps(HostsReport(views, judge(views, port=1)).to_json()))
    assert (report["schema"], report["verdict"]) == (1, "fail")
    assert report["hosts"]["b"] == {"problem": "gone"}
    assert report["hosts"]["a"]["facts"]["torch"]["version"] == "2.6.0+cu126"


# the conversation, with programs on this machine


def local(host: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """A "host" that is this machine, or something that misbehaves."""
    kinds = {
        "noisy": ["sh", "-c", "echo Welcome to noisy; echo '{\"a\": 1}'; exec " + shlex.join(words)],
        "dies": ["sh", "-c", "echo 'bash: no such thing' >&2; exit 127"],
        "hangs": ["sleep", "1000"],
        "stops": ["sh", "-c", "read line; exit 3"],
        "garbage": ["sh", "-c", f"while read line; do echo '{MARK}not json'; done"],
        "absent": ["/no/such/program"],
    }
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(kinds.get(host, list(words)), **pipes, start_new_session=True)


def ask(hosts: Sequence[str], timeout_s: float = PATIENCE_S, port: int = 0) -> dict[str, HostView]:
    from tests.launch.slurm_lab import _free_ports

    question = {"nnodes": len(hosts), "torch": False}
    found = examine(
        hosts, local, port=port or _free_ports(1)[0], facts_question=question, timeout_s=timeout_s, words=PEER
    )
    return {one.name: one for one in found}


def test_a_banner_is_no_answer() -> None:
    found = ask(["noisy"])["noisy"]
    assert found.problem == ""
    assert found.facts is not None
    assert found.facts.job is not None
    assert found.facts.job.nnodes == 1


def test_hosts_that_misbehave_cost_their_own_answers() -> None:
    found = ask(["localhost", "dies", "hangs", "stops", "garbage", "absent"], timeout_s=5.0)
    assert found["localhost"].facts is not None
    assert found["dies"].problem == "bash: no such thing"
    assert found["hangs"].problem == "no answer within 5 s"
    assert found["stops"].problem == "ended with exit code 3"
    assert "no answer" in found["garbage"].problem
    assert "No such file" in found["absent"].problem


def test_two_names_of_one_machine_listen_once() -> None:
    found = ask(["localhost", "127.0.0.1"])
    assert found["localhost"].machine == found["127.0.0.1"].machine != ""
    assert found["localhost"].reached == {"127.0.0.1": {"by": "name"}}
    assert found["127.0.0.1"].reached == {"localhost": {"by": "name"}}


# the real thing


@pytest.fixture(scope="module")
def nodes() -> Iterator[Lab]:
    with lab(("n1", "n2", "n3")) as running:
        yield running


def doctor(nodes: Lab, *words: str, hosts: str = "n1,n2,n3") -> dict[str, Any]:
    """`phalanx doctor --hosts` on n1; torch is one that imports at once, on every host."""
    done = nodes["n1"].python(
        *("-m", "phalanx", "doctor", "--hosts", hosts, "--json", *words),
        environ=quick_torch(nodes.folder),
        cwd=ROOT,
        timeout_s=150,
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


def found(report: dict[str, Any], identity: str) -> dict[str, Any]:
    by_id = {finding["id"]: finding for finding in report["findings"]}
    assert identity in by_id, sorted(by_id)
    entry = by_id[identity]
    assert isinstance(entry, dict)
    return entry


@needs_lab
def test_three_hosts_by_ssh(nodes: Lab) -> None:
    report = doctor(nodes)
    assert sorted(report["hosts"]) == ["n1", "n2", "n3"]
    names = {host["facts"]["network"]["host_name"] for host in report["hosts"].values()}
    assert names == {"n1", "n2", "n3"}
    together = {entry["id"] for entry in report["findings"]} & {
        "host-does-not-answer",
        "rendezvous-port-unreachable",
        "host-name-differs",
        "hosts-differ",
        "clock-skew",
    }
    assert together == set()


@needs_lab
def test_a_cut_and_a_wrong_name_and_a_taken_port(nodes: Lab) -> None:
    """Several faults at once, each said by itself."""
    n1, n2, n3 = (nodes[name] for name in ("n1", "n2", "n3"))
    text = n2.hosts.read_text()
    code = (
        "import socket, time; s = socket.create_server(('', 4711)); print('up', flush=True); time.sleep(1000)"
    )
    taker = subprocess.Popen(n1.words(sys.executable, "-c", code), stdout=subprocess.PIPE)
    try:
        assert taker.stdout is not None
        taker.stdout.readline()
        n2.cut(n3)
        n2.hosts.write_text(text.replace(n1.address + " n1", "10.99.0.1 n1"))
        report = doctor(nodes, "--port", "4711", hosts="n[1-3],n9")
    finally:
        taker.kill()
        taker.communicate()
        n2.hosts.write_text(text)
        n2.mend(n3)
    assert found(report, "host-does-not-answer")["evidence"][0].startswith("n9: ")
    ways = found(report, "rendezvous-port-unreachable")["evidence"]
    assert any(line.startswith("n2 -> n3") for line in ways)
    assert any(line.startswith("n3 -> n2") for line in ways)
    assert not any(line.startswith("n1 -> n2") for line in ways)
    assert "n1 is 10.99.0.1 on n2" in found(report, "host-name-differs")["evidence"]
    assert found(report, "port-in-use")["title"].startswith("n1: ")


@needs_lab
def test_a_clock_that_is_off(nodes: Lab) -> None:
    """Time itself is shared by all namespaces: the answering program's clock is set apart."""
    shifted = (
        "import time; real = time.time; time.time = lambda: real() + 40\n"
        "from phalanx.tools.doctor.host_peer import main; main()"
    )
    code = f"""
import json, os
from phalanx.launch.remote_programs import BySsh
from phalanx.tools.doctor.host_findings import judge
from phalanx.tools.doctor.hosts import PEER, examine
ssh = BySsh({{}}, os.environ)
def start(host, words):
    return ssh(host, [words[0], "-c", {shifted!r}] if host == "n3" else words)
views = examine(["n1", "n2", "n3"], start, port=29500, facts_question={{"torch": False}}, timeout_s=60)
print(json.dumps([finding.title for finding in judge(views, port=29500) if finding.id == "clock-skew"]))
"""
    done = nodes["n1"].python("-c", code, cwd=ROOT)
    (title,) = json.loads(done.stdout)
    assert title.startswith("the clocks of n3 and n")
    assert "40." in title or "39.9" in title

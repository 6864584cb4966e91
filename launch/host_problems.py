"""The driver's judgement of its hosts before a job starts: every host's problem, each with its fix, in one message."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.launch.driver_node import DriverNode
from phalanx.launch.preflight import versions

_SKEW_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What keeps a host out of the job."""

    host: str
    what: str
    fix: str
    exit_code: int = 3  # 2: what was typed asks for it


def problems_of(
    nodes: Sequence[DriverNode], expected: Mapping[str, str | None], *, same_machine: bool
) -> list[Problem]:
    """All hosts' problems, in their order; ``expected`` are fingerprints of files."""
    found: list[Problem] = []
    for node in nodes:
        own = list(_problems(node, expected))
        found += own
    return found or ([] if same_machine else list(_meeting(nodes)))


def _problems(node: DriverNode, expected: Mapping[str, str | None]) -> Iterator[Problem]:
    host = node.host.name
    facts = node.facts
    if facts is None:
        if node.lost is not None:
            yield _unreached(node)
        return
    if facts["folder_problem"] is not None:
        yield Problem(
            host=host,
            what=f"the working folder {os.getcwd()} cannot be used there ({facts['folder_problem']})",
            fix="start from a folder that all hosts have, or copy it there",
        )
        return
    yield from _versions(node)
    for name, content in expected.items():
        there = facts["files"].get(name)
        if there != content:
            what = "is not there" if there is None else "has another content there"
            yield Problem(
                host=host,
                what=f"{name} {what}",
                fix=f"a shared folder, or: {_copy(node, name)}",
            )
    if "port_problem" in facts:
        yield Problem(
            host=host,
            what=f"the port for the rendezvous cannot be used ({facts['port_problem']})",
            fix="leave --master-port out, and a free one is taken",
            exit_code=2,
        )
    if node.refused is not None:
        problem, _, fix = node.refused["message"].partition("\nFix: ")
        yield Problem(host=host, what=problem, fix=fix, exit_code=node.refused["exit_code"])
    elif node.lost is not None:
        said = node.stderr_lines()[-1:]
        yield Problem(
            host=host,
            what=": ".join([f"its agent did not get ready: {node.lost}", *said]),
            fix=f"phalanx doctor --hosts {host}",
        )


def _copy(node: DriverNode, name: str) -> str:
    user = f"{node.host.user}@" if node.host.user else ""
    return f"scp {shlex.quote(name)} {user}{node.host.name}:{shlex.quote(name)}"


def _versions(node: DriverNode) -> Iterator[Problem]:
    assert node.facts is not None
    for name, here in versions().items():
        there = node.facts["versions"].get(name)
        same = (
            here == there if name != "Python" else (here or "").split(".")[:2] == (there or "").split(".")[:2]
        )
        if same:
            continue
        what = (
            f"{name} {there} there, {here} here"
            if there
            else f"{name} is not installed for {node.facts['python']}"
        )
        fix = (
            f"{sys.executable} -m pip install {name}=={here}   (there)"
            if name != "Python"
            else ("the same virtual environment on all hosts")
        )
        yield Problem(host=node.host.name, what=what, fix=fix)


#: What ssh and the shell there say, in words that name the cause, with a way out.
_SSH_SAYS = (
    ("could not resolve hostname", "ssh does not know this name", "check its spelling, or give its address"),
    ("name or service not known", "ssh does not know this name", "check its spelling, or give its address"),
    ("permission denied", "ssh was not let in", "ssh-copy-id {where}, or add your key to the agent (ssh-add)"),
    ("host key verification failed", "ssh does not trust the host's key", "ssh {where} once, and compare its key"),
    ("remote host identification has changed", "the host's key has changed", "ssh-keygen -R {host}, if that is expected"),
    ("connection refused", "nothing listens on the port of ssh there", "start sshd there, or --ssh-port N"),
    ("connection timed out", "the host does not answer", "check that it is up, and its firewall"),
    ("no route to host", "there is no way to the host", "check that it is up, and the network"),
    ("network is unreachable", "there is no way to the host", "check the network here"),
    ("too many authentication failures", "ssh offered too many keys", "IdentityFile with IdentitiesOnly yes in ~/.ssh/config"),
    ("no module named phalanx", "phalanx is not installed there for this Python", "{python} -m pip install phalanx   (there)"),
    ("no module named", "a module is missing there for this Python", "install it there, or use the same virtual environment"),
    ("not found", "this Python is not there", "the same virtual environment at {python} on every host"),
    ("no such file", "this Python is not there", "the same virtual environment at {python} on every host"),
)  # fmt: skip


def _unreached(node: DriverNode) -> Problem:
    """A host from which nothing was heard, explained by what ssh said."""
    lines = node.stderr_lines()
    text = "\n".join(lines).lower()
    host = node.host
    where = (f"-p {host.port} " if host.port else "") + (f"{host.user}@" if host.user else "") + host.name
    for words, cause, fix in _SSH_SAYS:
        if words in text:
            said = next((line for line in reversed(lines) if words in line.lower()), lines[-1])
            fix = fix.format(where=where, host=host.name, python=sys.executable)
            return Problem(host=host.name, what=f"{cause}: {said.strip()}", fix=fix)
    said = ": ".join([node.lost or "", *(line.strip() for line in lines[-3:])])
    noise = node.link.noise.decode(errors="replace").strip().splitlines()[-1:]
    return Problem(
        host=host.name, what=": ".join([said, *noise]), fix=f"ssh {where} true   shows the same by hand"
    )


def common_address(nodes: Sequence[DriverNode]) -> str:
    """The first address of node 0 that every node reached it by; "" where there is none.

    Addresses alone decide, as they were tried: what a name means differs from host to host.
    """
    answers = [node.answers for node in nodes if node.answers is not None]
    for address in answers[0] if answers else ():
        if all(answer.get(address) == "" for answer in answers):
            return address
    return ""


def _meeting(nodes: Sequence[DriverNode]) -> Iterator[Problem]:
    if common_address(nodes):
        return
    first = nodes[0]
    port = first.facts["port"] if first.facts else 0
    for node in nodes[1:]:
        answers = node.answers or {}
        if "" in answers.values():
            continue
        tried = "; ".join(f"{address}: {why}" for address, why in answers.items()) or "node 0 has no address"
        yield Problem(
            host=node.host.name,
            what=f"it does not reach {first.host.name}, where the nodes meet (port {port}: {tried})",
            fix=f"open the TCP ports among the hosts, or --master-port N for one that is open on {first.host.name}",
        )
        return
    if len(nodes) > 1:
        yield Problem(
            host=first.host.name,
            what="no one address of it is reached by every other host",
            fix="--master-addr ADDRESS, in a network that all hosts are in",
        )


def message_of(problems: Sequence[Problem], nodes: Sequence[DriverNode]) -> tuple[str, int]:
    """One text for all problems, and the exit code."""
    hosts = list(dict.fromkeys(problem.host for problem in problems))
    count = len(nodes) or len(hosts)
    verb = "is" if len(hosts) == 1 else "are"
    head = f"{len(hosts)} of {count} node{'s' * (count > 1)} {verb} not ready; nothing was started."
    lines = [head]
    for problem in problems:
        lines += [f"{problem.host}: {problem.what.rstrip('.')}.", f"  Fix: {problem.fix}"]
    return "\n".join(lines), max(problem.exit_code for problem in problems)


def warnings_of(nodes: Sequence[DriverNode], *, same_machine: bool) -> list[str]:
    """What does not keep a job from starting, but may spoil it."""
    found: list[str] = []
    if same_machine:
        return found
    apart = [node.host.name for node in nodes if node.facts and not node.facts["sees_token"]]
    if apart:
        found.append(
            f"{', '.join(apart)}: {os.getcwd()} is another folder there than here, not a shared one: "
            "checkpoints and logs of its ranks stay on that host.\n"
            "Fix: write checkpoints to a folder that all hosts share"
        )
    logless = [n.host.name for n in nodes if n.facts and n.facts["sees_token"] and not n.facts["sees_logs"]]
    if logless:
        found.append(
            f"{', '.join(logless)}: the log folder is not shared; logs of its ranks stay on that host."
        )
    skewed = {n.host.name: n.clock_offset_s for n in nodes if abs(n.clock_offset_s) > _SKEW_S}
    if skewed:
        clocks = ", ".join(f"{name} by {offset:+.1f} s" for name, offset in skewed.items())
        found.append(f"clocks differ from this machine's: {clocks}. Fix: run chrony or ntpd there")
    return found

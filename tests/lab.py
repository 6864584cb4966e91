"""Several nodes on this machine, for tests: network namespaces joined by a bridge, each with its own sshd.

A node has its own network, host name, /etc/hosts and processes, and the machine's files. Nothing of it has a
name outside: when the first process of its namespaces dies, which it does with the test, the kernel takes the
rest away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "sshd", "ssh", "ssh-keygen", "mount")
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_START_TIMEOUT_S = 20.0
NETWORK = "10.77.0"
_VETH = ("ip", "link", "add", "one", "type", "veth", "peer", "name", "two")


def missing() -> str | None:
    """Why no lab can be started here, None where one can."""
    search = f"{os.environ.get('PATH', '')}:{_SBIN}"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=search) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: openssh-server, openssh-client, iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root: network namespaces and sshd"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", *_VETH],
        env=_environ(),
        capture_output=True,
        check=False,
    )
    return f"needs namespaces and veth: {probe.stderr.decode().strip()}" if probe.returncode else None


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_SBIN}"}


@dataclass
class Node:
    """One node. ``address`` is in the lab's network, ``pid`` the first process of its namespaces."""

    name: str
    address: str
    pid: int
    lab: Lab
    hosts: Path = field(default_factory=Path)  # its /etc/hosts, which a test may write to

    def words(self, *words: str | Path, cwd: Path | None = None) -> list[str]:
        """A command line that runs ``words`` on this node, in ``cwd``: to enter a mount namespace leads to /."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--pid", "--"]
        # nsenter forks: when it is killed, what it started has to end as well.
        place = ["env", f"--chdir={cwd}"] if cwd is not None else []
        return [*enter, *place, "setpriv", "--pdeathsig", "KILL", *map(str, words)]

    def run(
        self,
        *words: str | Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 60.0,
        settle: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this node to its end; ``ssh NAME`` works there. Unless ``settle`` is false, sshd is idle then."""
        done = subprocess.run(
            self.words(*words, cwd=cwd),
            env=self.lab.environ | dict(environ or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if settle:
            self.lab.settle()
        return done

    def python(self, *words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
        """Run this Python on the node."""
        return self.run(sys.executable, *words, **options)  # type: ignore[arg-type]

    def must(self, *words: str | Path) -> str:
        """Run a program that has to succeed; connections of ssh may be open."""
        done = self.run(*words, settle=False)
        assert done.returncode == 0, f"{self.name}: {' '.join(map(str, words))}: {done.stderr}"
        return done.stdout

    def cut(self, other: Node) -> None:
        """No packet of this node reaches the other any more."""
        self.must("ip", "route", "add", "blackhole", f"{other.address}/32")

    def mend(self, other: Node) -> None:
        """Undo `cut`."""
        self.must("ip", "route", "del", "blackhole", f"{other.address}/32")


class Lab:
    """Nodes by name, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}
        self.servers: list[subprocess.Popen[bytes]] = []

    def kill(self, name: str) -> None:
        """A node dies at once: its processes, and its network with them. Its sshd is waited for no more."""
        self.servers = [
            server for server in self.servers if server is not self.servers[list(self.nodes).index(name)]
        ]
        os.kill(self.nodes[name].pid, signal.SIGKILL)

    def settle(self) -> None:
        """Wait until every sshd is back to listening: a session ends a moment after its client."""
        if self.servers:
            _wait(lambda: all(map(_is_idle, self.servers)), "idle sshd", self.servers[0])

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    @property
    def environ(self) -> dict[str, str]:
        """Of a program on a node: ``ssh`` is one that knows the lab's keys. No job's variables."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "GLOO_"))}
        return clean | {"PATH": f"{self.folder}/bin:{clean.get('PATH', '')}:{_SBIN}"}


@contextlib.contextmanager
def lab(names: Sequence[str] = ("n1", "n2")) -> Iterator[Lab]:
    """Start the nodes, each with an sshd on port 22 of its own address; end them all at the end."""
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    made = Lab(folder)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        _keys(folder)
        switch = _namespaces(folder, "switch", processes)
        _must(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _must(switch, "ip", "link", "set", "bridge", "up")
        addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=1)}
        for name in names:
            hosts = folder / f"hosts-{name}"
            lines = [f"{address} {other}" for other, address in addresses.items()]
            hosts.write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
            pid = _namespaces(folder, name, processes, hosts=hosts)
            made.nodes[name] = Node(name, addresses[name], pid, made, hosts)
            _join(switch, made.nodes[name])
        for node in made.nodes.values():
            _start_sshd(node, processes)
        made.settle()
        yield made
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _keys(folder: Path) -> None:
    """Keys of the servers and the one user, and an ssh that uses them."""
    folder.chmod(0o755)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    (folder / "sshd_config").write_text(
        f"""HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
MaxStartups 100
"""
    )
    (folder / "ssh_config").write_text(
        f"""Host *
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
    )
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    ssh.chmod(0o755)


def _namespaces(
    folder: Path, name: str, processes: list[subprocess.Popen[bytes]], hosts: Path | None = None
) -> int:
    """New namespaces, held by a process that ends with this one; its process id."""
    ready = folder / f"{name}.ready"
    script = [f"hostname {name}", "ip link set lo up", "mount -t sysfs sysfs /sys", "mkdir -p /run/sshd"]
    if hosts is not None:  # no name server: what is not in the file is not found at once
        (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        script += [
            f"mount --bind {hosts} /etc/hosts",
            f"mount --bind {folder}/nsswitch.conf /etc/nsswitch.conf",
        ]
    script += [f"touch {ready}", "exec sleep infinity"]
    unshare = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *unshare, "sh", "-ec", "\n".join(script)],
        env=_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"{name}.log").open("wb"),
    )
    processes.append(process)
    _wait(lambda: ready.exists(), f"namespaces of {name}: {(folder / f'{name}.log').read_text()}", process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def _join(switch: int, node: Node) -> None:
    """A cable from the node to the bridge."""
    end = f"to-{node.name}"
    _must(switch, "ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
    _must(switch, "ip", "link", "set", end, "master", "bridge", "up")
    node.must("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
    node.must("ip", "link", "set", "eth0", "up")


def _start_sshd(node: Node, processes: list[subprocess.Popen[bytes]]) -> None:
    sshd = shutil.which("sshd", path=_SBIN) or "sshd"
    log = (node.lab.folder / f"sshd-{node.name}.log").open("wb")
    words = node.words(sshd, "-D", "-e", "-f", node.lab.folder / "sshd_config")
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *words],
        env=_environ(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    processes.append(process)
    node.lab.servers.append(process)
    log.close()


def _is_idle(server: subprocess.Popen[bytes]) -> bool:
    """Whether an sshd, which says what it does in its command line, serves nobody."""
    lines = []
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    daemons = [line for line in lines if line.startswith(("sshd", "/usr/sbin/sshd", "/usr/lib/openssh"))]
    return len(daemons) == 1 and "[listener] 0 of" in daemons[0]


def _must(pid: int, *words: str) -> None:
    command = ["nsenter", f"--target={pid}", "--net", *words]
    done = subprocess.run(command, env=_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def _wait(condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"ended: {what}"
        assert time.monotonic() < deadline, f"not there: {what}"
        time.sleep(0.02)

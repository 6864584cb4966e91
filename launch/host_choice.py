"""Which hosts a command of several is about: those named, those of a file, or those of the Slurm allocation."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
from pathlib import Path

from phalanx.dist.environments.hostfile import Host, InvalidHostfile, parse_hostfile
from phalanx.launch import values as checked
from phalanx.launch.host_outputs import HostOutputs, Start, hosts_named, other_nodes_of_allocation
from phalanx.launch.options import Given
from phalanx.launch.remote_programs import BySlurm, BySsh, allocation
from phalanx.launch.values import Values
from phalanx.tools.usage import UsageMistake


def starter(
    hosts: str | None, hostfile: str | None, ssh_port: str | None, timeout_s: float
) -> HostOutputs | None:
    """What runs phalanx commands on the hosts; None where this node alone is meant.

    Raises:
        UsageMistake: A host or the port is none, or the file cannot be read.
    """
    if hosts is not None and hostfile is not None:
        raise UsageMistake("--hosts and --hostfile both name hosts.", fix="one of the two")
    port = _port(ssh_port)
    if hosts is None and hostfile is None:
        nodes = other_nodes_of_allocation(os.environ, socket.gethostname())
        return HostOutputs(nodes, BySlurm(os.environ), timeout_s) if nodes else None
    chosen = hosts_named(hosts, "--hosts") if hosts is not None else _of_file(hostfile or "")
    names = [host.name for host in chosen]
    if set(names) <= set(allocation(os.environ)):
        return HostOutputs(names, BySlurm(os.environ), timeout_s)
    return HostOutputs(names, BySsh({host.name: host for host in chosen}, os.environ, port), timeout_s)


def chosen_hosts(given: Values) -> tuple[list[Host], Start]:
    """The hosts that `phalanx run` shall use, and what starts a program there.

    Raises:
        UsageMistake: A host or the port is none, or the file cannot be read.
    """
    names = checked.text(given, "hosts")
    hosts = hosts_named(names, given["hosts"].source) if names else _of_file(checked.text(given, "hostfile"))
    if {host.name for host in hosts} <= set(allocation(os.environ)):
        return hosts, BySlurm(os.environ)
    port = checked.whole_number(given, "ssh_port", low=1, high=65535)
    return hosts, BySsh({host.name: host for host in hosts}, os.environ, port, ssh_words(given.get("ssh")))


def ssh_words(given: Given | None) -> tuple[str, ...]:
    """``--ssh 'ssh -J gateway'`` as words.

    Raises:
        UsageMistake: There is no such program, or a quote is open.
    """
    if given is None:
        return ("ssh",)
    try:
        words = tuple(shlex.split(given.text))
    except ValueError as error:
        raise UsageMistake(f"{given}: {error}.", fix="--ssh 'ssh -J gateway'") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageMistake(f"{given}: there is no such program.", fix="--ssh 'ssh -J gateway'")
    return words


def _of_file(name: str) -> list[Host]:
    try:
        return parse_hostfile(Path(name).read_text(errors="replace"))
    except OSError as error:
        raise UsageMistake(
            f"--hostfile {name}: it cannot be read ({error.strerror}).", fix="--hostfile FILE"
        ) from None
    except InvalidHostfile as error:
        problem, _, fix = str(error).partition("\nFix: ")
        raise UsageMistake(f"--hostfile {name}: {problem}", fix=fix) from None


def _port(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise UsageMistake(f"--ssh-port {text}: a port is 1 to 65535.", fix="--ssh-port 22")
    return int(text)

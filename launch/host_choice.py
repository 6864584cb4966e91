"""Which hosts a command of several is about: those named, those of a file, or those of the Slurm allocation."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from phalanx.dist.environments.hostfile import Host, InvalidHostfile, parse_hostfile
from phalanx.launch.host_outputs import HostOutputs, hosts_named, other_nodes_of_allocation
from phalanx.launch.remote_programs import BySlurm, BySsh, allocation
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

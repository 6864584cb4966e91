"""What a host must have before a job starts there: facts gathered on the host, and the driver's judgement of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

_REACH_S = 4.0  # for one address of node 0


def versions() -> dict[str, str | None]:
    """Of what has to be the same on every host."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name in ("phalanx", "torch"):
        try:
            found[name] = str(metadata.version(name))
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def fingerprint(path: Path) -> str | None:
    """Of a file's content, None where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def host_facts(job: Facts) -> Facts:
    """What the relay finds on its host, without torch and in a moment."""
    folder = Path(job["folder"])
    problem = None
    try:
        os.chdir(folder)
    except OSError as error:
        problem = error.strerror or str(error)
    return {
        "hostname": socket.gethostname(),
        "python": sys.executable,
        "versions": versions(),
        "folder_problem": problem,
        "files": {name: fingerprint(Path(name)) for name in job["files"]} if problem is None else {},
        "sees_token": job["token"] is not None and Path(job["token"]).exists(),
        "sees_logs": job["log_token"] is not None and Path(job["log_token"]).exists(),
        "addresses": addresses(),
        "time": time.time(),
    }


def addresses() -> list[str]:
    """This host's own addresses, the one by which the driver came first; loopback is left out."""
    found = []
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        found.append(connection[2].partition("%")[0])
    import psutil

    with contextlib.suppress(OSError):
        stats = psutil.net_if_stats()
        for name, entries in psutil.net_if_addrs().items():
            if name in stats and stats[name].isup:
                found += [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
    plain = [
        a for a in dict.fromkeys(found) if "%" not in a and not a.startswith(("127.", "fe80:", "169.254."))
    ]
    return [a for a in plain if a != "::1"]


class Doorbell:
    """A port of node 0 that answers with a word, so that other nodes know whom they reach.

    Args:
        port: 0 for a free one.
        word: Of this job alone.
    """

    def __init__(self, port: int, word: str) -> None:
        self._word = word.encode()
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._sock = socket.socket(family)
        try:
            if family == socket.AF_INET6:
                self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(("", port))
            self._sock.listen(128)
        except OSError:
            self._sock.close()
            raise
        self._sock.setblocking(False)
        self.port = int(self._sock.getsockname()[1])

    def fileno(self) -> int:
        return self._sock.fileno()

    def answer(self) -> None:
        with contextlib.suppress(OSError):
            caller, _ = self._sock.accept()
            with caller:
                caller.sendall(self._word)

    def close(self) -> None:
        self._sock.close()


def reach(candidates: list[str], port: int, word: str) -> dict[str, str]:
    """For each address of node 0: "" when this host reaches node 0 there, else why not."""
    if not candidates:
        return {}
    with ThreadPoolExecutor(len(candidates)) as pool:
        return dict(zip(candidates, pool.map(lambda a: _ring(a, port, word), candidates), strict=True))


def _ring(address: str, port: int, word: str) -> str:
    try:
        with socket.create_connection((address, port), timeout=_REACH_S) as sock:
            heard = b""
            while len(heard) < len(word) and (data := sock.recv(256)):
                heard += data
    except OSError as error:
        return error.strerror or f"no answer within {_REACH_S:g} s"
    return "" if heard == word.encode() else "something else answers there"


def way_to(address: str) -> tuple[str, str | None]:
    """This host's own address on the way to ``address``, and the name of the interface that has it.

    Nothing is looked up by name: what a host's own name means to it may be its loopback address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = str(probe.getsockname()[0])
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in entries):
            return own, name
    return own, "lo" if own.startswith("127.") else None

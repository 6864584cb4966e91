"""Which process is which rank of which job, for whoever looks at this node.

A rank that is forked from a process with torch in it has the variables RANK and LOCAL_RANK, but /proc shows the
environment that its program started with, without them. So the launcher holds one abstract socket a rank, whose
name says it all: any user may read the names (/proc/net/unix), and they are gone with the launcher.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_PREFIX = "phalanx-rank"
_JOB_LETTERS = 40  # the kernel's limit for the whole name is 107 bytes


@dataclass(frozen=True, kw_only=True)
class RankSign:
    """One process of a job."""

    pid: int
    rank: int
    local_rank: int
    world_size: int
    job: str

    def name(self) -> str:
        """The name of its socket. A process number means something in one namespace alone, so that is part of it."""
        job = re.sub(r"[^A-Za-z0-9._:-]", "_", self.job)[-_JOB_LETTERS:]
        numbers = (pid_namespace(), self.pid, self.rank, self.local_rank, self.world_size)
        return "/".join((_PREFIX, *map(str, numbers), job))


class RankSigns:
    """The launcher's side: `show` replaces what was shown before, `close` takes it down."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def show(self, signs: Iterable[RankSign]) -> None:
        import socket  # who only reads the signs needs none of it

        self.close()
        for sign in signs:
            try:
                held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._sockets.append(held)
                held.bind("\0" + sign.name())
            except OSError:  # no descriptor left, or no such sockets here: nobody is told, and nothing breaks
                continue

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets = []


def rank_signs(table: Path = Path("/proc/net/unix")) -> dict[int, RankSign]:
    """The ranks of this node that `phalanx run` started, by process id."""
    try:
        text = table.read_text(errors="replace")
    except OSError:
        return {}
    found = re.findall(rf"@{_PREFIX}/(\d+)/(\d+)/(\d+)/(\d+)/(\d+)/([A-Za-z0-9._:-]*)$", text, re.MULTILINE)
    here = pid_namespace()
    signs = (
        RankSign(pid=int(pid), rank=int(rank), local_rank=int(local_rank), world_size=int(size), job=job)
        for namespace, pid, rank, local_rank, size, job in found
        if int(namespace) == here
    )
    return {sign.pid: sign for sign in signs}


def pid_namespace() -> int:
    """Number of this process's namespace of process ids, 0 where it cannot be told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0

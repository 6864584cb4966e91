"""One node as its driver sees it: the program that was started there, the link to it, and what is known."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.dist.environments.hostfile import Host
from phalanx.launch.failures import Failure
from phalanx.launch.node_link import Link

_MOST_STDERR_BYTES = 64 * 1024


@dataclass
class DriverNode:
    """Node ``number`` of the job, on ``host``; facts arrive one after another."""

    number: int
    host: Host
    process: subprocess.Popen[bytes]
    link: Link
    stderr: bytes = b""  # of ssh, srun or Python, not of the ranks
    stderr_open: bool = True
    facts: dict[str, Any] | None = None
    ready: dict[str, Any] | None = None
    refused: dict[str, Any] | None = None
    answers: Mapping[str, str] | None = None  # by address of node 0: "" or why it is not reached
    exit_code: int | None = None  # of its agent, once that has ended
    lost: str | None = None  # why nothing more will come of it
    lost_at: float | None = None  # seconds since the epoch
    failures: list[Failure] = field(default_factory=list)
    partial: dict[str, bytes] = field(default_factory=lambda: {"1": b"", "2": b""})
    asked_at: float = 0.0  # when it was told the job, seconds since the epoch
    clock_offset_s: float = 0.0  # its clock minus the driver's, as far as that is certain

    @property
    def label(self) -> str:
        """As messages name it: ``n1 (gpu02)``, or ``n1`` where nodes are played on one machine."""
        return f"n{self.number} ({self.host.name})" if self.host.name != f"n{self.number}" else self.host.name

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None or self.lost is not None

    def read_stderr(self) -> None:
        assert self.process.stderr is not None
        try:
            data = os.read(self.process.stderr.fileno(), 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.stderr = (self.stderr + data)[-_MOST_STDERR_BYTES:]
        self.stderr_open = bool(data)

    def stderr_lines(self) -> list[str]:
        return [line for line in self.stderr.decode(errors="replace").splitlines() if line.strip()]

    def kill(self) -> None:
        """End the program that holds the link; what runs on the host ends itself by that."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the link, and collect the program."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()

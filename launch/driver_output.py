"""What the driver shows, and what it reads for rank 0: its own standard streams."""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections.abc import Iterable

from phalanx.launch.driver_node import DriverNode
from phalanx.launch.interrupts import Interrupts
from phalanx.launch.node_link import FULL_BYTES
from phalanx.launch.output import Sink

_READ_BYTES = 64 * 1024


class DriverOutput:
    """The nodes' output on our stdout and stderr: rank 0 as it is, or the whole lines of all.

    Args:
        show: ``rank0`` or ``all``.
    """

    def __init__(self, show: str) -> None:
        self._raw = show == "rank0"
        self._stdout = Sink(1)
        same = _is_terminal(1) and _is_terminal(2) and os.fstat(1).st_rdev == os.fstat(2).st_rdev
        self._stderr = self._stdout if same else Sink(2)
        for sink in {self._stdout, self._stderr}:
            sink.reopen()
        self._input = 0 if _is_worth_reading(0) else -1

    @property
    def size(self) -> list[int] | None:
        """Rows and columns of the terminal that rank 0 is shown on; None where it is none."""
        if not (self._raw and _is_terminal(1) and _is_terminal(2)):
            return None
        columns, rows = os.get_terminal_size(1)
        return [rows, columns]

    @property
    def closed_by_reader(self) -> bool:
        return self._stdout.closed_by_reader

    @property
    def is_full(self) -> bool:
        """Whether so much waits for our reader that the nodes should wait too."""
        return max(self._stdout.pending_bytes, self._stderr.pending_bytes) > FULL_BYTES

    def interests(self, poll: select.poll, *, read: bool) -> None:
        for sink in (self._stdout, self._stderr):
            if sink.pending_bytes:
                poll.register(sink.fd, select.POLLOUT)
        if read and self._input >= 0:
            poll.register(self._input, select.POLLIN)

    def flush(self) -> None:
        self._stdout.flush()
        self._stderr.flush()

    def show(self, node: DriverNode, kind: str, data: bytes) -> None:
        """Show bytes of a node's stream; of several nodes, only whole lines."""
        sink = self._stdout if kind == "1" else self._stderr
        if self._raw and node.number == 0:
            sink.write(data, whole_lines=False)
            return
        whole, newline, rest = (node.partial[kind] + data).rpartition(b"\n")
        node.partial[kind] = rest
        if newline:
            sink.write(whole + newline, whole_lines=True)

    def finish(self, nodes: Iterable[DriverNode]) -> None:
        """Show last lines without a newline."""
        for node in nodes:
            for kind, rest in node.partial.items():
                if rest:
                    (self._stdout if kind == "1" else self._stderr).write(rest + b"\n", whole_lines=True)
                    node.partial[kind] = b""

    def say(self, text: str) -> None:
        """A line of the driver's own."""
        self._stderr.write(text.rstrip("\n").encode(errors="backslashreplace") + b"\n", whole_lines=True)

    def drain(self, interrupts: Interrupts) -> None:
        """Pass on what is left; a further signal gives up on a reader that does not read."""
        signals = interrupts.count
        while (self._stdout.pending_bytes or self._stderr.pending_bytes) and interrupts.count <= signals:
            poll = select.poll()
            self.interests(poll, read=False)
            poll.poll(100)
            self.flush()

    # ----------------------------------------------------------------- stdin

    @property
    def has_input(self) -> bool:
        return self._input >= 0

    def is_input(self, fd: int) -> bool:
        return fd == self._input

    def read_input(self) -> bytes | None:
        """The next bytes for rank 0, b"" at their end; None when there is nothing to pass on."""
        try:
            data = os.read(self._input, _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._input = -1
        return data


def _is_terminal(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(fd)
    return False


def _is_worth_reading(fd: int) -> bool:
    """Whether stdin may say something to rank 0; a terminal only while we are its foreground job."""
    try:
        mode = os.fstat(fd).st_mode
        if os.isatty(fd):
            return os.tcgetpgrp(fd) == os.getpgrp()
        return not (stat.S_ISCHR(mode) and os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev)
    except OSError:
        return False

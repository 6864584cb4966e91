"""A node agent's line to the driver that started it: what it tells in place of printing it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from phalanx.launch.failures import Failure


class DriverLine:
    """Events to the relay on the same node, which passes them on; one JSON object a line.

    Args:
        sock: A stream socket. The relay's end closes when the job is given up.
        node: This node's number in the job.
    """

    def __init__(self, sock: socket.socket, node: int) -> None:
        self._sock, self.node = sock, node
        self._rest = b""

    def tell(self, event: str, **values: Any) -> None:
        """Tell something; a driver that is gone is no error here: the relay ends this process."""
        line = json.dumps({"event": event, **values}, default=str) + "\n"
        with contextlib.suppress(OSError):
            self._sock.sendall(line.encode())

    def note(self, text: str) -> None:
        """A line for the user."""
        self.tell("note", text=text)

    def failures(self, failures: Sequence[Failure]) -> None:
        self.tell("failures", failures=[asdict(failure) for failure in failures])

    def hear(self) -> dict[str, Any] | None:
        """The next order, waiting for it; None when the job is given up."""
        while b"\n" not in self._rest:
            try:
                data = self._sock.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        order = json.loads(line)
        assert isinstance(order, dict)
        return order

    def close(self) -> None:
        """In a fork: the line belongs to the agent alone."""
        self._sock.close()

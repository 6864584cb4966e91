"""The link between a driver and the node that it started: frames over that program's stdin and stdout.

A frame is a kind (one byte), a length (four bytes) and so many bytes: ``J`` one JSON object, ``0``, ``1``,
``2`` bytes of a standard stream, ``K`` nothing, a sign of life. A shell may print what it likes before the
node speaks: the node's first frame comes after a line that no shell prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from phalanx.tools.usage import UsageMistake

Message = dict[str, Any]
Frame = tuple[str, bytes]

#: After so much silence each side takes the other for dead; a twelfth of it lies between signs of life.
SILENCE_S = 60.0
#: Output waiting to be sent at which a side reads no more of it.
FULL_BYTES = 1 << 20
_GREETING = b"\0phalanx link 1\n"
_MOST_NOISE_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
_HEADER = struct.Struct("!cI")
_READ_BYTES = 256 * 1024


def silence_limit(environ: Mapping[str, str] = os.environ) -> float:
    """The limit, or the one that PHALANX_LINK_TIMEOUT_S sets.

    >>> silence_limit({}), silence_limit({"PHALANX_LINK_TIMEOUT_S": "300"})
    (60.0, 300.0)

    Raises:
        UsageMistake: It is no time.
    """
    text = environ.get("PHALANX_LINK_TIMEOUT_S", "")
    try:
        limit = float(text or SILENCE_S)
    except ValueError:
        limit = 0.0
    if 1.0 <= limit < float("inf"):
        return limit
    raise UsageMistake(
        f"PHALANX_LINK_TIMEOUT_S={text}: not a number of seconds, 1 or more, after which a silent host is given up.",
        fix="PHALANX_LINK_TIMEOUT_S=60, or unset it",
    )


class Link:
    """One side of a link; nothing here blocks.

    >>> (mine, theirs), (theirs_too, mine_too) = os.pipe(), os.pipe()
    >>> link = Link(mine, mine_too)
    >>> _ = os.write(theirs, Link.greeting() + Link.frame("J", b'{"event": "ready"}'))
    >>> Link.message(*link.receive())
    [{'event': 'ready'}]
    >>> for fd in (mine, theirs, theirs_too, mine_too): os.close(fd)

    Args:
        read: Descriptor to read from.
        write: Descriptor to write to. Both become non-blocking.
        greeted: Whether the other side speaks frames from its first byte on.
        silence_s: What `is_silent` goes by, in seconds.
    """

    def __init__(self, read: int, write: int, *, greeted: bool = False, silence_s: float = SILENCE_S) -> None:
        self.silence_s = silence_s
        self.read_fd, self.write_fd = read, write
        for fd in (read, write):
            os.set_blocking(fd, False)
        self.is_open = True  # whether the other side may still say something
        self.noise = b""  # what came before the greeting
        self.pending_bytes = 0
        self.heard_at = self.spoke_at = time.monotonic()
        self._greeted = greeted
        self._buffer = bytearray()
        self._queue: deque[memoryview] = deque()

    @staticmethod
    def greeting() -> bytes:
        return _GREETING

    @staticmethod
    def frame(kind: str, data: bytes) -> bytes:
        return _HEADER.pack(kind.encode(), len(data)) + data

    @staticmethod
    def message(*frames: Frame) -> list[Message]:
        """The JSON objects among frames."""
        return [json.loads(data) for kind, data in frames if kind == "J"]

    # ----------------------------------------------------------------- out

    def greet(self) -> None:
        self._put(_GREETING)

    def send(self, message: Message) -> None:
        """Queue a JSON object, and pass on what can be passed on at once."""
        self.send_bytes("J", json.dumps(message).encode())

    def send_bytes(self, kind: str, data: bytes = b"") -> None:
        self._put(self.frame(kind, data))

    def beat(self) -> None:
        """A sign of life, when it is time for one."""
        if time.monotonic() - self.spoke_at >= self.silence_s / 12 and not self.pending_bytes:
            self.send_bytes("K")

    def _put(self, data: bytes) -> None:
        self._queue.append(memoryview(data))
        self.pending_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        while self._queue:
            view = self._queue[0]
            try:
                count = os.write(self.write_fd, view)
            except BlockingIOError:
                return
            except OSError:  # the other side is gone, which reading tells too
                self._queue.clear()
                self.pending_bytes = 0
                return
            self.spoke_at = time.monotonic()
            self.pending_bytes -= count
            if count == len(view):
                self._queue.popleft()
            else:
                self._queue[0] = view[count:]

    # ----------------------------------------------------------------- in

    def receive(self) -> list[Frame]:
        """The whole frames that have arrived; `is_open` turns false at the end of the stream."""
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.is_open = self.is_open and bool(data)
        self.heard_at = time.monotonic()
        self._buffer += data
        if not self._greeted and not self._find_greeting():
            return []
        return self._cut()

    def _find_greeting(self) -> bool:
        start = self._buffer.find(_GREETING)
        if start < 0:
            self.noise = bytes(self._buffer[-4096:])
            if len(self._buffer) > _MOST_NOISE_BYTES:
                del self._buffer[: -len(_GREETING)]
            return False
        self.noise = bytes(self._buffer[:start][-4096:])
        del self._buffer[: start + len(_GREETING)]
        self._greeted = True
        return True

    def _cut(self) -> list[Frame]:
        found: list[Frame] = []
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            if length > _MOST_BYTES:  # something else writes into our stream
                self.is_open = False
                return found
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            found.append((kind.decode("latin-1"), bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return found

    # ----------------------------------------------------------------- both

    def interests(self, poll: select.poll, *, read: bool = True) -> None:
        """Register with a poll what this link waits for."""
        if self.read_fd == self.write_fd:
            events = (select.POLLIN if read else 0) | (select.POLLOUT if self.pending_bytes else 0)
            poll.register(self.read_fd, events)
            return
        if read and self.is_open:
            poll.register(self.read_fd, select.POLLIN)
        if self.pending_bytes:
            poll.register(self.write_fd, select.POLLOUT)

    @property
    def is_silent(self) -> bool:
        """Whether nothing has been heard for too long."""
        return time.monotonic() - self.heard_at > self.silence_s

    def close(self) -> None:
        self.is_open = False
        for fd in {self.read_fd, self.write_fd}:
            with contextlib.suppress(OSError):
                os.close(fd)

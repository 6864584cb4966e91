"""Signals to the launcher: noted by a handler, acted on by the event loop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

#: Two interrupts closer than this are one Ctrl-C: wrappers (make, uv) pass on what the terminal sent already.
_SAME_KEYSTROKE_S = 0.2


_NO_END = (signal.SIGWINCH, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)
T = TypeVar("T")


class Interrupted(BaseException):
    """A signal arrived while the launcher waits where its event loop does not run."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """Notes signals and makes a descriptor readable.

    Signals that were ignored when the command was started stay ignored (``nohup``, ``&``).

    Args:
        signums: Signals to note.
    """

    def __init__(self, signums: Sequence[int]) -> None:
        self.count = 0  # of those that ask for the end
        self.handled = [s for s in signums if signal.getsignal(s) != signal.SIG_IGN]
        self._arrived: deque[int] = deque()
        self._times: deque[float] = deque([0.0, 0.0], maxlen=2)
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous: dict[int, object] = {}
        self._previous_wakeup = -1

    def install(self) -> None:
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous = {signum: signal.signal(signum, self._note) for signum in self.handled}

    def remove(self) -> None:
        """Put the handlers back; safe to call twice."""
        if self._previous:
            signal.set_wakeup_fd(self._previous_wakeup)
            for signum, handler in self._previous.items():
                signal.signal(signum, handler)  # type: ignore[arg-type]
            self._previous = {}
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptors: in a fork, or at the end."""
        os.close(self._read)
        os.close(self._write)

    def _note(self, signum: int, frame: object) -> None:
        if signum not in _NO_END:
            self.count += 1
            self._times.append(time.monotonic())
        self._arrived.append(signum)

    def fileno(self) -> int:
        return self._read

    @property
    def is_deliberate(self) -> bool:
        """Whether the newest interrupt is another keystroke than the one before it."""
        return self._times[1] - self._times[0] >= _SAME_KEYSTROKE_S

    def arrived(self) -> list[int]:
        """Signals since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 512):
                pass
        found = []
        while self._arrived:
            found.append(self._arrived.popleft())
        return found

    def call(self, function: Callable[[], T]) -> T:
        """Call a function that may block outside of Python; a signal that asks for the end raises `Interrupted`.

        torch's store waits for other nodes in C++, where no Python handler runs: so it waits in a
        thread, and is left there when a signal arrives.
        """
        outcome: list[T] = []
        error: list[BaseException] = []

        def target() -> None:
            try:
                outcome.append(function())
            except BaseException as raised:
                error.append(raised)
            with contextlib.suppress(OSError):
                os.write(self._write, b"\0")

        thread = threading.Thread(target=target, daemon=True, name="phalanx-rendezvous")
        thread.start()
        while thread.is_alive():
            select.select([self._read], [], [], 1.0)
            for signum in self.arrived():
                if signum not in _NO_END:
                    raise Interrupted(signum)
            thread.join(0.01)
        if error:
            raise error[0]
        return outcome[0]

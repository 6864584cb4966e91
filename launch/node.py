"""``python -m phalanx.launch.node``: what a driver starts on each host, never a user.

The relay is a small process between the driver's link and the node agent (`phalanx.launch.node_agent`), a
child of it: it looks at the host while the agent imports torch, passes output and events up, orders and
signals down, and ends the agent when the link is cut, however that happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time

from phalanx.launch.node_environ import job_environ
from phalanx.launch.node_link import FULL_BYTES, Link, Message
from phalanx.launch.preflight import Doorbell, host_facts, reach

#: What the agent may take to end beyond the ranks' own grace period.
_END_S = 5.0
_READ_BYTES = 64 * 1024
#: An interrupt sooner after another than this would be taken for the same keystroke.
_KEYSTROKE_S = 0.25


class Relay:
    """Serves one driver over one link, and one agent."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._agent: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._events = b""
        self._streams: dict[int, str] = {}  # descriptor -> kind of frame
        self._terminal = -1  # the master of the agent's terminal, where it has one
        self._stdin = -1
        self._input = b""  # for the agent's stdin, one frame at a time
        self._doorbell: Doorbell | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._kill_at: float | None = None
        self._asked_to_end = False
        self._suspended = False
        self._interrupted_at = 0.0
        self._grace_s = 10.0
        self._job: Message = {}

    def serve(self) -> int:
        """Serve until the agent has ended and that was told, or the driver is gone."""
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
            signal.signal(signum, self._on_signal)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while True:
            self._turn()
            if self._agent is not None and self._agent.poll() is not None and not self._streams:
                return self._say_ended(self._agent.returncode)
            if self._agent is None and not self._link.is_open:
                return 0

    # ----------------------------------------------------------------- the loop

    def _turn(self) -> None:
        poll = select.poll()
        self._link.interests(poll)
        poll.register(self._wake_read, select.POLLIN)
        if self._link.pending_bytes < FULL_BYTES:
            for fd in self._streams:
                poll.register(fd, select.POLLIN)
        if self._control is not None:
            poll.register(self._control, select.POLLIN)
        if self._doorbell is not None:
            poll.register(self._doorbell, select.POLLIN)
        if self._input and self._stdin >= 0:
            poll.register(self._stdin, select.POLLOUT)
        for fd, _ in poll.poll(500):
            self._handle(fd)
        self._keep_time()

    def _handle(self, fd: int) -> None:
        if fd == self._wake_read:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 512)
        elif fd in self._streams:
            self._pass_up(fd)
        elif self._control is not None and fd == self._control.fileno():
            self._read_events()
        elif self._doorbell is not None and fd == self._doorbell.fileno():
            self._doorbell.answer()
        elif fd == self._stdin:
            self._write_input()
        else:
            self._read_link()
            self._link.flush()

    def _keep_time(self) -> None:
        self._link.beat()
        if self._link.is_open and self._link.is_silent and not self._suspended:
            self._link.is_open = False
        if not self._link.is_open:
            self._end_agent(self._grace_s + _END_S)
        if self._kill_at is not None and time.monotonic() >= self._kill_at and self._agent is not None:
            self._kill_at = None
            self._agent.kill()  # its guardian ends all that is left

    def _on_signal(self, signum: int, frame: object) -> None:
        if signum != signal.SIGCHLD:  # somebody on this host ends the job's part on it, as Slurm does
            self._end_agent(self._grace_s + _END_S)

    # ----------------------------------------------------------------- orders

    def _read_link(self) -> None:
        for kind, data in self._link.receive():
            if kind == "J":
                self._obey(json.loads(data))
            elif kind == "0":
                self._input += data
                if not data or self._stdin < 0:
                    self._close_stdin()

    def _obey(self, order: Message) -> None:
        kind = order["order"]
        if kind == "job":
            self._take_job(order)
        elif kind == "reach":
            found = reach(order["addresses"], order["port"], order["word"])
            self._link.send({"event": "reached", "answers": found})
        elif kind == "go":
            self._close_doorbell()
            self._tell_agent(order)
        elif kind == "signal":
            self._signal_agent(order["signum"])
        elif kind == "suspend":
            self._suspended = order["on"]
        elif kind == "size":
            self._resize(order["size"])
        elif kind == "end":
            self._end_agent(order["after_s"])

    def _take_job(self, job: Message) -> None:
        self._job = job
        self._grace_s = job["grace_s"]
        self._link.silence_s = job["silence_s"]
        facts = host_facts(job)
        if job["node"] == 0 and job["doorbell"]:
            try:
                self._doorbell = Doorbell(job["port"], job["word"])
                facts["port"] = self._doorbell.port
            except OSError as error:
                facts["port_problem"] = error.strerror or str(error)
        if facts["folder_problem"] is None:
            try:
                self._start_agent(job)
            except OSError as error:
                facts["folder_problem"] = error.strerror or str(error)
        self._link.send({"event": "host", **facts})

    def _start_agent(self, job: Message) -> None:
        ours, theirs = socket.socketpair()
        if job["size"] is None:
            (out_read, out), (err_read, err) = os.pipe(), os.pipe()
            self._streams = {out_read: "1", err_read: "2"}
        else:
            self._terminal, out = os.openpty()
            err = os.dup(out)
            _make_raw(out)
            self._streams = {self._terminal: "1"}
            self._resize(job["size"])
        if job["stdin"]:
            stdin, self._stdin = os.pipe()
            os.set_blocking(self._stdin, False)
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        # Its own session: the driver alone says what a Ctrl-C is.
        words = [sys.executable, "-m", "phalanx.launch.node_agent", str(theirs.fileno()), str(os.getpid())]
        self._agent = subprocess.Popen(
            words,
            cwd=job["folder"],
            env=job_environ(job["environ"], os.environ),
            stdin=stdin,
            stdout=out,
            stderr=err,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        for fd in (stdin, out, err):
            os.close(fd)
        theirs.close()
        self._control = ours
        self._tell_agent(job)

    def _tell_agent(self, order: Message) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.sendall(json.dumps(order).encode() + b"\n")

    def _signal_agent(self, signum: int) -> None:
        if self._agent is None:
            return
        if signum == signal.SIGINT:
            pause_s = self._interrupted_at + _KEYSTROKE_S - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            self._interrupted_at = time.monotonic()
        self._agent.send_signal(signum)

    def _end_agent(self, after_s: float) -> None:
        """Ask the agent to end its ranks, and see to it that it does within ``after_s``."""
        if self._agent is None:
            self._link.is_open = False
            return
        limit = time.monotonic() + after_s
        if not self._asked_to_end:
            self._asked_to_end = True
            self._agent.send_signal(signal.SIGTERM)
            self._kill_at = limit
        elif self._kill_at is not None:
            self._kill_at = min(self._kill_at, limit)

    # ----------------------------------------------------------------- streams

    def _pass_up(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except OSError:  # a terminal whose last writer is gone
            data = b""
        if data:
            if self._link.is_open:
                self._link.send_bytes(self._streams[fd], data)
            return
        del self._streams[fd]
        os.close(fd)

    def _read_events(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._control.close()
            self._control = None
            return
        *lines, self._events = (self._events + data).split(b"\n")
        for line in lines:
            self._link.send_bytes("J", line)

    def _write_input(self) -> None:
        try:
            count = os.write(self._stdin, self._input)
        except BlockingIOError:
            return
        except OSError:  # rank 0 reads no more
            count = len(self._input)
        self._input = self._input[count:]
        if not self._input:
            self._link.send({"event": "input-taken"})

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
        self._stdin, self._input = -1, b""

    def _resize(self, size: list[int]) -> None:
        if self._terminal < 0:
            return
        import fcntl
        import termios

        with contextlib.suppress(OSError):
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        if self._agent is not None:
            self._agent.send_signal(signal.SIGWINCH)

    def _close_doorbell(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None

    def _say_ended(self, code: int) -> int:
        while self._control is not None:
            self._read_events()
        self._link.send({"event": "ended", "exit_code": code})
        deadline = time.monotonic() + _END_S
        while self._link.pending_bytes and self._link.is_open and time.monotonic() < deadline:
            poll = select.poll()
            self._link.interests(poll)
            poll.poll(500)
            self._read_link()
            self._link.flush()
        return 0


def _make_raw(terminal: int) -> None:
    """Newlines stay newlines, nothing is echoed: the user's own terminal does all that."""
    import tty

    tty.setraw(terminal)


def main() -> int:
    """Serve the driver on stdin and stdout."""
    read, write = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what is printed by mistake does not get between the frames
    link = Link(read, write, greeted=True)
    link.greet()
    return Relay(link).serve()


if __name__ == "__main__":
    sys.exit(main())

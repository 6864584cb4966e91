"""What ranks print: kept in one log per rank, and shown.

Every rank writes into pipes (rank 0 of a run on a terminal: a pseudo-terminal), read here. Bytes go
to the log as they were written, and to this process's own stdout or stderr either as they are or as
whole lines that start with ``[rank R] ``. Nothing here blocks: a reader that does not keep up slows
down the ranks it is shown, as it would have slowed down the script itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import stat
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.launch.spec import Show

_READ_BYTES = 256 * 1024
_PIPE_ATOMIC_BYTES = 4096  # a pipe that poll calls writable takes this much without blocking
_FULL_BYTES, _EMPTY_BYTES = 1 << 20, 1 << 18  # pending output at which reading pauses, and goes on
_LONG_LINE_BYTES = 1 << 20
_TAIL_BYTES = 64 * 1024
_BAR_INTERVAL_S = 10.0  # a progress bar without newlines is shown this often where it is no terminal

Mode = Literal["raw", "lines", "hidden"]


class Sink:
    """This process's stdout or stderr, written to only when that does not block."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_open = True
        self.closed_by_reader = False
        self.pending_bytes = 0
        self._queue: deque[memoryview] = deque()
        self._at_line_start = True
        try:
            self._limit = _PIPE_ATOMIC_BYTES if not stat.S_ISREG(os.fstat(fd).st_mode) else _FULL_BYTES
        except OSError:  # started without this descriptor
            self.is_open = False

    def reopen(self) -> None:
        """Get a non-blocking descriptor of our own for a pipe or terminal.

        The flag belongs to what is opened, so the one that others share must not be changed. Where
        opening it again is not possible, small writes after a poll do instead.
        """
        mode = os.fstat(self.fd).st_mode if self.is_open else 0
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            with contextlib.suppress(OSError):
                self.fd = os.open(
                    f"/proc/self/fd/{self.fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                )
                self._limit = _FULL_BYTES

    def write(self, data: bytes, *, whole_lines: bool) -> None:
        """Queue bytes, and pass on what can be passed on at once."""
        if not self.is_open or not data:
            return
        if whole_lines and not self._at_line_start:
            data = b"\n" + data
        self._at_line_start = data[-1:] == b"\n"
        self._queue.append(memoryview(data))
        self.pending_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self._queue:
            ready = poll.poll(0)
            if not ready:
                return
            view = self._queue[0]
            try:
                count = os.write(self.fd, view[: self._limit])
            except BlockingIOError:  # somebody made it non-blocking
                return
            except OSError as error:
                self.closed_by_reader = error.errno == errno.EPIPE
                self.is_open = False
                self._queue.clear()
                self.pending_bytes = 0
                return
            self.pending_bytes -= count
            if count == len(view):
                self._queue.popleft()
            else:
                self._queue[0] = view[count:]


class LineAssembler:
    """Turns a stream into whole lines with a prefix.

    Of what a carriage return overwrites (a progress bar) only the last state is shown, with the
    newline that ends it or every ten seconds.

    >>> lines = LineAssembler(b"[rank 1] ")
    >>> lines.feed(b"one\\ntw", 0.0), lines.feed(b"o\\n", 0.0), lines.feed(b"10%\\r20%\\r30%\\n", 0.0)
    (b'[rank 1] one\\n', b'[rank 1] two\\n', b'[rank 1] 30%\\n')
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = bytearray()
        self._bar_shown: float | None = None

    def feed(self, data: bytes, now: float) -> bytes:
        """Add bytes read at ``now`` (monotonic seconds); returns what is to be shown."""
        cut = data.rfind(b"\n") + 1
        shown = b""
        if cut:
            shown = self._format(bytes(self._rest) + data[:cut])
            self._rest = bytearray(data[cut:])
            self._bar_shown = None
        else:
            self._rest += data
        return shown + self._overlong(now)

    def finish(self) -> bytes:
        """The last line, if it has no newline."""
        rest, self._rest = bytes(self._rest), bytearray()
        return self._format(rest + b"\n") if rest else b""

    def _format(self, complete: bytes) -> bytes:
        if b"\r" in complete:
            lines = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in complete[:-1].split(b"\n"))
            complete = b"\n".join(lines) + b"\n"
        return self._prefix + complete[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n"

    def _overlong(self, now: float) -> bytes:
        if b"\r" in self._rest:
            bar = bytes(self._rest).rstrip(b"\r").rpartition(b"\r")[2]
            self._rest = bytearray(bar + b"\r") if self._rest.endswith(b"\r") else bytearray(b"\r" + bar)
            if self._bar_shown is None:
                self._bar_shown = now
            elif now - self._bar_shown >= _BAR_INTERVAL_S:
                self._bar_shown = now
                return self._format(bar + b"\n")
        elif len(self._rest) > _LONG_LINE_BYTES:
            return self.finish()
        return b""


@dataclass
class _Log:
    """One rank's log file, and its last bytes in memory for the report."""

    path: Path | None
    fd: int = -1
    tail: deque[bytes] = field(default_factory=deque)
    tail_bytes: int = 0

    def keep(self, data: bytes) -> None:
        self.tail.append(data[-_TAIL_BYTES:])
        self.tail_bytes += len(self.tail[-1])
        while self.tail_bytes - len(self.tail[0]) >= _TAIL_BYTES:
            self.tail_bytes -= len(self.tail.popleft())
        if self.fd >= 0:
            view = memoryview(data)
            while view:
                view = view[os.write(self.fd, view) :]


@dataclass
class _Channel:
    """One stream of one rank: where it is read, and where it goes."""

    fd: int
    log: _Log
    sink: Sink
    mode: Mode
    lines: LineAssembler


class Output:
    """The streams of all local ranks over all attempts of a run.

    Args:
        log_dir: Folder for the logs; None keeps none (it could not be made).
        local_world_size: Ranks on this node.
        show: Which ranks are shown: ``auto`` is rank 0 on a terminal and all otherwise.
        shown_only: Of the shown local ranks, only these; None means all of them.
        warn: Called with a line for the user, once, when a log cannot be written.
        node: This node's number where a driver shows several: it comes before the rank.
    """

    def __init__(
        self,
        log_dir: Path | None,
        local_world_size: int,
        *,
        show: Show,
        shown_only: Sequence[int] | None,
        warn: Callable[[str], None],
        node: int | None = None,
    ) -> None:
        self._node = node
        self._log_dir = log_dir
        self._show = show
        self._shown_only = shown_only
        self._warn: Callable[[str], None] | None = warn
        self._local_world_size = local_world_size
        self._on_terminal = _is_terminal(1)
        self._stdout = Sink(1)
        self._stderr = self._stdout if self._on_terminal and _same_terminal(1, 2) else Sink(2)
        for sink in {self._stdout, self._stderr}:
            sink.reopen()
        self._terminal_settings = _terminal_settings()
        self._channels: dict[int, _Channel] = {}
        self._logs: dict[int, _Log] = {}  # by local rank
        self._terminals: list[int] = []  # pty masters, for the window size
        self._paused = False

    # ----------------------------------------------------------------- an attempt

    def attempt_folder(self, attempt: int) -> Path | None:
        """The folder of an attempt (from 1), made; None where logs cannot be kept."""
        if self._log_dir is None:
            return None
        folder = self._log_dir / f"attempt-{attempt}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._complain(folder, error)
            return None
        return folder

    def open_rank(self, attempt: int, local_rank: int, rank: int, world_size: int) -> list[int]:
        """Make the streams of a rank; returns stdin, stdout and stderr, for the caller to close."""
        log = self._logs[local_rank] = self._open_log(attempt, rank)
        mode = self._mode(local_rank, world_size) if self._node is None else self._mode_of(local_rank, rank)
        prefix = (f"[rank {rank}] " if self._node is None else f"[n{self._node} rank {rank}] ").encode()
        stdin = _stdin() if local_rank == 0 and rank == 0 else os.open(os.devnull, os.O_RDONLY)
        ends = [stdin]
        terminal: int | None = None
        for fd, sink in ((1, self._stdout), (2, self._stderr)):
            if mode == "raw" and self._on_terminal and _is_terminal(fd):
                if terminal is None:
                    master, terminal = self._open_terminal()
                    self._channels[master] = _Channel(master, log, sink, mode, LineAssembler(prefix))
                    ends.append(terminal)
                else:
                    ends.append(os.dup(terminal))
                continue
            theirs_read, ours_write = os.pipe2(os.O_CLOEXEC)
            self._channels[theirs_read] = _Channel(theirs_read, log, sink, mode, LineAssembler(prefix))
            ends.append(ours_write)
        return ends

    def _mode(self, local_rank: int, world_size: int) -> Mode:
        show = self._show
        if show == "auto":
            show = "rank0" if self._on_terminal else "all"
        if show == "rank0" and local_rank != 0:
            return "hidden"
        if self._shown_only is not None and local_rank not in self._shown_only:
            return "hidden"
        if world_size == 1 or show == "rank0" or (self._on_terminal and local_rank == 0):
            return "raw"
        return "lines"

    def _mode_of(self, local_rank: int, rank: int) -> Mode:
        """On one of several nodes: rank 0 of the job alone, as it is, or every rank in whole lines."""
        if self._shown_only is not None and local_rank not in self._shown_only:
            return "hidden"
        if self._show == "rank0":
            return "raw" if rank == 0 else "hidden"
        return "lines"

    def _open_log(self, attempt: int, rank: int) -> _Log:
        folder = self.attempt_folder(attempt)
        if folder is None or self._log_dir is None:
            return _Log(None)
        path, newest = folder / f"rank-{rank}.log", self._log_dir / f"rank-{rank}.log"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._complain(path, error)
            return _Log(None)
        with contextlib.suppress(OSError):  # a file system without symbolic links
            newest.unlink(missing_ok=True)
            newest.symlink_to(Path(folder.name, path.name))
        return _Log(newest, fd)

    def _open_terminal(self) -> tuple[int, int]:
        master, slave = os.openpty()
        settings = termios.tcgetattr(1)
        # Newlines stay as written: the user's terminal turns them into carriage return and newline.
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self._terminals.append(master)
        self.resize()
        return master, slave

    def resize(self) -> None:
        """Pass the size of the user's terminal on."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(1, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            for master in self._terminals:
                fcntl.ioctl(master, termios.TIOCSWINSZ, size)

    def restore_terminal(self) -> None:
        """Undo what a rank that was ended at a prompt left behind (no echo, no line editing)."""
        now = _terminal_settings()
        if now is not None and self._terminal_settings not in (None, now):
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, self._terminal_settings)

    # ----------------------------------------------------------------- the event loop's part

    @property
    def closed_by_reader(self) -> bool:
        """Whether whoever read our stdout is gone (``| head -1``)."""
        return self._stdout.closed_by_reader

    @property
    def is_open(self) -> bool:
        """Whether a rank, or something it left behind, can still write."""
        return bool(self._channels)

    @property
    def is_shown(self) -> bool:
        """Whether all that was read has been passed on."""
        return not (self._stdout.pending_bytes or self._stderr.pending_bytes)

    def interests(self) -> Mapping[int, int]:
        """Descriptors to poll, with the events to wait for."""
        wanted = {}
        for fd, channel in self._channels.items():
            pending, limit = channel.sink.pending_bytes, _EMPTY_BYTES if self._paused else _FULL_BYTES
            if channel.mode == "hidden" or pending < limit:
                wanted[fd] = select.POLLIN
        self._paused = len(wanted) < len(self._channels)
        wanted |= {s.fd: select.POLLOUT for s in (self._stdout, self._stderr) if s.pending_bytes}
        return wanted

    def handle(self, fd: int) -> None:
        """Serve a descriptor of `interests` that poll named."""
        if fd in (self._stdout.fd, self._stderr.fd):
            (self._stdout if fd == self._stdout.fd else self._stderr).flush()
            return
        channel = self._channels[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except OSError:  # a pty whose last writer is gone
            data = b""
        if not data:
            self._close(channel)
            return
        try:
            channel.log.keep(data)
        except OSError as error:
            self._complain(channel.log.path, error)
        if channel.mode == "raw":
            channel.sink.write(data, whole_lines=False)
        elif channel.mode == "lines":
            channel.sink.write(channel.lines.feed(data, time.monotonic()), whole_lines=True)

    def _close(self, channel: _Channel) -> None:
        del self._channels[channel.fd]
        if channel.fd in self._terminals:
            self._terminals.remove(channel.fd)
        os.close(channel.fd)
        if channel.mode == "lines":
            channel.sink.write(channel.lines.finish(), whole_lines=True)

    def drain(self, limit_s: float) -> None:
        """Pass on what is queued, for at most ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        while not self.is_shown and time.monotonic() < deadline:
            time.sleep(0.01)
            self._stdout.flush()
            self._stderr.flush()

    def close_rank_streams(self) -> None:
        """End the attempt: close what is still open, and the logs."""
        for channel in list(self._channels.values()):
            self._close(channel)
        for log in self._logs.values():
            if log.fd >= 0:
                os.close(log.fd)
                log.fd = -1

    # ----------------------------------------------------------------- for reports

    def say(self, text: str) -> None:
        """Queue lines of the launcher's own for stderr, after what was shown so far."""
        self._stderr.write(text.rstrip("\n").encode(errors="backslashreplace") + b"\n", whole_lines=True)

    def tail(self, local_rank: int) -> str:
        """The last lines that a rank of the newest attempt printed."""
        log = self._logs.get(local_rank)
        return b"".join(log.tail).decode(errors="replace") if log else ""

    def log_path(self, local_rank: int) -> Path | None:
        log = self._logs.get(local_rank)
        return log.path if log else None

    def _complain(self, path: Path | None, error: OSError) -> None:
        if self._warn is not None:
            warn, self._warn = self._warn, None
            warn(
                f"phalanx run: warning: {path}: {error.strerror}; the run goes on, its logs will be incomplete."
            )


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _same_terminal(first: int, second: int) -> bool:
    return _is_terminal(second) and os.fstat(first).st_rdev == os.fstat(second).st_rdev


def _is_ours(terminal: int) -> bool:
    """Whether we are the terminal's foreground job; another one's settings and input are not ours."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False


def _terminal_settings() -> list[Any] | None:
    """The settings of the terminal on stdin."""
    with contextlib.suppress(OSError, termios.error):
        if _is_ours(0):
            return termios.tcgetattr(0)
    return None


def _stdin() -> int:
    """A copy of our stdin for rank 0; /dev/null where reading it is not ours to do."""
    if not _is_terminal(0) or _is_ours(0):
        return os.dup(0)
    return os.open(os.devnull, os.O_RDONLY)


def open_missing_descriptors() -> None:
    """Put /dev/null where we were started without stdin, stdout or stderr: nothing else may get their numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)


def flush_standard_streams() -> None:
    """Write out what Python holds back, so that a fork does not write it twice."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

"""The guardian: the process between the launcher and the ranks that lets no descendant outlive a run.

It is forked off the launcher once torch is imported and before any thread exists, so that ranks can
be forked from it at any time. It is a sub-reaper in a session of its own, and does nothing but start
ranks, pass signals on, wait for ends and report them with a time stamp. When the launcher asks for a
stop, or ends in whatever way (the socket closes), it kills until no descendant is left.

Messages are JSON over a ``SOCK_SEQPACKET`` pair: requests ``start`` (with the rank's three
descriptors), ``signal`` and ``stop``; answers ``started``, ``exit`` and ``stopped``.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from phalanx.launch import processes, worker
from phalanx.launch.spec import WorkerMain

#: Signals that the launcher passes on; the guardian itself ends only when its socket closes.
_DEAF_TO = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
)
#: Seconds that helpers of a rank (multiprocessing's resource tracker) get to clean up after it.
HELPER_PATIENCE_S = 0.3
_MESSAGE_BYTES = 256 * 1024

Message = dict[str, Any]


def fork() -> int:
    """``os.fork`` without Python 3.12's warning about threads, for callers that know theirs.

    The only threads here are those of a BLAS library, which puts them to rest around a fork.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


def _receive(sock: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message, or None when the other side is gone."""
    try:
        data, ancillary, _, _ = sock.recvmsg(
            _MESSAGE_BYTES, socket.CMSG_SPACE(3 * 4), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None, []
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return (json.loads(data) if data else None), list(fds)


class Guardian:
    """The guardian's own side: serves requests until the socket closes."""

    def __init__(
        self,
        sock: socket.socket,
        plan: worker.WorkerPlan,
        *,
        preload: bool,
        signals: worker.SignalState,
        handled: Sequence[int],
    ) -> None:
        self._sock = sock
        self._plan = plan
        self._preload = preload
        self._signals = signals
        self._handled = tuple({*handled, *_DEAF_TO, signal.SIGCHLD})
        self._ranks: dict[int, int] = {}  # process id -> local rank, of ranks that have not ended
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> WorkerMain:
        """Serve until the launcher is gone, then end this process; returns only in a new rank."""
        os.setsid()
        processes.become_subreaper()
        processes.set_process_name("phalanx-guard")
        for signum in _DEAF_TO:
            signal.signal(signum, lambda *_: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signals.blocked)
        gc.freeze()  # ranks share these pages until they write to them, and the collector would
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake_read:
                    self._drain_wakeups()
                    self._reap()
                    continue
                message, fds = _receive(self._sock)
                if message is None:
                    processes.kill_descendants(self._reap, patience_s=HELPER_PATIENCE_S)
                    os._exit(0)
                rank = self._answer(message, fds)
                if rank is not None:
                    return rank

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 512):
                pass

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: the next receive will say so
            _send(self._sock, message)

    def _reap(self) -> bool:
        """Collect every process that has ended, and report the ranks; returns whether a child is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            local_rank = self._ranks.pop(pid, None)
            if local_rank is not None:
                self._tell(
                    {
                        "event": "exit",
                        "local_rank": local_rank,
                        "pid": pid,
                        "exit_code": os.waitstatus_to_exitcode(status),
                        "time": time.time(),
                        "monotonic_ns": time.monotonic_ns(),
                        "max_rss_bytes": usage.ru_maxrss * 1024,
                    }
                )

    def _answer(self, message: Message, fds: list[int]) -> WorkerMain | None:
        if message["request"] == "start":
            return self._start(message["local_rank"], message["environ"], fds)
        if message["request"] == "signal":
            for pid in self._ranks:
                self._signal(pid, message["signum"], message["careful"])
        elif message["request"] == "stop":
            for pid in self._ranks:
                processes.send_signal(pid, signal.SIGKILL)
            left = processes.kill_descendants(self._reap, patience_s=HELPER_PATIENCE_S)
            self._tell({"event": "stopped", "left": left})
        return None

    def _signal(self, pid: int, signum: int, careful: bool) -> None:
        # A shell waits for its child before it acts on a signal: the child must get it too.
        targets = [pid, *processes.descendants(pid)] if self._plan.kind == "command" else [pid]
        if careful:
            targets = [target for target in targets if processes.handles_signal(target, signum)]
            if not targets:
                self._tell({"event": "unheard", "local_rank": self._ranks[pid], "signum": signum})
        for target in targets:
            processes.send_signal(target, signum)

    def _start(self, local_rank: int, environ: Mapping[str, str], streams: list[int]) -> WorkerMain | None:
        guardian = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = fork()
        except OSError as error:  # a limit on processes or memory
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            self._tell({"event": "cannot-start", "error": error.strerror})
            return None
        if pid == 0:
            private = [self._sock.detach(), self._wake_read, self._wake_write]
            worker.become_worker(guardian, streams, private, environ, self._signals, self._handled)
            args = tuple(arg.replace("${local_rank}", str(local_rank)) for arg in self._plan.args)
            plan = worker.WorkerPlan(**{**vars(self._plan), "args": args})
            if self._preload and plan.kind != "command":
                processes.set_process_name("python")
                return partial(worker.main, plan)
            worker.exec_worker(plan)
        self._ranks[pid] = local_rank
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for fd in streams:
            os.close(fd)
        self._tell({"event": "started", "local_rank": local_rank, "pid": pid})
        return None


class GuardianHandle:
    """The launcher's side of a guardian.

    ``fork_guardian`` makes one. All methods are quick; what the guardian has to say is read with
    `events` once `fileno` is readable. A guardian that is gone shows as the event ``{"event": "gone"}``.
    """

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._sock = sock
        self.pid = pid

    def fileno(self) -> int:
        return self._sock.fileno()

    def start(self, local_rank: int, environ: Mapping[str, str], streams: Sequence[int]) -> None:
        self._request({"request": "start", "local_rank": local_rank, "environ": dict(environ)}, streams)

    def signal(self, signum: int, *, careful: bool = False) -> None:
        """Send a signal to every rank; ``careful`` leaves out ranks that it would end."""
        self._request({"request": "signal", "signum": int(signum), "careful": careful})

    def stop(self) -> None:
        """Kill every rank and all that descends from them; the event ``stopped`` follows."""
        self._request({"request": "stop"})

    def _request(self, message: Message, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(ConnectionError):  # its end is told by `events`
            _send(self._sock, message, fds)

    def events(self) -> list[Message]:
        """What has arrived; does not block."""
        found: list[Message] = []
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while poll.poll(0):
            message, _ = _receive(self._sock)
            if message is None:
                return [*found, {"event": "gone"}]
            found.append(message)
        return found

    def close(self, limit_s: float = 40.0) -> bool:
        """Let the guardian clean up and end; False when it had to be killed, or was already gone."""
        self._sock.close()
        deadline = time.monotonic() + limit_s
        pause_s = 0.0005
        while True:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid:
                return status == 0
            if time.monotonic() > deadline:
                processes.send_signal(self.pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)


def fork_guardian(
    plan: worker.WorkerPlan,
    *,
    preload: bool,
    signals: worker.SignalState,
    handled: Sequence[int],
    in_child: Callable[[], None],
) -> GuardianHandle | WorkerMain:
    """Fork the guardian; called with every signal blocked, from a process without threads.

    Returns the handle in the launcher, and in each rank, forked later, what that rank runs.

    Args:
        handled: Signals for which the launcher has set handlers.
        in_child: Called in the guardian first: closes what belongs to the launcher alone.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = fork()
    if pid == 0:
        ours.close()
        in_child()
        try:
            return Guardian(theirs, plan, preload=preload, signals=signals, handled=handled).serve()
        except BaseException:
            if theirs.fileno() < 0:  # in a rank's process: an error like any other
                raise
            os._exit(70)
    theirs.close()
    return GuardianHandle(ours, pid)

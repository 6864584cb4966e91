"""Probes in processes of their own: one that crashes, hangs or sleeps in the kernel costs its answer, no more.

A child writes JSON objects, one a line, so that what it found before it died is kept. A child that is over
its time is killed and never waited for: one that hangs in a driver call cannot be killed at all, and a
cluster's prolog must end all the same. Children hold none of this process's streams, for the same reason:
whoever reads our output waits until the last holder of the pipe is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Partial = dict[str, Any]  # a part of the facts, in their JSON form
_STDERR_KEPT = 16_384
_PR_SET_PDEATHSIG = 1
_EXEC_FAILED = 127
_TICK_S = 0.1
_DYING_S = 0.1  # for one that was killed; one that sleeps in the kernel does not die


@dataclass(kw_only=True)
class Child:
    """A running probe."""

    name: str
    pid: int
    out: int
    err: int
    deadline: float
    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    status: int | None = None  # from waitpid; None while it runs, and for one that was given up
    timed_out: bool = False

    def answers(self) -> Iterator[Partial]:
        """The JSON objects that it wrote; a line that was cut short is left out."""
        for line in bytes(self.output).split(b"\n"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it, as long as that was not ours."""
        if self.timed_out or self.status is None or not os.WIFSIGNALED(self.status):
            return None
        number = os.WTERMSIG(self.status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"

    @property
    def exit_code(self) -> int | None:
        return os.WEXITSTATUS(self.status) if self.status is not None and os.WIFEXITED(self.status) else None

    def error_text(self) -> str:
        """The end of what it wrote to stderr."""
        return bytes(self.errors[-_STDERR_KEPT:]).decode(errors="replace").strip()


def start_function(name: str, function: Callable[[], Partial | None], timeout_s: float) -> Child:
    """Run ``function`` in a forked child; what it returns is the answer. This process must have no threads."""

    def run(out: int) -> None:
        answer = function()
        if answer is not None:
            _write(out, json.dumps(answer).encode() + b"\n")

    return _fork(name, run, timeout_s)


def start_program(
    name: str, words: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None
) -> Child:
    """Run a program; its standard output is the answer."""

    def run(out: int) -> None:
        os.dup2(out, 1)
        try:
            os.execvpe(words[0], list(words), dict(os.environ if environ is None else environ))
        except OSError as error:
            os.write(2, f"{words[0]}: {error.strerror}\n".encode())
            os._exit(_EXEC_FAILED)

    return _fork(name, run, timeout_s)


def collect(children: Iterable[Child], waiting: Callable[[list[str]], None] | None = None) -> None:
    """Read every child to its end or its deadline; those that are over it are killed.

    ``waiting`` is called ten times a second with the names of those that still run: no thread is needed for it.
    """
    running = list(children)
    with selectors.PollSelector() as selector:  # needs no descriptor
        for child in running:
            selector.register(child.out, selectors.EVENT_READ, (child, child.output))
            selector.register(child.err, selectors.EVENT_READ, (child, child.errors))
        while selector.get_map():
            reading = {key.data[0].pid: key.data[0] for key in selector.get_map().values()}.values()
            left = min(child.deadline for child in reading) - time.monotonic()
            if waiting is not None:
                waiting([child.name for child in reading])
                left = min(left, _TICK_S)
            for key, _ in selector.select(max(left, 0)):
                data = os.read(key.fd, 65536)
                key.data[1].extend(data)
                if not data:
                    _close(selector, key.fd)
            for child in reading:
                if child.deadline <= time.monotonic():
                    _close(selector, child.out)
                    _close(selector, child.err)
    for child in running:
        _end(child)


def stop(children: Iterable[Child]) -> None:
    """Kill whatever still runs, as after Ctrl-C."""
    for child in children:
        if child.status is None:
            _kill(child)


def _close(selector: selectors.BaseSelector, handle: int) -> None:
    with contextlib.suppress(KeyError, ValueError):  # closed already
        selector.unregister(handle)
        os.close(handle)


def _end(child: Child) -> None:
    """Its status; a moment is left to it between its last word and its end."""
    until = min(child.deadline, time.monotonic() + 1.0)
    while child.status is None and not _reap(child):
        if not child.timed_out and time.monotonic() >= until:
            child.timed_out = True
            until = time.monotonic() + _DYING_S
            _kill(child)
        elif time.monotonic() >= until:
            return
        time.sleep(0.001)
    _kill(child)  # what it started and left


def _reap(child: Child) -> bool:
    if child.status is None:
        try:
            pid, status = os.waitpid(child.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = child.pid, 0
        if pid:
            child.status = status
    return child.status is not None


def _kill(child: Child) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)


def _fork(name: str, run: Callable[[int], None], timeout_s: float) -> Child:
    with contextlib.ExitStack() as opened:  # closed again when there are no more descriptors or processes
        out, out_end = _pipe(opened)
        err, err_end = _pipe(opened)
        deadline = time.monotonic() + timeout_s
        pid = os.fork()
        opened.pop_all()
    if pid == 0:
        _in_child(run, out_end, err_end)
    os.close(out_end)
    os.close(err_end)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # in both: whoever comes first
    return Child(name=name, pid=pid, out=out, err=err, deadline=deadline)


def _pipe(opened: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        opened.callback(os.close, end)
    return ends


def _in_child(run: Callable[[int], None], out: int, err: int) -> None:
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _die_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(err, 2)
        run(out)
        code = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]

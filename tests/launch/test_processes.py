"""Descendants: finding and ending them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from phalanx.launch import processes
from phalanx.launch.guardian import GuardianHandle, fork_guardian
from phalanx.launch.worker import SignalState, WorkerPlan
from tests.launch.launching import wait_until


def test_descendants_are_found_over_generations() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True) as shell:
        try:
            wait_until(lambda: len(processes.descendants(shell.pid)) == 1, "child of the shell")
            (sleep,) = processes.descendants(shell.pid)
            assert {shell.pid, sleep} <= set(processes.descendants(os.getpid()))
            assert not {shell.pid, sleep} & set(processes.descendants(os.getpid(), spare=[shell.pid]))
            assert processes.parents()[sleep] == shell.pid
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_a_process_name_may_hold_anything() -> None:
    code = "from phalanx.launch import processes; processes.set_process_name(') (x 1 2'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processes.parents()[child.pid] == os.getpid()
        child.communicate(b"\n")


KILL = """
import os, subprocess, sys, time
from phalanx.launch import processes
processes.become_subreaper()
spared = subprocess.Popen(["sleep", "600"])
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
if os.fork() == 0:  # a daemon: its parent is gone
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    os._exit(0)
def reap():
    left = False
    for pid, parent in processes.parents().items():
        if parent == os.getpid() and pid != spared.pid:
            left |= os.waitpid(pid, os.WNOHANG)[0] == 0
    return left
began = time.monotonic()
assert processes.kill_descendants(reap, spare=[spared.pid], patience_s=0.2) == []
assert 0.2 <= time.monotonic() - began < 5
assert processes.descendants(os.getpid()) == [spared.pid]
spared.kill(); spared.wait()
assert processes.kill_descendants(reap) == []
"""


def test_everything_below_is_ended_but_what_is_spared() -> None:
    subprocess.run([sys.executable, "-c", KILL], check=True, timeout=60)


def test_names_of_signals() -> None:
    assert processes.signal_name(9) == "SIGKILL"
    assert processes.signal_name(signal.SIGRTMIN + 3) == "SIGRTMIN+3"


def test_whether_a_process_expects_a_signal() -> None:
    previous = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert processes.handles_signal(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert not processes.handles_signal(os.getpid(), signal.SIGUSR2)
    assert not processes.handles_signal(2**22 + 1, signal.SIGUSR2)


@pytest.fixture
def guardian() -> GuardianHandle:
    """A guardian whose ranks are shells."""
    plan = WorkerPlan(kind="command", name="sh", args=("-c", "echo rank $R '${local_rank}'; exec sleep 600"))
    state = SignalState.current()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    handle = fork_guardian(plan, preload=False, signals=state, handled=(), in_child=lambda: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert isinstance(handle, GuardianHandle)
    return handle


def test_a_guardian_starts_reports_and_ends_ranks(guardian: GuardianHandle) -> None:
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    events: list[dict[str, object]] = []

    def seen(kind: str) -> dict[str, object]:
        def found() -> dict[str, object] | None:
            events.extend(guardian.events())
            return next((event for event in events if event["event"] == kind), None)

        event = wait_until(found, kind)
        events.remove(event)
        assert isinstance(event, dict)
        return event

    try:
        guardian.start(3, {"R": "5"}, [null, write, write])
        assert seen("started")["local_rank"] == 3
        assert os.read(read, 100) == b"rank 5 3\n"
        os.kill(guardian.pid, signal.SIGTERM)  # it ends by its socket alone
        began_ns = time.monotonic_ns()
        guardian.signal(signal.SIGTERM)
        end = seen("exit")
        assert (end["local_rank"], end["exit_code"]) == (3, -signal.SIGTERM)
        assert isinstance(end["monotonic_ns"], int)
        assert began_ns < end["monotonic_ns"] < time.monotonic_ns()
        guardian.start(0, {"R": "0"}, [null, write, write])
        seen("started")
        guardian.stop()
        assert seen("exit")["exit_code"] == -signal.SIGKILL
        assert seen("stopped")["left"] == []
    finally:
        for fd in (read, write, null):
            os.close(fd)
        assert guardian.close()


def test_a_guardian_that_is_gone_says_so(guardian: GuardianHandle) -> None:
    os.kill(guardian.pid, signal.SIGKILL)
    assert wait_until(guardian.events, "event") == [{"event": "gone"}]
    guardian.stop()  # no error: the event tells
    assert not guardian.close()

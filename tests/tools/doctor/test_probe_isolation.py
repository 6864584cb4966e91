"""A probe's crash, hang, noise or refusal costs its own answer and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.tools.doctor.probes.isolation import Child, collect, start_function, start_program, stop

PATIENCE_S = 30.0


def answers(child: Child) -> list[dict[str, Any]]:
    collect([child])
    return list(child.answers())


def test_the_answer_comes_back() -> None:
    assert answers(start_function("one", lambda: {"a": [1, "ä"]}, PATIENCE_S)) == [{"a": [1, "ä"]}]


def test_an_answer_larger_than_a_pipe_comes_back() -> None:
    (answer,) = answers(start_function("large", lambda: {"text": "x" * 3_000_000}, PATIENCE_S))
    assert len(answer["text"]) == 3_000_000


def test_no_answer_is_none() -> None:
    child = start_function("nothing", lambda: None, PATIENCE_S)
    assert answers(child) == []
    assert (child.exit_code, child.signal, child.timed_out) == (0, None, False)


def test_what_a_probe_raises_is_kept() -> None:
    def broken() -> dict[str, Any]:
        raise KeyError("no such thing")

    child = start_function("broken", broken, PATIENCE_S)
    assert answers(child) == []
    assert child.exit_code == 1
    assert child.error_text() == "KeyError: 'no such thing'"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_the_signal_is_named(number: signal.Signals) -> None:
    child = start_function("dies", lambda: os.kill(os.getpid(), number), PATIENCE_S)  # type: ignore[arg-type, func-returns-value]
    collect([child])
    assert child.signal == number.name


def test_one_that_hangs_is_ended_and_the_others_answer() -> None:
    def hang() -> dict[str, Any]:
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
        while True:
            signal.pause()

    hanging = start_function("hangs", hang, 0.3)
    quick = start_function("quick", lambda: {"here": True}, PATIENCE_S)
    collect([hanging, quick])
    assert hanging.timed_out
    assert hanging.signal is None  # it is ours
    assert list(quick.answers()) == [{"here": True}]
    _wait_until_gone(hanging.pid)


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_one_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the kernel's uninterruptible sleep: here SIGKILL is not sent at all, which looks the same."""
    monkeypatch.setattr("phalanx.tools.doctor.probes.isolation._kill", lambda child: None)
    child = start_function("sleeps in the driver", signal.pause, 0.2)  # type: ignore[arg-type]
    collect([child])
    assert child.timed_out
    assert _state(child.pid) == "S"  # it lives, and we are here
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)


def test_what_a_probe_leaves_behind_is_ended() -> None:
    child = start_program("parent", ["sh", "-c", "sleep 1000 >&2 & echo '{\"pid\": '$!'}'"], 1.0)
    (answer,) = answers(child)
    _wait_until_gone(answer["pid"])


def test_noise_is_no_answer() -> None:
    def noisy() -> dict[str, Any]:
        print("hello", flush=True)
        os.write(1, b"libfoo: loaded\n")
        return {"a": 1}

    assert answers(start_function("noisy", noisy, PATIENCE_S)) == [{"a": 1}]


def test_what_was_said_before_a_crash_is_kept() -> None:
    words = ["sh", "-c", "echo '{\"first\": 1}'; echo '{\"cut\": '; kill -SEGV $$"]
    child = start_program("crashes", words, PATIENCE_S)
    assert answers(child) == [{"first": 1}]
    assert child.signal == "SIGSEGV"


def test_a_program_that_is_not_there() -> None:
    child = start_program("absent", ["/no/such/program"], PATIENCE_S)
    assert answers(child) == []
    assert child.exit_code == 127
    assert "No such file" in child.error_text()


def test_a_probe_does_not_hold_our_output() -> None:
    """Who reads our output waits for its last holder: a probe that lives on must not be one."""
    script = """
import signal, sys
from phalanx.tools.doctor.probes import isolation
isolation._kill = lambda child: None
child = isolation.start_function("stays", signal.pause, 0.1)
isolation.collect([child])
print(child.pid)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    out, _ = process.communicate(
        timeout=PATIENCE_S
    )  # returns though the probe lives, or did until its parent died
    assert process.returncode == 0
    assert int(out) > 1


def test_stop_ends_all() -> None:
    children = [start_function("waits", _forever, PATIENCE_S) for _ in range(2)]
    stop(children)
    collect(children)
    assert [child.signal for child in children] == ["SIGKILL", "SIGKILL"]


def _forever() -> dict[str, Any]:
    while True:
        signal.pause()


def test_waiting_names_those_that_run() -> None:
    seen: list[list[str]] = []
    read, write = os.pipe()

    def until_told() -> dict[str, Any]:
        os.read(read, 1)
        return {}

    def told(names: list[str]) -> None:
        seen.append(names)
        if len(seen) == 2:
            os.write(write, b"x")

    child = start_function("slow", until_told, PATIENCE_S)
    collect([child], told)
    os.close(read)
    os.close(write)
    assert seen[:2] == [["slow"], ["slow"]]
    assert not child.timed_out


def test_the_environment_of_a_program() -> None:
    child = start_program("env", [sys.executable, "-c", _PRINT_ENV], PATIENCE_S, {"ONLY": "this"})
    (answer,) = answers(child)
    assert answer["ONLY"] == "this"
    assert "HOME" not in answer


_PRINT_ENV = "import json, os; print(json.dumps(dict(os.environ)))"

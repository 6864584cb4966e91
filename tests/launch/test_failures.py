"""Which rank failed first, and why."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch import evidence, failures
from phalanx.launch.failures import RankEnd, by_cause, format_report, make_failure
from phalanx.launch.run import refused_arguments
from tests.launch.launching import Launcher, wait_until

# --------------------------------------------------------------------------- the rules

LOST_PEER = [
    (
        "RuntimeError",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4321",
    ),
    (
        "RuntimeError",
        "[pair.cc:545] Read error [127.0.0.1]:33485: Connection reset by peer. This is typically caused by",
    ),
    ("RuntimeError", "[pair.cc:185] Broken pipe"),
    ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
    ("RuntimeError", "Socket Timeout"),
    ("DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//cpu"),
    ("DistNetworkError", "The client socket has timed out after 600000ms while trying to connect to (a, 1)."),
    (
        "DistBackendError",
        "NCCL error in: ../ProcessGroupNCCL.cpp:1691, remote process exited or there was a network error",
    ),
    ("DistBackendError", "NCCL communicator was aborted on rank 1."),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("phalanx.dist.collectives.RankZeroFailed", "rank 0 failed in rank_zero_first: OSError: no disk"),
    ("phalanx.dist.rendezvous.RanksMissing", "barrier: rank 1 did not arrive within 60 s (rank 0 did)."),
    (
        "phalanx.dist.rendezvous.RendezvousError",
        "barrier: the store is gone (x); rank 0 or its launcher has ended.",
    ),
    ("phalanx.dist.checkpoint_errors.CheckpointError", "rank 1: save(x=...) is a builtins.object"),
]
OWN_FAULT = [
    ("ValueError", "connection closed is no colour"),
    ("RuntimeError", "CUDA error: out of memory"),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    ("KeyError", "'timeout'"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: 'peer.pt'"),
    ("OSError", "[Errno 28] No space left on device"),
    (
        "phalanx.dist.rendezvous.RendezvousError",
        "MASTER_PORT=29500: that port is taken on a, probably by another run.",
    ),
    (
        "phalanx.dist.checkpoint_errors.CheckpointError",
        "save() waits for every rank, and rank 1 did not call it",
    ),
    ("RuntimeError", "rank 1: is what a script says"),
]


@pytest.mark.parametrize(("exception", "message"), LOST_PEER)
def test_a_lost_peer_is_recognised(exception: str, message: str) -> None:
    assert failures.speaks_of_a_lost_peer(exception, message)


@pytest.mark.parametrize(("exception", "message"), OWN_FAULT)
def test_a_fault_of_its_own_is_no_lost_peer(exception: str, message: str) -> None:
    assert not failures.speaks_of_a_lost_peer(exception, message)


def _end(rank: int, exit_code: int, at_ms: int, **values: Any) -> RankEnd:
    return RankEnd(
        local_rank=rank,
        rank=rank,
        pid=1000 + rank,
        exit_code=exit_code,
        time=at_ms / 1e3,
        monotonic_ns=at_ms * 10**6,
        **values,
    )


def _report(exception: str, message: str, at_ms: int, origin: str = "main") -> dict[str, Any]:
    trace = f"Traceback (most recent call last):\n{exception}: {message}\n"
    return {
        "origin": origin,
        "exception": exception,
        "message": message,
        "traceback": trace,
        "time": at_ms / 1e3,
        "monotonic_ns": at_ms * 10**6,
    }


def _failure(
    end: RankEnd, report: dict[str, Any] | None = None, explanation: str = "", tail: str = ""
) -> failures.Failure:
    return make_failure(end, report, node=0, explanation=explanation, log=None, tail=tail)


CLOSED = "Connection closed by peer [127.0.0.1]:1"
#: Failures by rank -> the rank that was first.
ORDERS = {
    "time stamp of the exception, not of the exit": (
        [
            (_end(0, 1, 100), _report("ValueError", "a", 90)),
            (_end(1, 1, 500), _report("ValueError", "b", 30)),
        ],
        1,
    ),
    "a lost peer noticed before the cause is told": (
        [
            (_end(0, 1, 100), _report("RuntimeError", CLOSED, 50)),
            (_end(1, 1, 500), _report("ValueError", "b", 60)),
        ],
        1,
    ),
    "a silent exit": ([(_end(0, 1, 100), _report("RuntimeError", CLOSED, 50)), (_end(1, 3, 200), None)], 1),
    "a crash": ([(_end(0, 1, 100), _report("RuntimeError", CLOSED, 50)), (_end(1, -11, 200), None)], 1),
    "a kill": (
        [(_end(0, 1, 100), _report("RuntimeError", "Socket Timeout", 50)), (_end(1, -9, 200), None)],
        1,
    ),
    "an abort after the cause": (
        [(_end(0, -6, 100), None), (_end(1, 1, 200), _report("ValueError", "b", 150))],
        1,
    ),
    "an abort alone": (
        [(_end(0, -6, 100), None), (_end(1, 1, 200), _report("RuntimeError", CLOSED, 150))],
        0,
    ),
    "only lost peers: the first": (
        [
            (_end(0, 1, 100), _report("RuntimeError", CLOSED, 90)),
            (_end(1, 1, 80), _report("RuntimeError", CLOSED, 70)),
        ],
        1,
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_cause_comes_first(order: str) -> None:
    cases, first = ORDERS[order]
    assert by_cause([_failure(end, report) for end, report in cases])[0].rank == first
    assert by_cause([_failure(end, report) for end, report in reversed(cases)])[0].rank == first


def test_the_report_starts_with_the_rank_and_its_exception() -> None:
    found = by_cause(
        [
            _failure(_end(0, 1, 160), _report("RuntimeError", CLOSED, 90)),
            _failure(_end(1, 1, 500), _report("ValueError", "boom\nsecond line", 30)),
        ]
    )
    text = format_report(found, attempts=1, failure_file=Path("logs/failure.json"))
    lines = text.strip().split("\n")
    assert lines[0] == "First failure: rank 1 (local rank 1, node 0): ValueError: boom"
    assert "  ValueError: boom" in lines
    assert f"Then rank 0 (0.06 s later): RuntimeError: {CLOSED}" in lines
    assert lines[-1] == "Details: logs/failure.json"


def test_a_silent_death_shows_the_last_lines() -> None:
    tail = "".join(f"line {number}\n" for number in range(100))
    text = format_report([_failure(_end(0, 3, 1), tail=tail)], attempts=1, failure_file=None)
    assert "First failure: rank 0 (local rank 0, node 0): exit code 3" in text
    assert "  | line 80\n" in text
    assert "  | line 99" in text
    assert "line 79\n" not in text


def test_a_signal_is_told_with_its_explanation_and_the_exception_before_it() -> None:
    found = _failure(
        _end(0, -9, 1), _report("ValueError", "boom", 0), explanation="from outside; no sign of it"
    )
    assert found.headline == "SIGKILL: from outside; no sign of it; before that, ValueError: boom"
    assert (found.exit_code, found.signal) == (None, "SIGKILL")


def test_a_failure_without_any_word_is_its_exit_code() -> None:
    assert _failure(_end(0, 3, 1)).headline == "exit code 3"


def test_torchs_own_error_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1700000000"}
    path.write_text(json.dumps({"message": {"message": "ValueError: a: b", "extraInfo": extra}}))
    found = failures.read_torch_error_file(path)
    assert found is not None
    assert (found["exception"], found["message"], found["traceback"]) == (
        "ValueError",
        "a: b",
        "Traceback ...",
    )
    path.write_text(json.dumps({"message": "plain text"}))
    assert (failures.read_torch_error_file(path) or {})["message"] == "plain text"
    for bad in ("", "[]", "{}", '{"message": 3}'):
        path.write_text(bad)
        assert failures.read_torch_error_file(path) is None
    assert failures.read_torch_error_file(tmp_path / "none") is None


def test_a_traceback_in_printed_text_is_found() -> None:
    text = (
        'loss 3\nTraceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n'
        "pkg.errors.BadData: row 3: empty\nsome more output\n"
    )
    found = failures.traceback_in(text)
    assert found is not None
    assert (found["exception"], found["message"]) == ("BadData", "row 3: empty")
    assert found["traceback"].endswith("pkg.errors.BadData: row 3: empty\n")
    assert failures.traceback_in("no traceback here") is None
    assert failures.traceback_in("Traceback (most recent call last):\n  cut off") is None


# --------------------------------------------------------------------------- what the kernel says


def test_a_kill_is_told_apart_from_the_oom_killer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 0\noom_kill 4\noom_group_kill 0\n")
    monkeypatch.setattr(evidence, "_cgroup_files", lambda: [counter])
    witness = evidence.Witness()
    witness.close()  # without the kernel's log
    assert "no sign of the OOM killer" in witness.explain(signal.SIGKILL, 17)
    counter.write_text("oom_kill 5\n")
    assert "killed by the kernel's OOM killer" in witness.explain(signal.SIGKILL, 17)


def test_the_kernels_log_names_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    witness = evidence.Witness()
    line = "3,900,1000,-;Out of memory: Killed process 1234 (python) total-vm:1kB"
    monkeypatch.setattr(witness, "_kernel_log", lambda: [line])
    assert "Killed process 1234" in witness.explain(signal.SIGKILL, 1234)
    assert "OOM killer (kernel log" not in witness.explain(signal.SIGKILL, 123)
    witness.close()


@pytest.mark.parametrize(
    ("signum", "word"), [(signal.SIGSEGV, "crash in native code"), (signal.SIGBUS, "/dev/shm")]
)
def test_other_signals_have_a_meaning(signum: int, word: str) -> None:
    witness = evidence.Witness()
    assert word in witness.explain(signum, 1)
    assert "SIGTERM was sent to it from outside" in witness.explain(signal.SIGTERM, 1)
    witness.close()


# --------------------------------------------------------------------------- runs


def test_the_rank_that_raised_first_is_named_twenty_times_of_twenty(launcher: Launcher) -> None:
    """Rank 0 raises 60 ms later because of it; each restart is another try."""
    script = launcher.script(
        """
        import os, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        time.sleep(0.06)
        raise RuntimeError("the other rank has a problem")
        """
    )
    done = launcher.run("--max-restarts", 19, script, timeout_s=120)
    assert done.returncode == 1
    files = [*sorted(launcher.logs.glob("attempt-*/failure.json")), launcher.logs / "failure.json"]
    firsts = [json.loads(file.read_text())["first"] for file in files]
    assert [(first["rank"], first["exception"]) for first in firsts] == [(1, "ValueError")] * 20
    lines = [line for line in done.stderr.splitlines() if line.startswith("attempt ")]
    assert lines[0] == "attempt 1 of 20 failed: rank 1: ValueError: the cause; restarting"
    assert len(lines) == 19
    assert done.stderr.count("First failure: rank 1 (local rank 1, node 0): ValueError: the cause") == 1


def test_a_failure_is_kept_as_json(launcher: Launcher) -> None:
    """A caught peer's loss, a silent exit, and what comes after it."""
    script = launcher.script(
        """
        import os, sys
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            print("last words")
            os._exit(3)
        dist.all_reduce(torch.ones(1))
        """
    )
    done = launcher.run(script)
    assert done.returncode == 1
    content = launcher.failure()
    assert content["schema"] == 1
    assert content["diagnoses"] == []
    first = content["first"]
    assert {
        name: first[name] for name in ("rank", "local_rank", "node", "exit_code", "signal", "exception")
    } == {
        "rank": 1,
        "local_rank": 1,
        "node": 0,
        "exit_code": 3,
        "signal": None,
        "exception": None,
    }
    assert abs(first["time"] - os.stat(launcher.logs / "failure.json").st_mtime) < 30
    assert "  | last words" in done.stderr
    assert json.loads((launcher.logs / "run.json").read_text())["exit_code"] == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import ctypes; ctypes.string_at(0)", {"signal": "SIGSEGV", "exit_code": None, "exception": None}),
        ("import os; os.kill(os.getpid(), 9)", {"signal": "SIGKILL", "exit_code": None, "exception": None}),
        (
            "try:\n    1 / 0\nexcept Exception:\n    raise SystemExit(4)",
            {"exit_code": 4, "exception": "ZeroDivisionError"},
        ),
        (
            "import sys; sys.exit('no data')",
            {"exit_code": 1, "exception": "SystemExit", "message": "no data"},
        ),
        ("x = (", {"exit_code": 1, "exception": "SyntaxError"}),
    ],
    ids=["segfault", "kill", "exit-after-exception", "exit-text", "syntax"],
)
def test_one_rank_fails(launcher: Launcher, body: str, expected: dict[str, Any]) -> None:
    done = launcher.run(launcher.script(body), ranks=1)
    assert done.returncode == 1
    first = launcher.failure()["first"]
    assert {name: first[name] for name in expected} == expected
    assert done.stderr.count("First failure: rank 0") == 1
    if expected.get("signal") == "SIGSEGV":
        assert "Fatal Python error: Segmentation fault" in done.stderr  # where Python stood
    if expected.get("signal") == "SIGKILL":
        assert "OOM killer" in done.stderr
        assert "Peak memory: rank 0" in done.stderr


def test_a_script_under_torchs_record_and_a_program_of_another_kind(launcher: Launcher) -> None:
    script = launcher.script(
        """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("recorded")
        main()
        """
    )
    import sys

    done = launcher.run("--no-python", sys.executable, script, ranks=1)
    first = launcher.failure()["first"]
    assert (done.returncode, first["exception"], first["message"]) == (1, "ValueError", "recorded")
    assert "raise ValueError" in first["traceback"]


def test_a_rank_that_raises_but_cannot_end_is_ended(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import threading, time
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("boom")
        """
    )
    done = launcher.run("--grace-s", "1", script, ranks=1)
    assert done.returncode == 1
    assert launcher.failure()["first"]["exception"] == "ValueError"


def test_survivors_are_dead_within_a_second(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
        while not os.path.exists("go"):
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            os._exit(1)
        time.sleep(600)
        """
    )
    process = launcher.start(script)
    files = [launcher.folder / f"pid-{rank}" for rank in (0, 1)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), "ranks")
    (launcher.folder / "go").touch()
    pid = int(files[1].read_text())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "death of rank 1")
    wait_until(lambda: not os.path.exists(f"/proc/{files[0].read_text()}"), "death of rank 0", 1.0)
    process.communicate(timeout=30)
    assert process.returncode == 1


def test_arguments_that_the_script_refuses_are_a_usage_mistake_and_no_crash(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import argparse
        parser = argparse.ArgumentParser(prog="train")
        parser.add_argument("--epochs", type=int)
        parser.parse_args()
        """
    )
    done = launcher.run(script, "--epochs", "many")
    assert done.returncode == 2, done.stderr
    assert "train: error: argument --epochs: invalid int value: 'many'" in done.stderr
    assert "script does not take these arguments" in done.stderr
    assert "First failure" not in done.stderr
    assert launcher.failure()["first"]["exit_code"] == 2


@pytest.mark.parametrize(
    ("ends", "refused"),
    [
        ([(2, None)], True),
        ([(2, "ArgumentError"), (2, "ArgumentError")], True),
        ([(-9, "ArgumentError"), (2, "ArgumentError")], True),  # ended by us while it was leaving
        ([(2, "ValueError")], False),
        ([(1, None), (2, None)], False),
        ([(-9, None), (2, None)], False),
        ([(-9, "ArgumentError")], False),
    ],
)
def test_only_a_script_that_says_so_has_refused_its_arguments(
    ends: list[tuple[int, str | None]], refused: bool
) -> None:
    found = [
        failures.Failure(
            rank=rank, local_rank=rank, node=0, exit_code=code, signal=None, exception=exception, message="",
            traceback="", time=0.0, order_ns=rank, is_consequence=False,
        )
        for rank, (code, exception) in enumerate(ends)
    ]  # fmt: skip
    assert refused_arguments(found) is refused


def test_an_abort_that_says_nothing_of_a_peer_comes_before_the_connections_that_it_closed() -> None:
    """The time of an abort is that of its process's end, which a core dump delays."""
    abort = _failure(_end(0, -6, 9), tail="free(): invalid pointer")
    broken = _failure(_end(1, 1, 2), _report("RuntimeError", "Connection closed by peer", 2))
    watchdog = _failure(_end(2, -6, 1), tail="Watchdog caught collective operation timeout")
    assert [f.rank for f in by_cause([broken, abort, watchdog])] == [0, 2, 1]

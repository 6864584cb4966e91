"""Saves that a thread writes: what is on disk, when errors are told, what a kill leaves, what it costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from torch import nn

from phalanx.dist import checkpoint_files as files
from phalanx.dist import checkpoint_staging, checkpoints, run_state
from phalanx.dist.checkpoint_staging import Staging, free_memory_bytes
from phalanx.dist.checkpoints import CheckpointError, CheckpointManager
from tests.dist.checkpoint_runs import Run
from tests.ranks import RankRunner


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing the first file waits for it."""
    opened = threading.Event()
    write = files.write_tensors

    def waiting(*args: Any) -> files.FileRecord:
        assert opened.wait(20)
        return write(*args)

    monkeypatch.setattr(files, "write_tensors", waiting)
    return opened


def test_save_returns_before_it_is_written_and_holds_what_was_then(
    tmp_path: Path, gate: threading.Event
) -> None:
    run = Run(tmp_path, "adam", asynchronous=True)
    run.train(3)
    weights = run.weights()
    path = run.checkpoints.save(note="three")
    assert not path.exists()
    run.train(5)  # into the very parameters that are being saved
    gate.set()
    run.checkpoints.wait()
    assert path.exists()
    assert run.checkpoints.verify() == []
    run.checkpoints.close()
    again = Run(tmp_path, "adam")
    restored = again.checkpoints.restore()
    assert (restored.step, restored.values) == (3, {"note": "three"})
    assert again.weights() == weights != run.weights()


def test_asking_for_checkpoints_waits_for_the_one_being_written(
    tmp_path: Path, gate: threading.Event
) -> None:
    run = Run(tmp_path, asynchronous=True)
    run.train(1)
    run.checkpoints.save()
    threading.Timer(0.2, gate.set).start()
    assert run.checkpoints.latest() == tmp_path / "step-1"
    run.train(2)
    run.checkpoints.save()
    assert run.checkpoints.restore().step == 2
    run.checkpoints.close()


def test_buffers_are_made_once_and_follow_a_shape_that_changes() -> None:
    staging = Staging()
    tensors = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(3)}
    first = staging.hold(tensors)
    assert torch.equal(first["a"], tensors["a"])
    assert first["a"].is_contiguous()
    tensors["a"].add_(1)
    second = staging.hold({**tensors, "b": torch.ones(2)})
    assert second["a"] is first["a"]
    assert torch.equal(second["a"], tensors["a"])
    assert torch.equal(second["b"], torch.ones(2))
    assert 1 << 20 < free_memory_bytes() < 1 << 50


def test_large_states_are_written_by_a_thread_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MIN_BYTES", 1000)
    threads: list[str] = []
    write = run_state.Snapshot.write
    monkeypatch.setattr(
        run_state.Snapshot,
        "write",
        lambda *args: (threads.append(threading.current_thread().name), write(*args)),
    )
    run = Run(tmp_path, "adam")
    run.train(1)
    run.checkpoints.save()
    run.checkpoints.close()
    monkeypatch.setattr(checkpoint_staging, "free_memory_bytes", lambda: 100)
    other = Run(tmp_path / "full", "adam")
    other.train(1)
    other.checkpoints.save()
    assert threads == ["phalanx-checkpoint", "MainThread"]


def _no_space(*_: Any) -> files.FileRecord:
    raise OSError(28, os.strerror(28))


@pytest.mark.parametrize("told_by", ["save", "maybe_save", "wait", "close", "restore", "with"])
def test_an_error_is_told_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    run = Run(tmp_path, asynchronous=True, every_steps=100)
    run.train(1, save_each=1)
    run.checkpoints.wait()
    run.checkpoints.maybe_save()
    run.train(2)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_tensors", _no_space)
        run.checkpoints.save()
        run.checkpoints._join()
    run.train(3)
    call = partial(run.checkpoints.__exit__, None, None, None) if told_by == "with" else None
    with pytest.raises(CheckpointError, match=r"No space left(?s:.*)intact \(newest: .*step-1\)"):
        (call or getattr(run.checkpoints, told_by))()
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == []
    run.checkpoints.save()  # told once; what comes after is saved
    run.checkpoints.close()
    assert run.checkpoints.latest() == tmp_path / "step-3"


def test_an_error_in_the_body_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, asynchronous=True)
    monkeypatch.setattr(files, "write_tensors", _no_space)
    with pytest.raises(ZeroDivisionError):
        _fail_after_a_save(run)


def _fail_after_a_save(run: Run) -> None:
    with run.checkpoints:
        run.checkpoints.save()
        print(1 / 0)


SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from phalanx.dist import CheckpointManager, checkpoint_files as files
import phalanx.dist.checkpoints
import torch._dynamo  # the first optimizer would import it, in every child

statuses, how = {}, "parent"
for ending in ("end", "full", "signal", "raise"):
    pid = os.fork()
    if pid == 0:
        how = ending
        break
    statuses[ending] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def no_space(*_):
    raise OSError(28, "No space left on device")

if how == "parent":
    print(statuses)
else:
    sys.stderr = open(f"{sys.argv[1]}/{how}.txt", "w")
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(f"{sys.argv[1]}/{how}", model=model, optimizer=optimizer, asynchronous=True)
    if how == "full":
        files.write_tensors = no_space
    if how == "signal":
        manager.maybe_save()
    manager.save()
    if how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        manager.maybe_save()
    if how == "raise":
        raise ValueError("something else")
"""


def test_the_end_of_the_process_waits_and_tells(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    statuses = {"end": 0, "full": 1, "signal": 75, "raise": 1}
    assert done.stdout == f"{statuses}\n", done.stderr
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for how in statuses:
        manager = CheckpointManager(tmp_path / how, model=model, optimizer=optimizer)
        assert (manager.latest() is None) == (how == "full")
        assert manager.verify() == []
    told = (tmp_path / "full.txt").read_text()
    assert "the last checkpoint was not written" in told
    assert "No space left on device" in told


def _save_for_ever(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 600))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(folder, model=model, optimizer=optimizer, keep=2, asynchronous=True)
    step = manager.restore().step
    while True:
        step += 1
        for parameter in model.parameters():
            parameter.data.fill_(step)
        manager.save(step_saved=step)
        for parameter in model.parameters():
            parameter.data.fill_(-1)


def _kill_many_times(rank: int, world_size: int, folder_name: str) -> int:
    folder, newest, hits = Path(folder_name), 0, 0
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            _save_for_ever(folder)
        time.sleep(0.1 + 0.017 * number)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        hits += any(".tmp-" in name for name in os.listdir(folder)) if folder.exists() else 0
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 600))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with CheckpointManager(folder, model=model, optimizer=optimizer) as manager:
            assert manager.verify() == []
            restored = manager.restore()
        assert restored.step >= newest
        newest = restored.step
        assert newest == restored.values.get("step_saved", 0)
        if newest:
            assert all(torch.all(parameter == newest) for parameter in model.parameters())
    assert newest > 0
    return hits


def test_a_kill_while_a_thread_writes_leaves_a_whole_older_checkpoint(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    (hits,) = run_ranks(_kill_many_times, str(tmp_path / "c"), world_size=1, backend=None, timeout_s=100)
    assert hits > 0, "no kill hit a save: the test proved nothing"


def _two_ranks(rank: int, world_size: int, folder: str) -> dict[str, str]:
    found = {}
    run = Run(Path(folder), asynchronous=True)
    run.train(1, save_each=1)
    run.checkpoints.wait()
    run.checkpoints.maybe_save()
    write, files.write_tensors = files.write_tensors, _no_space  # type: ignore[assignment]
    run.train(2)
    run.checkpoints.save()
    with pytest.raises(CheckpointError) as caught:
        _maybe_save_for_ever(run)
    found["maybe_save"] = str(caught.value)
    run.checkpoints.save()
    with pytest.raises(CheckpointError) as caught:
        run.checkpoints.close()
    found["close"] = str(caught.value)
    files.write_tensors = write
    run.checkpoints.patience_s = 1
    if rank == 0:
        with pytest.raises(CheckpointError) as caught:
            run.checkpoints.save()
        found["alone"] = str(caught.value)
    return found


def _maybe_save_for_ever(run: Run) -> None:
    while True:  # the ranks ask one another a few times a second
        run.checkpoints.maybe_save()


def test_every_rank_is_told_and_a_save_on_rank_zero_alone_ends(run_ranks: RankRunner, tmp_path: Path) -> None:
    first, second = run_ranks(_two_ranks, str(tmp_path), world_size=2)
    for call in ("maybe_save", "close"):
        assert "No space left on device" in first[call]
        assert second[call] == f"rank 0: {first[call]}"
    assert "rank 1 did not call it within 1 s" in first["alone"]
    assert "outside any `if rank == 0`" in first["alone"]


def test_the_default_patience_is_below_a_minute(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.checkpoints.patience_s < 60
    with pytest.raises(ValueError, match="patience_s=0"):
        Run(tmp_path, patience_s=0)

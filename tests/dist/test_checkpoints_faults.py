"""A run can be killed at any instant and a disk can fill up: what was saved stays whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from torch import nn

from phalanx.dist import checkpoint_files as files
from phalanx.dist import checkpoint_folders as folders
from phalanx.dist.checkpoints import CheckpointError, CheckpointManager
from tests.ranks import RankRunner

_CONTEXT = multiprocessing.get_context("forkserver")
KILLS = 15


def build(folder: Path, width: int = 300) -> CheckpointManager:
    """About 1 MB of weights and as much momentum: a save takes long enough to be hit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2 * width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return CheckpointManager(folder, model=model, optimizer=optimizer, keep=2)


def _fill(checkpoints: CheckpointManager, value: float) -> None:
    for parameter in checkpoints.state.model.parameters():
        parameter.data.fill_(value)
        checkpoints.state.optimizer.state[parameter]["momentum_buffer"].fill_(-value)


def _save_for_ever(acknowledge: int, folder: Path) -> None:
    checkpoints = build(folder)
    step = checkpoints.restore().step
    os.write(acknowledge, f"{step}\n".encode())
    while True:
        step += 1
        _fill(checkpoints, float(step))
        checkpoints.save(step_saved=step)
        os.write(acknowledge, f"{step}\n".encode())


def _run_until_killed(folder: Path, delay_s: float) -> tuple[int, int]:
    """Fork a run, kill it `delay_s` after its first save; the steps it started from and acknowledged last."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _save_for_ever(writing, folder)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        started = int(lines.readline())
        acknowledged = int(lines.readline())
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for line in lines:
            acknowledged = int(line)
    return started, acknowledged


def _kill_many_times(rank: int, world_size: int, folder_name: str) -> int:
    folder, acknowledged, hit_while_writing = Path(folder_name), 0, 0
    build(folder).close()  # everything is imported before the first fork
    for _ in range(KILLS):
        started, now = _run_until_killed(folder, random.uniform(0, 0.06))
        assert started >= acknowledged, "a resumed run goes on from the newest checkpoint"
        acknowledged = now
        hit_while_writing += any(".tmp-" in name for name in os.listdir(folder))
        checkpoints = build(folder)
        newest = checkpoints.latest()
        assert newest is not None
        assert int(newest.name.removeprefix("step-")) >= acknowledged
        assert checkpoints.verify() == []
        restored = checkpoints.restore()
        checkpoints.close()
        assert restored.path == newest
        assert restored.values == {"step_saved": restored.step}
        for parameter in checkpoints.state.model.parameters():
            assert torch.all(parameter == restored.step)
            assert torch.all(
                checkpoints.state.optimizer.state[parameter]["momentum_buffer"] == -restored.step
            )
        assert not [name for name in os.listdir(folder) if ".tmp-" in name], "leftovers are cleared"
    return hit_while_writing


def test_a_run_killed_at_random_instants_always_leaves_a_whole_checkpoint(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """The newest is never older than the last whose save() returned; weights, state and values are of one step."""
    (hits,) = run_ranks(_kill_many_times, str(tmp_path / "c"), world_size=1, backend=None, timeout_s=150)
    assert hits > 0, "no kill hit a save: the test proved nothing"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB, where the tests may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"mounting a small tmpfs needs root: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_leaves_earlier_checkpoints_intact(small_disk: Path) -> None:
    checkpoints = build(small_disk)
    _fill(checkpoints, 1)
    checkpoints.save()
    checkpoints.save()  # 2 x 2.2 MB: a third does not fit beside them
    with pytest.raises(CheckpointError, match=r"No space left on device(?s:.*)intact \(newest: .*step-2\)"):
        checkpoints.save()
    assert sorted(os.listdir(small_disk)) == [".lock", "step-1", "step-2"]
    assert checkpoints.verify() == []
    folders.remove(small_disk / "step-1")
    assert checkpoints.save() == small_disk / "step-4"
    checkpoints.close()


def _save_under_a_limit(pipe: Connection, folder: str) -> None:
    checkpoints = build(Path(folder))
    checkpoints.save()
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
    try:
        checkpoints.save()
        pipe.send("saved")
    except CheckpointError as error:
        pipe.send(str(error))


def test_a_file_size_limit_leaves_earlier_checkpoints_intact(tmp_path: Path) -> None:
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_save_under_a_limit, args=(theirs, str(tmp_path)))
    process.start()
    text = ours.recv()
    process.join()
    assert "File too large" in text
    assert "intact (newest:" in text
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-1"]
    assert files.find_problems(tmp_path / "step-1") == []


def test_saving_holds_no_second_copy_of_the_state(tmp_path: Path) -> None:
    """64 MB of weights and momentum are written with at most one tensor's worth of extra memory."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_measure_save, args=(theirs, str(tmp_path)))
    process.start()
    extra_mb = ours.recv()
    process.join()
    assert extra_mb < 24, "state of 64 MB, largest tensor 16 MB (kept transposed, so it must be copied)"


def _measure_save(pipe: Connection, folder: str) -> None:
    model = nn.ParameterList([torch.ones(2048, 2048).t() for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    checkpoints = CheckpointManager(folder, model=model, optimizer=optimizer, asynchronous=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status_mb("VmRSS")
    checkpoints.save()
    pipe.send(_status_mb("VmHWM") - before)


def test_restoring_holds_no_second_copy_of_the_state(tmp_path: Path) -> None:
    """128 MB of weights and momentum, the momentum new to this optimizer, are read into their places."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_measure_restore, args=(theirs, str(tmp_path)))
    process.start()
    above_the_end_mb, right = ours.recv()
    process.join()
    assert above_the_end_mb < 20
    assert right


def _measure_restore(pipe: Connection, folder: str) -> None:
    model = nn.ParameterList([torch.ones(2048, 2048) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 2.0)
    with CheckpointManager(folder, model=model, optimizer=optimizer, asynchronous=False) as checkpoints:
        checkpoints.save()
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    with CheckpointManager(folder, model=model, optimizer=optimizer) as checkpoints:
        checkpoints.restore()
    right = all(
        bool((p == 1).all() and (optimizer.state[p]["momentum_buffer"] == 2).all())
        for p in model.parameters()
    )
    pipe.send((_status_mb("VmHWM") - _status_mb("VmRSS"), right))


def _status_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(name)


def test_a_killed_write_of_one_file_is_never_taken_for_whole(tmp_path: Path) -> None:
    """Every prefix of the sequence of writes that a save makes: only the full one is a checkpoint."""
    path = build(tmp_path, width=8).save()
    whole = {name: (path / name).read_bytes() for name in os.listdir(path)}
    order = [files.MODEL_FILE, files.OPTIMIZER_FILE, files.STATE_FILE, files.MANIFEST_FILE]
    assert sorted(order) == sorted(whole)
    copy = tmp_path / "step-2"
    manifest: dict[str, Any] = files.read_manifest(path)
    records = {
        name: files.FileRecord(record["bytes"], record["hash"], manifest["tensors"].get(name, {}))
        for name, record in manifest["files"].items()
    }
    for written in range(len(order)):
        copy.mkdir()
        for name in order[:written]:
            (copy / name).write_bytes(whole[name])
        assert files.quick_problem(copy) is not None
        folders.remove(copy)
    copy.mkdir()
    for name in order[:3]:
        (copy / name).write_bytes(whole[name])
    files.write_manifest(copy, 2, records)
    assert files.find_problems(copy) == []

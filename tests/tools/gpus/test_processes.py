"""Who is on a GPU: real processes, their ranks, and processes that cannot be seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist.rank_signs import RankSign
from phalanx.tools.gpus import processes
from phalanx.tools.gpus.processes import ProcessTable, place_of, printable, short_command
from phalanx.tools.gpus.readings import ProcessReading


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    ranked = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "resnet"}
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", "--lr", "0.1"],
        env={**os.environ, **ranked},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_a_rank_of_torchrun_by_its_variables(sleeper: subprocess.Popen[bytes]) -> None:
    found = ProcessTable(signs={}).describe(sleeper.pid, 7, "compute")
    assert (found.job, found.rank, found.local_rank, found.world_size) == ("resnet", 5, 1, 8)
    assert found.name is not None
    assert found.name.endswith("--lr 0.1")
    assert (found.memory_bytes, found.note) == (7, "")


def test_a_sign_comes_before_variables_and_holds_for_children(sleeper: subprocess.Popen[bytes]) -> None:
    sign = RankSign(pid=os.getpid(), rank=2, local_rank=0, world_size=3, job="train")
    found = ProcessTable(signs={os.getpid(): sign}).describe(sleeper.pid, None, "compute")
    assert (found.job, found.rank, found.local_rank, found.world_size) == ("train", 2, 0, 3)
    holder = ProcessTable(signs={sleeper.pid: RankSign(**{**vars(sign), "pid": sleeper.pid})}).holder(
        os.getpid()
    )
    assert (holder.pid, holder.job) == (os.getpid(), "train")  # the launcher of a rank


def test_a_process_that_has_ended_is_a_row_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    monkeypatch.setattr(processes, "in_container", lambda: False)
    found = ProcessTable(signs={}).describe(process.pid, 1, "compute")
    assert found == ProcessReading(pid=process.pid, memory_bytes=1, note="ended")


def test_in_a_container_a_number_may_be_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    monkeypatch.setattr(processes, "in_container", lambda: True)
    assert ProcessTable(signs={}).describe(process.pid, 1, "compute").note == "in another PID namespace"
    monkeypatch.setattr(ProcessTable, "_uses_a_gpu", lambda self, folder: False)
    stranger = ProcessTable(signs={}).describe(os.getpid(), 1, "compute")
    assert (stranger.name, stranger.note) == (None, "in another PID namespace")  # never a wrong name


def test_every_number_that_nvml_may_give_is_a_row() -> None:
    table = ProcessTable(signs={})
    for pid in (0, 1, 2**22, 2**31, 2**32 - 1):
        assert table.describe(pid, None, "compute").pid == pid


def test_variables_that_cannot_be_read_leave_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "77"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"python\0train.py\0")
    (folder / "comm").write_text("python\n")
    found = ProcessTable(tmp_path, {}).describe(77, None, "compute")  # no environ, no stat
    assert (found.name, found.rank, found.job) == ("python train.py", None, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ("RANK=1\nLOCAL_RANK=1\nWORLD_SIZE=4\nSLURM_JOB_ID=99", ("slurm-99", 1, 1, 4)),
        ("RANK=1\nLOCAL_RANK=1\nTORCHELASTIC_RUN_ID=none\nTORCHELASTIC_ERROR_FILE=/x/logs-7/attempt-1/r.json", ("logs-7", 1, 1, None)),
        ("RANK=x\nLOCAL_RANK=1\nWORLD_SIZE=4", (None, None, None, None)),
        ("RANK=\nHOME=/root", (None, None, None, None)),
        ("HOME=/root", (None, None, None, None)),
        (
            "SLURM_STEP_ID=0\nSLURM_JOB_ID=7\nSLURM_PROCID=1\nSLURM_LOCALID=0\nSLURM_NODEID=1\nSLURM_STEP_NUM_TASKS=2\n"
            "SLURM_STEP_NUM_NODES=2\nSLURM_STEP_TASKS_PER_NODE=1(x2)\nSLURM_STEP_NODELIST=node[01-02]",
            ("slurm-7", 1, 0, 2),
        ),
        ("OMPI_COMM_WORLD_RANK=3", (None, None, None, None)),  # partly set: no guess
    ],
)  # fmt: skip
def test_places_by_variables(environ: str, expected: tuple[object, ...], tmp_path: Path) -> None:
    assert place_of(environ.encode(), tmp_path) == expected


@given(environ=st.binary(max_size=200))
def test_any_environment_is_read(environ: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    place_of(b"RANK=1\n" + environ, Path("/nonexistent"))


@given(words=st.binary(max_size=80), name=st.text(max_size=10))
def test_no_name_moves_the_cursor(words: bytes, name: str) -> None:
    assert short_command(words, name).isprintable()
    assert printable("\033[2Jmine") == "?[2Jmine"

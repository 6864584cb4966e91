"""Faults made for real on this machine, each explained from what it printed."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.tools.explain import Explanation, explain_paths, explain_text
from tests.conftest import ROOT
from tests.launch.launching import Launcher, wait_until
from tests.tools.explain.provoke import FAULTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of all faults, made once."""
    folder = tmp_path_factory.mktemp("faults")
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.explain.provoke", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_there_are_as_many_as_promised() -> None:
    assert len(FAULTS) >= 60


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_explained(folder: Path, name: str) -> None:
    fault = FAULTS[name]
    explanation = explain_paths([folder / name])
    logs = "\n".join(
        path.read_text(errors="replace")[-3000:] for path in sorted((folder / name).glob("rank-*.log"))
    )
    if fault.id == "unknown":
        assert explanation.outcome == "unknown", logs
        assert explanation.first_failure is not None
        assert explanation.first_failure.exception == "ValueError"
        assert fault.rank is None or explanation.first_failure.rank == fault.rank
        return
    names = [diagnosis.id for diagnosis in explanation.diagnoses]
    assert fault.id in names[: fault.among], f"{names}\n{logs}"
    best = explanation.diagnoses[0]
    assert fault.rank is None or best.rank == fault.rank
    assert best.evidence
    assert best.fix


@pytest.mark.parametrize(
    "name", ["label", "module_prefix", "half_a_checkpoint", "unused_parameters", "no_local_rank"]
)
def test_the_line_of_user_code_is_named(folder: Path, name: str) -> None:
    where = explain_paths([folder / name]).diagnoses[0].where
    assert where is not None
    assert "provoke.py:" in where
    assert "site-packages" not in where


def test_captured_values_are_in_the_words(folder: Path) -> None:
    words = {
        name: explain_paths([folder / name]).diagnoses[0].cause
        for name in ("label", "other_size", "collate_sizes")
    }
    assert "a target is 7" in words["label"]
    assert "weight is [1000, 4] in the checkpoint and [10, 4] in the model" in words["other_size"]
    assert "[3] (sample 0) and [4] (sample 1)" in words["collate_sizes"]


# --------------------------------------------------------------------------- what needs root

LOADER = """
import torch
from torch.utils.data import DataLoader
class Rows:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.ones(1_000_000)
for batch in DataLoader(Rows(), batch_size=4, num_workers=1):
    print(batch.shape)
"""


def test_a_small_dev_shm_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare(1), to mount a small /dev/shm of its own")
    (tmp_path / "train.py").write_text(LOADER)
    words = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {shlex.quote(sys.executable)} train.py"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", words], cwd=tmp_path, capture_output=True, check=False
    )
    if b"mount:" in done.stderr or b"unshare:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.decode(errors='replace')}")
    assert explain_text(done.stdout + done.stderr).diagnoses[0].id == "shm-too-small"


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup (version 1 or 2) of 900 MB."""
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = parent / f"phalanx-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text("900M")
            with contextlib.suppress(OSError):
                (folder / "memory.swap.max").write_text("0")
            yield folder
        except OSError:
            continue
        finally:
            folder.rmdir()
        return
    pytest.skip("no memory cgroup can be made here (root, and a writable /sys/fs/cgroup)")


def test_the_kernels_oom_killer_is_named(small_cgroup: Path, launcher: Launcher) -> None:
    script = launcher.script("import os\nkept = []\nwhile True:\n    kept.append(os.urandom(1 << 20) * 4)\n")
    join = f"echo $$ > {small_cgroup}/cgroup.procs; exec " + shlex.join(
        launcher.command("--no-preload", script, ranks=1)
    )
    done = subprocess.run(
        ["sh", "-c", join],
        cwd=launcher.folder,
        env=launcher.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "killed by the kernel's OOM killer" in done.stderr
    assert "\nCause: host-oom-kill (rank 0): " in done.stderr
    assert launcher.failure()["diagnoses"][0]["id"] == "host-oom-kill"


# --------------------------------------------------------------------------- launchers

LABEL = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    torch.nn.functional.cross_entropy(torch.randn(4, 3), torch.tensor([0, 1, 2, 7]))
dist.all_reduce(torch.ones(1))
"""


def _torchrun(tmp_path: Path, script: str) -> tuple[Explanation, str]:
    (tmp_path / "train.py").write_text(script)
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    with (tmp_path / "run.log").open("wb") as log:
        subprocess.run(words, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=100)
    return explain_paths([tmp_path / "run.log"]), (tmp_path / "run.log").read_text()


def test_under_torchrun_the_failing_rank_is_named(tmp_path: Path) -> None:
    explanation, log = _torchrun(tmp_path, LABEL)
    assert "ChildFailedError" in log
    best = explanation.diagnoses[0]
    assert (best.id, best.rank) == ("label-out-of-range", 1)
    assert best.where is not None
    assert best.where.startswith(f"{tmp_path}/train.py:5")


def test_under_torchrun_a_killed_rank_is_named(tmp_path: Path) -> None:
    script = "import os\nos.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else None\nimport time\ntime.sleep(60)\n"
    explanation, _ = _torchrun(tmp_path, script)
    assert (explanation.diagnoses[0].id, explanation.diagnoses[0].rank) == ("host-oom-kill", 1)


def test_a_closed_terminal_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nopen('up', 'w').close()\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "train.py"]
    with (tmp_path / "run.log").open("wb") as log:
        process = subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until((tmp_path / "up").exists, "rank", 60)
            os.kill(process.pid, signal.SIGHUP)
            process.wait(60)
        finally:
            process.kill()
    assert explain_paths([tmp_path / "run.log"]).diagnoses[0].id == "sighup-terminal-closed"


def test_phalanx_run_prints_and_keeps_the_cause(launcher: Launcher) -> None:
    done = launcher.run(launcher.script(LABEL))
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("First failure:") :]
    assert report.startswith(
        "First failure: rank 1 (local rank 1, node 0): IndexError: Target 7 is out of bounds."
    )
    assert "\nCause: label-out-of-range (rank 1): a target is 7" in report
    assert "\nFix: " in report
    (found, *_) = launcher.failure()["diagnoses"]
    assert (found["id"], found["rank"]) == ("label-out-of-range", 1)
    assert found["evidence"][0].startswith("rank-1.log:")
    assert explain_paths([launcher.logs]).diagnoses[0].id == "label-out-of-range"


def test_phalanx_run_says_no_more_than_it_knows(launcher: Launcher) -> None:
    done = launcher.run(launcher.script("raise ValueError('the moon is in the wrong phase')"), ranks=1)
    assert "Cause:" not in done.stderr
    assert launcher.failure()["diagnoses"] == []

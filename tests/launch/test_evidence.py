"""What is said of processes that a signal ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launch import evidence
from phalanx.launch.evidence import Witness
from tests.launch.launching import Launcher

KILLED = "DataLoader worker (pid 4711) is killed by signal: Killed. "


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    events = tmp_path / "memory.events"
    events.write_text("oom 0\noom_kill 0\n")
    (tmp_path / "memory.max").write_text(f"{2 * 2**30}\n")
    monkeypatch.setattr(evidence, "_cgroup_files", lambda: [events])
    return events


def test_a_loader_worker_that_memory_ran_out_for_is_named_with_the_limit(cgroup: Path) -> None:
    witness = Witness()
    cgroup.write_text("oom 1\noom_kill 1\n")
    said = witness.explain_worker(KILLED)
    witness.close()
    assert said.startswith("loader worker 4711: killed by the kernel's OOM killer")
    assert said.endswith("the cgroup's limit is 2.0 GiB")


def test_without_a_limit_none_is_named(cgroup: Path) -> None:
    (cgroup.parent / "memory.max").write_text("max\n")
    assert evidence.memory_limit_bytes() is None


@pytest.mark.parametrize(
    "message", ["boom", "DataLoader worker (pid 1) is killed by signal: Segmentation fault."]
)
def test_of_other_errors_nothing_is_said(message: str) -> None:
    witness = Witness()
    assert witness.explain_worker(message) == ""
    witness.close()


def test_a_killed_loader_worker_is_explained_in_the_report_of_its_rank(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    script = launcher.script(
        """
        import os
        from torch.utils.data import DataLoader

        class Numbers:
            def __len__(self):
                return 8
            def __getitem__(self, number):
                os.kill(os.getpid(), 9)

        if os.environ["RANK"] == "1":
            list(DataLoader(Numbers(), num_workers=1))
        """
    )
    try:
        done = launcher.run(script)
    finally:
        launcher.clean_up()
    assert done.returncode == 1
    first = launcher.failure()["first"]
    assert first["rank"] == 1
    assert "(loader worker " in first["message"].split("\n")[0]

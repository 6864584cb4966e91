"""The self-test: real ranks, and what their words mean."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.tools.doctor import self_test as module
from phalanx.tools.doctor.facts import Facts, GpuFacts, TorchFacts
from phalanx.tools.doctor.self_test import SelfTest, idle_devices, judge
from phalanx.tools.doctor.self_test_ranks import rounds

TORCH = Facts(torch=TorchFacts(installed=True, version="2.14.1"))
PLAN: dict[str, Any] = {"ranks": 2, "devices": [], "backend": "gloo", "limit_s": 10}


@pytest.mark.parametrize("count", range(2, 10))
def test_rounds_hold_every_pair_once_and_no_rank_twice(count: int) -> None:
    pairs = [pair for one in rounds(count) for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for one in rounds(count):
        ranks = [rank for pair in one for rank in pair]
        assert len(ranks) == len(set(ranks))


def run(ranks: int = 2, limit_s: float = 30.0, **environ: str) -> Any:
    test = SelfTest({**os.environ, **environ})
    test.start()
    return test.run(TORCH, limit_s=limit_s, import_s=100.0, ranks=ranks)


def test_three_ranks() -> None:
    finding = run(ranks=3)
    assert (finding.id, finding.status) == ("self-test", "ok")
    assert "3 ranks" in finding.title


def test_an_interface_that_is_not_there() -> None:
    finding = run(GLOO_SOCKET_IFNAME="nothing0")
    assert finding.status == "fail"
    assert "ranks 0 and 1 fail" in finding.title
    assert any("nothing0" in line for line in finding.evidence)
    assert "GLOO_SOCKET_IFNAME" in finding.fix[0]


def run_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], ranks: int, limit_s: float
) -> Any:
    """Ranks whose text was changed, for what a fault of the machine would do to them."""
    text = module._RANKS.read_text()
    assert change[0] in text
    changed = folder / "ranks.py"
    changed.write_text(text.replace(*change))
    monkeypatch.setattr(module, "_RANKS", changed)
    return run(ranks=ranks, limit_s=limit_s)


GROUP = "    group = group_of(plan, members, rank)\n"


def test_the_pair_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = GROUP + "    if members == (1, 2): signal.pause()\n"
    finding = run_changed(tmp_path, monkeypatch, (GROUP, hang), ranks=3, limit_s=4.0)
    assert finding.status == "fail"
    assert finding.title == "self-test: ranks 1 and 2 hang in an all-reduce (gloo, on the CPU)"


def test_a_wrong_sum_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "    values[0] += 0.5 if members == (0, 2) else 0.0\n    group.allreduce([values]).wait()\n"
    finding = run_changed(
        tmp_path, monkeypatch, ("    group.allreduce([values]).wait()\n", wrong), ranks=3, limit_s=30.0
    )
    assert finding.title.startswith("self-test: ranks 0 and 2 fail")
    assert "returned 5.0 where 4.0 is right" in finding.evidence[0]


def test_a_rank_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die = GROUP + "    if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\n"
    finding = run_changed(tmp_path, monkeypatch, (GROUP, die), ranks=2, limit_s=30.0)
    assert finding.title.startswith("self-test: rank 1 cannot start")
    assert "signal 11" in " ".join(finding.evidence)


@pytest.mark.parametrize(
    "torch",
    [
        None,
        TorchFacts(installed=False),
        TorchFacts(installed=True, error="ImportError: x"),
        TorchFacts(installed=True, timed_out=True),
        TorchFacts(installed=True, signal="SIGSEGV"),
    ],
)
def test_not_run_where_torch_does_not_work(torch: TorchFacts | None) -> None:
    test = SelfTest(os.environ, python="/bin/cat")
    test.start()
    assert test.run(Facts(torch=torch)).status == "skip"


def test_a_torch_that_is_not_there_in_time_is_no_failure() -> None:
    finding = judge(PLAN, [])
    assert finding.status == "skip"


def test_what_a_rank_waits_for_is_not_blamed() -> None:
    """Ranks 0 and 1 wait for each other: 0 is stuck with 2, and 1 alone came to their meeting."""
    said = [
        {"what": "start", "state": "ok"},
        {"rank": 0, "what": "0-2", "state": "begin"},
        {"rank": 2, "what": "0-2", "state": "begin"},
        {"rank": 1, "what": "0-1", "state": "begin"},
    ]
    assert "ranks 0 and 2 hang" in judge({**PLAN, "ranks": 3}, said).title


def test_all_pairs_are_said_in_one() -> None:
    said: list[dict[str, Any]] = [{"what": "start", "state": "ok"}]
    for pair in ("0-1", "0-2", "1-2"):
        said += [
            {"rank": int(rank), "what": pair, "state": "error", "error": "x"} for rank in pair.split("-")
        ]
    assert "all pairs of 3 ranks" in judge({**PLAN, "ranks": 3}, said).title


# which devices


def facts(*gpus: GpuFacts, available: bool = True) -> Facts:
    return Facts(torch=TorchFacts(installed=True, version="2", cuda_available=available), gpus=gpus)


def idle(index: int, **more: Any) -> GpuFacts:
    uuid = f"GPU-{index:08d}-1111-2222-3333-{os.getpid():012d}"
    return GpuFacts(
        **{"index": index, "uuid": uuid, "process_count": 0, "memory_used_bytes": 1 << 20, **more}
    )


def chosen(found: Facts, **environ: str) -> list[str]:
    from phalanx.tools.doctor.self_test import _let_go

    devices, held = idle_devices(found, environ)
    _let_go(held)
    return devices


def test_only_idle_devices_are_used() -> None:
    gpus = [
        idle(0),
        idle(1, process_count=1),
        idle(2, memory_used_bytes=20 << 30),
        idle(3, compute_mode="prohibited"),
        idle(4, mig_enabled=True),
        idle(5, problem="GPU is lost"),
        idle(6),
    ]
    assert chosen(facts(*gpus)) == [gpus[0].uuid, gpus[6].uuid]
    assert chosen(facts(*gpus, available=False)) == []


def test_only_visible_devices_are_used() -> None:
    gpus = [idle(0), idle(1), idle(2)]
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert chosen(facts(*gpus), CUDA_VISIBLE_DEVICES="2,0", **environ) == [gpus[2].uuid, gpus[0].uuid]
    assert chosen(facts(*gpus), CUDA_VISIBLE_DEVICES="", **environ) == []


def test_a_device_that_a_job_holds_is_left_alone() -> None:
    import subprocess

    gpu = idle(0)
    code = "import sys; from phalanx.dist import gpu_locks; print(gpu_locks.hold(sys.argv[1]), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(gpu.uuid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"True\n"
        assert chosen(facts(gpu)) == []
        job.communicate()
    assert chosen(facts(gpu)) == [gpu.uuid]

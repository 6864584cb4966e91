"""A node's GPUs from NVML's answers, locks and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.dist import gpu_locks
from phalanx.dist.devices import Gpu
from phalanx.launch import node_gpus as module
from phalanx.launch.node_gpus import NodeGpu, NodeGpus, hold, node_gpus, users_of
from phalanx.launch.options import Given
from phalanx.launch.placement import place
from phalanx.tools.usage import UsageMistake

TWO = [Gpu(i, f"GPU-{i}{i}", name="H100", processes=(), memory_used_bytes=1 << 20) for i in range(2)]

HOLDER = """
import sys
from pathlib import Path
from phalanx.dist import gpu_locks
assert gpu_locks.hold(sys.argv[1], Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def facts(tmp_path: Path, gpus: list[Gpu] = TWO, **environ: str) -> NodeGpus:
    return node_gpus(environ, gpus, tmp_path)


def test_without_nvml_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.dist.devices.nvml_inventory", lambda: None)
    assert node_gpus({}) == NodeGpus()


def test_idle_gpus_in_cudas_order(tmp_path: Path) -> None:
    found = facts(tmp_path, CUDA_VISIBLE_DEVICES="1,0")
    assert [gpu.index for gpu in found.every] == [0, 1]
    assert found.visible == (NodeGpu(1, "GPU-11", "H100"), NodeGpu(0, "GPU-00", "H100"))


def test_a_list_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageMistake, match=r"CUDA_VISIBLE_DEVICES='0,9,1': '9' is not one of(.|\n)*Fix: export"
    ):
        facts(tmp_path, CUDA_VISIBLE_DEVICES="0,9,1")


def test_gpus_of_two_kinds_that_cuda_may_number_otherwise(tmp_path: Path) -> None:
    kinds = [Gpu(0, "GPU-00", name="T4"), Gpu(1, "GPU-11", name="H100")]
    assert not facts(tmp_path, kinds).order_known
    assert facts(tmp_path, kinds, CUDA_DEVICE_ORDER="PCI_BUS_ID").order_known
    with pytest.raises(UsageMistake, match="export CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        facts(tmp_path, kinds, CUDA_VISIBLE_DEVICES="1")


def test_mig_instances(tmp_path: Path) -> None:
    split = [Gpu(0, "GPU-00", name="H100", mig_uuids=("MIG-a", "MIG-b", "MIG-c"))]
    found = facts(tmp_path, split, CUDA_VISIBLE_DEVICES="MIG-c,MIG-a")
    assert found.one_per_process
    assert [gpu.uuid for gpu in found.visible] == ["MIG-c", "MIG-a"]
    assert not facts(tmp_path, split, CUDA_VISIBLE_DEVICES="MIG-c").one_per_process


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (Gpu(0, "GPU-00", processes=()), ()),
        (Gpu(0, "GPU-00"), ()),
        (
            Gpu(0, "GPU-00", processes=(), memory_used_bytes=5 << 30),
            ("a process not seen here (5.0 GiB in use)",),
        ),
        (Gpu(0, "GPU-00", compute_mode="prohibited"), ("nobody, but compute mode is prohibited",)),
        (Gpu(0, "GPU-00", processes=(99999999,)), ("pid 99999999",)),
    ],
)
def test_who_uses_a_gpu(tmp_path: Path, gpu: Gpu, words: tuple[str, ...]) -> None:
    assert users_of(gpu, tmp_path) == words


def test_a_busy_instance_does_not_make_its_neighbour_busy(tmp_path: Path) -> None:
    one, other = "MIG-1", "MIG-2"
    gpus = [Gpu(0, "GPU-00", processes=(1,), mig_uuids=(one, other), busy_migs=(one,))]
    found = facts(tmp_path, gpus, CUDA_VISIBLE_DEVICES=f"{one},{other}")
    assert [(gpu.uuid, gpu.users) for gpu in found.visible] == [(one, ("a process in it",)), (other, ())]


def test_a_process_is_named_with_its_user(tmp_path: Path) -> None:
    (words,) = users_of(Gpu(0, "GPU-00", processes=(os.getpid(),)), tmp_path)
    assert f"(pid {os.getpid()}, " in words
    assert words.startswith(Path(f"/proc/{os.getpid()}/comm").read_text().strip())


def test_a_gpu_that_another_job_holds_is_in_use_until_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.dist.devices.nvml_inventory", lambda: TWO)
    monkeypatch.setattr(gpu_locks, "default_folder", lambda: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = [sys.executable, "-c", HOLDER, "GPU-00", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "held\n"
        found = place({}, {}, take=True)
        try:
            assert found.gpus == ("GPU-11",)
            assert "GPU 0 by another job (" in found.notes[0]
            assert f"pid {job.pid}" in found.notes[0]
            with pytest.raises(UsageMistake, match="1 of 2 visible GPUs is free"):
                place({"gpus": Given("auto:2", "--gpus")}, {})
            assert (
                place({"gpus": Given("0,1", "--gpus")}, {}, take=True).nproc_per_node == 2
            )  # by name: shared
        finally:
            gpu_locks.release("GPU-11")
        job.communicate()
    assert place({}, {}).nproc_per_node == 2


def test_a_gpu_taken_between_the_look_and_the_choice_is_left_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [
        NodeGpus(
            every=(NodeGpu(0, "GPU-00"), NodeGpu(1, "GPU-11")),
            visible=(NodeGpu(0, "GPU-00"), NodeGpu(1, "GPU-11")),
        )
    ]
    late = NodeGpus(
        every=looks[0].every, visible=(NodeGpu(0, "GPU-00", users=("another job",)), NodeGpu(1, "GPU-11"))
    )
    looks.append(late)
    monkeypatch.setattr("phalanx.launch.placement.node_gpus", lambda environ: looks.pop(0))
    monkeypatch.setattr(
        "phalanx.launch.placement.hold", lambda gpus: [gpu for gpu in gpus if gpu.uuid == "GPU-00"]
    )
    assert place({}, {}, take=True).gpus == ("GPU-11",)
    assert looks == []


def test_a_folder_that_cannot_be_used_holds_nothing_and_hinders_nobody(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert hold([NodeGpu(0, "GPU-00")], file) == []
    assert users_of(Gpu(0, "GPU-00"), file) == ()


def test_the_name_of_a_lock_is_the_librarys() -> None:
    assert module.lock_name(3, "") == "index-3"
    assert module.lock_name(3, "GPU-33") == "GPU-33"

"""Faults of GPUs and their driver, by a stand-in NVML, each found by a live `phalanx doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.nvml.machine import GIB, GPU_IS_LOST, Machine, StandInGpu, build_libraries, uuid_of
from tests.tools.doctor.live import Doctor, bad, finding, first, quick_torch

HEALTHY = {
    "pcie_gen": 5,
    "pcie_gen_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "throttle": 0,
    "ecc_mode": 1,
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libraries(tmp_path_factory.mktemp("nvml"))


class Node:
    """A machine with two GPUs, one of which a test changes."""

    def __init__(self, libraries: Path, folder: Path) -> None:
        self.machine = Machine(libraries, folder, [])
        self.doctor = Doctor(folder)
        self.torch = quick_torch(folder, version="2.6.0+cu126", cuda="12.6")

    def report(
        self, *words: str, driver: str = "560.35.03", cuda: int = 12060, **options: Any
    ) -> dict[str, Any]:
        gpus = [gpu(0), gpu(1)]
        for index, changed in options.pop("change", {}).items():
            gpus[index] = gpu(index, **changed)
        self.machine.describe(gpus, driver=driver, cuda=cuda)
        seen = {name: value for name, value in self.machine.environ().items() if name in _NVML_VARIABLES}
        return self.doctor.report(*words, environ={**self.torch, **seen, **options.pop("environ", {})})


_NVML_VARIABLES = ("LD_LIBRARY_PATH", "STAND_IN_NVML")


def gpu(index: int, **changed: Any) -> StandInGpu:
    numbers = HEALTHY | changed.pop("numbers", {})
    return StandInGpu(**{"uuid": uuid_of("ab"[index]), "numbers": numbers, **changed})


@pytest.fixture
def node(libraries: Path, tmp_path: Path) -> Node:
    return Node(libraries, tmp_path)


def test_two_healthy_gpus(node: Node) -> None:
    report = node.report("--node")
    assert [entry for entry in report["findings"] if entry["status"] == "fail"] == []
    assert len(report["facts"]["gpus"]) == 2
    assert "torch" not in report["facts"]


def test_a_driver_too_old_for_torch(node: Node) -> None:
    report = node.report(driver="450.80.02", cuda=11000)
    assert first(report) == "driver-too-old"
    assert "450.80.02" in " ".join(finding(report, "driver-too-old")["evidence"])


def test_a_driver_of_the_same_major_version_is_fine(node: Node) -> None:
    """CUDA's minor versions are compatible: a build for 12.6 runs on a driver of 12.2."""
    assert "driver-too-old" not in bad(node.report(driver="535.104.05", cuda=12020))


@pytest.mark.parametrize(
    ("identity", "changed"),
    [
        ("gpu-ecc-error", {"uncorrected_ecc": 3}),
        ("gpu-ecc-error", {"numbers": {"remapped": 2, "remap_failed": 1}}),
        ("gpu-throttled", {"numbers": {"throttle": 0x48}}),
        ("pcie-link-degraded", {"numbers": {"pcie_width": 8}}),
        ("exclusive-compute-mode", {"mode": 3}),
        ("gpu-lost", {"fails": {"all": GPU_IS_LOST}}),
        ("mixed-gpus", {"name": "NVIDIA A100-SXM4-80GB", "capability": (8, 0)}),
    ],
)
def test_one_gpu_is_unwell(node: Node, identity: str, changed: dict[str, Any]) -> None:
    found = finding(node.report("--node", "--nproc-per-node", "2", change={1: changed}), identity)
    assert "1" in " ".join([found["title"], *found["evidence"]])


def test_mig_slices_for_two_ranks(node: Node) -> None:
    slices = [StandInGpu(uuid=uuid_of(letter, "MIG"), total_bytes=10 * GIB) for letter in "cd"]
    report = node.report("--node", "--nproc-per-node", "2", change={0: {"migs": slices}})
    assert "mig-single-device" in bad(report)


@pytest.mark.parametrize("value", ["0,9,1", "0,0", "GPU-ffff", "one"])
def test_visible_devices_that_hide(node: Node, value: str) -> None:
    report = node.report("--node", environ={"CUDA_VISIBLE_DEVICES": value})
    assert "cuda-visible-devices-invalid" in bad(report)


def test_visible_devices_that_are_empty(node: Node) -> None:
    """Beside a CUDA build of torch that sees nothing: who wants the CPU alone has no use for that build."""
    assert "cuda-visible-devices-invalid" in bad(node.report(environ={"CUDA_VISIBLE_DEVICES": ""}))


def test_library_and_module_of_two_drivers(node: Node) -> None:
    node.machine.describe([], init=18)
    seen = {name: value for name, value in node.machine.environ().items() if name in _NVML_VARIABLES}
    report = node.doctor.report("--node", environ=seen)
    assert first(report) == "driver-library-mismatch"

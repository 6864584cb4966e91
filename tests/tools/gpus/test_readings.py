"""What NVML says, does not say, or says wrongly: by the real nvidia-ml-py and the stand-in library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.tools.facts.versions import version_of
from phalanx.tools.gpus.computer import read_computer
from phalanx.tools.gpus.driver_files import gpus_of_kernel, kernel_driver
from tests.nvml.machine import (
    FUNCTION_NOT_FOUND,
    GIB,
    GPU_IS_LOST,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    Machine,
    StandInGpu,
    uuid_of,
)
from tests.tools.gpus.conftest import MakeMachine

A, B, C, D = (uuid_of(letter) for letter in "abcd")
READ = """
import json
from phalanx.tools.gpus.node_reading import read_node
from phalanx.tools.gpus.report import report
print(json.dumps(report([read_node()])))
"""


def read(machine: Machine, **environ: str) -> Any:
    return json.loads(machine.run(READ, **environ))


def test_a_missing_field_is_null_with_its_reason_and_the_rest_is_there(machine: MakeMachine) -> None:
    gpu = StandInGpu(
        uuid=A, total_bytes=4096 * MIB, used_bytes=120 * MIB, fails={"utilization": NOT_SUPPORTED}
    )
    (found,) = read(machine([gpu]))["gpus"]
    assert found["utilization_percent"] is None
    assert found["why"]["utilization_percent"] == "Not Supported"
    assert (found["memory_total_bytes"], found["memory_used_bytes"]) == (4096 * MIB, 120 * MIB)
    assert found["idle"] is True


ASKED = {
    "utilization": "utilization_percent",
    "temperature": "temperature_c",
    "power": "power_w",
    "memory": "memory_total_bytes",
    "compute": "processes",
    "mode": "compute_mode",
    "capability": "compute_capability",
    "pstate": "performance_state",
    "ecc": "ecc_uncorrected",
    "name": "name",
    "pci": "pci_bus_id",
}


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, UNKNOWN, 12345])
def test_any_error_of_any_question_costs_that_field_alone(machine: MakeMachine, code: int) -> None:
    """One GPU for each question that fails; all others are answered."""
    gpus = [
        StandInGpu(uuid=uuid_of(letter), fails={what: code})
        for letter, what in zip("abcdef012345", ASKED, strict=False)
    ]
    for found, missing in zip(read(machine(gpus))["gpus"], ASKED.values(), strict=True):
        absent = {name for name in ASKED.values() if found[name] is None}
        assert absent == {missing}
        assert found["why"][missing]
        assert found["problem"] == ""


def test_numbers_out_of_range_are_no_numbers(machine: MakeMachine) -> None:
    gpu = StandInGpu(
        uuid=A, utilization=(2**32 - 1, 0), temperature=2**31, pstate=32, total_bytes=0, reserved_bytes=0
    )
    (found,) = read(machine([gpu]))["gpus"]
    assert [
        found[name]
        for name in ("utilization_percent", "temperature_c", "performance_state", "memory_total_bytes")
    ] == [None] * 4
    assert found["why"]["utilization_percent"] == "reads 4294967295"


def test_a_lost_gpu_leaves_the_others_whole(machine: MakeMachine) -> None:
    gpus = [StandInGpu(uuid=uuid) for uuid in (A, B, C, D)]
    gpus[2] = StandInGpu(uuid=C, fails={"all": GPU_IS_LOST, "handle": GPU_IS_LOST})
    found = read(machine(gpus))["gpus"]
    assert [gpu["index"] for gpu in found] == [0, 1, 2, 3]
    assert [bool(gpu["problem"]) for gpu in found] == [False, False, True, False]
    assert [gpu["uuid"] for gpu in found] == [A, B, None, D]
    assert found[2]["idle"] is False
    assert found[2]["processes"] is None


@pytest.mark.parametrize(("fails", "source"), [({}, "nvml"), ({"memory_v2": FUNCTION_NOT_FOUND}, "nvml-v1")])
def test_what_the_driver_reserves_makes_no_gpu_busy(
    machine: MakeMachine, fails: dict[str, int], source: str
) -> None:
    gpu = StandInGpu(uuid=A, reserved_bytes=308 * MIB, used_bytes=0, fails=fails)
    (found,) = read(machine([gpu]))["gpus"]
    assert (found["idle"], found["memory_source"]) == (True, source)
    assert found["memory_used_bytes"] == (0 if source == "nvml" else 308 * MIB)


def test_in_a_container_memory_and_work_tell_that_a_gpu_is_in_use(machine: MakeMachine) -> None:
    full = StandInGpu(uuid=A, used_bytes=10_000 * MIB)  # and no process is listed
    works = StandInGpu(uuid=B, utilization=(70, 10))
    assert [gpu["idle"] for gpu in read(machine([full, works]))["gpus"]] == [False, False]


def test_a_mig_instance_never_shows_its_gpus_memory(machine: MakeMachine) -> None:
    parts = [
        StandInGpu(
            uuid=uuid_of("1", "MIG"), total_bytes=10 * GIB, used_bytes=4 * GIB, compute={2**22: 4 * GIB}
        ),
        StandInGpu(uuid=uuid_of("2", "MIG"), total_bytes=10 * GIB, fails={"memory": NO_PERMISSION}),
        StandInGpu(uuid=uuid_of("3", "MIG"), total_bytes=10 * GIB, fails={"all": NO_PERMISSION}),
    ]
    whole = StandInGpu(uuid=A, compute={2**22: 4 * GIB}, migs=parts, fails={"memory": NO_PERMISSION})
    # CUDA's own answer for the second instance, the one that this container sees.
    cuda = {
        "CUDA_VISIBLE_DEVICES": uuid_of("2", "MIG"),
        "STAND_IN_CUDA": f"{uuid_of('2', 'MIG')[4:]} {10 * GIB}",
    }
    (gpu,) = read(machine([whole]), **cuda)["gpus"]
    first, second, third = gpu["mig_instances"]
    assert gpu["memory_total_bytes"] is None
    assert gpu["processes"] == []  # it is the instance's
    assert (first["memory_total_bytes"], first["idle"]) == (10 * GIB, False)
    assert (second["memory_total_bytes"], second["memory_used_bytes"]) == (10 * GIB, None)
    assert (first["memory_source"], second["memory_source"], third["memory_source"]) == ("nvml", "cuda", None)
    assert second["why"] == {**second["why"], "memory_used_bytes": "Insufficient Permissions"}
    assert third["memory_total_bytes"] is None
    assert third["idle"] is None


@pytest.mark.parametrize(
    ("environ", "names", "expected"),
    [
        ({}, ["H100", "H100"], [0, 1]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, ["H100", "H100"], [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["H100", "H100"], [None, 0]),
        ({"CUDA_VISIBLE_DEVICES": B}, ["H100", "T4"], [None, 0]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["H100", "H100"], [None, None]),
        ({}, ["T4", "H100"], [None, None]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["T4", "H100"], [0, 1]),
    ],
)
def test_cudas_numbers_here(
    machine: MakeMachine, environ: dict[str, str], names: list[str], expected: list[int | None]
) -> None:
    gpus = [StandInGpu(uuid=uuid, name=name) for uuid, name in zip((A, B), names, strict=True)]
    assert [gpu["cuda_ordinal"] for gpu in read(machine(gpus), **environ)["gpus"]] == expected


def test_versions_are_numbers_part_by_part(machine: MakeMachine) -> None:
    found = read(machine([StandInGpu(uuid=A)], driver="418.87.01", cuda=10010))
    assert (found["driver_version"], found["cuda_driver_version"]) == ("418.87.01", "10.1")
    assert version_of("418.87.01") == (418, 87, 1) < version_of("535.54")


# --------------------------------------------------------------------------------------- NVML cannot be used


def test_driver_and_library_of_different_versions(tmp_path: Path) -> None:
    driver = tmp_path / "proc/driver/nvidia"
    (driver / "gpus/0000:07:00.0").mkdir(parents=True)
    (driver / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n"
    )
    (driver / "gpus/0000:07:00.0/information").write_text(
        f"Model: \t\t NVIDIA H100\nGPU UUID: \t {A}\nDevice Minor: 0\n"
    )
    assert kernel_driver(tmp_path) == "535.104.05"
    (gpu,) = gpus_of_kernel("mismatch", tmp_path)
    assert (gpu.index, gpu.name, gpu.uuid, gpu.pci_bus_id) == (0, "NVIDIA H100", A, "0000:07:00.0")
    assert gpu.problem == "mismatch"


def test_without_a_driver_the_pci_bus_still_lists_gpus(tmp_path: Path) -> None:
    for bus, vendor, kind in (("0000:07:00.0", "0x10de", "0x030200"), ("0000:08:00.0", "0x8086", "0x030000"),
                              ("0000:07:00.1", "0x10de", "0x040300")):  # fmt: skip
        folder = tmp_path / "sys/bus/pci/devices" / bus
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("device", "0x2330")):
            (folder / name).write_text(text + "\n")
    (gpu,) = gpus_of_kernel("no driver", tmp_path)
    assert (gpu.pci_bus_id, gpu.name) == ("0000:07:00.0", "PCI device 10de:2330")
    assert gpus_of_kernel("no driver", tmp_path / "nothing") == ()


@pytest.mark.parametrize("code", [9, 12, 18, 999])
def test_an_nvml_that_does_not_start_is_no_error(machine: MakeMachine, code: int) -> None:
    found = read(machine([], init=code))
    assert found["schema"] == 1
    assert found["hosts"][0]["computer"]["cores"] >= 1
    assert found["gpus"] or found["hosts"][0]["no_gpus"]


def test_the_limits_of_a_container_count(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n")
    (tmp_path / "proc/loadavg").write_text("1.50 1.0 1.0 1/1 1\n")
    found = read_computer(tmp_path)
    assert (found.memory_total_bytes, found.memory_used_bytes, found.load_1m) == (1_024_000, 614_400, 1.5)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("500000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("300000\n")
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text("anon 1\ninactive_file 100000\n")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    limited = read_computer(tmp_path)
    assert (limited.memory_total_bytes, limited.memory_used_bytes, limited.cores) == (500_000, 200_000, 1)
    assert read_computer(tmp_path / "nothing").memory_total_bytes is None

"""Without --gpu, the smallest GPU of this machine counts, as NVML tells it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from phalanx.tools.fit.gpu_memory import GIB, MIB, UNKNOWN_GPU, GpuMemory, find_gpu
from tests.nvml.machine import Machine, StandInGpu, build_libraries, uuid_of

ASK = "import dataclasses, json; from phalanx.tools.fit.gpu_memory import find_gpu\n"
ASK += "print(json.dumps(dataclasses.asdict(find_gpu(None))))"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libraries(tmp_path_factory.mktemp("nvml"))


def present(libraries: Path, folder: Path, gpus: list[StandInGpu]) -> GpuMemory:
    return GpuMemory(**json.loads(Machine(libraries, folder, gpus).run(ASK)))


def test_the_smallest_gpu_here(libraries: Path, tmp_path: Path) -> None:
    large = StandInGpu(uuid=uuid_of("a"))
    small = StandInGpu(uuid=uuid_of("b"), name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB)
    lost = StandInGpu(uuid=uuid_of("c"), fails={"all": 15})
    found = present(libraries, tmp_path, [large, small, lost])
    assert (found.name, found.memory_bytes, found.context_bytes) == (
        "NVIDIA GeForce RTX 3090",
        24 * GIB,
        450 * MIB,
    )


def test_no_gpu_is_one_of_any_size(libraries: Path, tmp_path: Path) -> None:
    assert present(libraries, tmp_path, []) == UNKNOWN_GPU
    assert dataclasses.replace(find_gpu("none"), context_bytes=0).memory_bytes is None

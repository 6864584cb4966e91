"""The stand-in NVML library, compiled once for all tests of gpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.nvml.machine import Machine, StandInGpu, build_libraries

MakeMachine = Callable[..., Machine]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libraries(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(libraries: Path, tmp_path: Path) -> MakeMachine:
    def make(gpus: Sequence[StandInGpu], **settings: object) -> Machine:
        return Machine(libraries, tmp_path, gpus, **settings)

    return make

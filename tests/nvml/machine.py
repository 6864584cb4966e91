"""A machine with GPUs for tests: NVIDIA's NVML library, and the driver's, played by C files compiled here.

What speaks to NVML (nvidia-ml-py, nvidia-smi's Python clones) finds the stand-in by LD_LIBRARY_PATH in a process of
its own, and the machine by the variable STAND_IN_NVML.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 3, 4, 13, 15, 999
MIB, GIB = 1 << 20, 1 << 30


def uuid_of(letter: str, kind: str = "GPU") -> str:
    """``GPU-aaaaaaaa-1111-2222-3333-444444444444``."""
    return f"{kind}-{letter * 8}-1111-2222-3333-444444444444"


@dataclass(frozen=True, kw_only=True)
class StandInGpu:
    """What NVML shall say of one GPU, or of one MIG instance of it.

    ``fails`` are error codes by what is asked ("handle", "uuid", "memory", "compute", ..., "all").
    """

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    pci: str = ""  # by default 00000000:0<index>:00.0
    total_bytes: int = 80 * GIB
    reserved_bytes: int = 600 * MIB
    used_bytes: int = 1 * MIB
    compute: Mapping[int, int] = field(default_factory=dict)  # bytes by process id
    graphics: Mapping[int, int] = field(default_factory=dict)
    mode: int = 0
    utilization: tuple[int, int] = (0, 0)
    temperature: int = 35
    power: tuple[int, int] = (70_000, 700_000)  # milliwatts: now, limit
    capability: tuple[int, int] = (9, 0)
    pstate: int = 0
    uncorrected_ecc: int = 0
    cpus: int = 0  # a mask; 0: NVML does not tell
    links: Sequence[int] = ()  # of each NVLink the GPU at its other end, -1 for a switch
    near: Mapping[int, int] = field(default_factory=dict)  # topology level (10 to 50) by the other GPU
    no_peer: Sequence[int] = ()  # GPUs that it cannot reach peer-to-peer
    numbers: Mapping[str, int] = field(default_factory=dict)  # pcie_width, throttle, ...: see libnvidia-ml.c
    migs: Sequence[StandInGpu] = ()
    fails: Mapping[str, int] = field(default_factory=dict)

    def lines(self, index: int, word: str = "gpu") -> list[str]:
        """This device's part of the machine's file."""
        return [
            word,
            f"uuid {self.uuid}",
            f"name {self.name}",
            f"pci {self.pci or f'00000000:{index + 1:02X}:00.0'}",
            f"memory {self.total_bytes} {self.reserved_bytes} {self.used_bytes}",
            f"mode {self.mode}",
            f"utilization {self.utilization[0]} {self.utilization[1]}",
            f"temperature {self.temperature}",
            f"power {self.power[0]} {self.power[1]}",
            f"capability {self.capability[0]} {self.capability[1]}",
            f"pstate {self.pstate}",
            f"ecc {self.uncorrected_ecc}",
            f"cpus {self.cpus}",
            *(f"link {peer}" for peer in self.links),
            *(f"near {peer} {level}" for peer, level in self.near.items()),
            *(f"nopeer {peer}" for peer in self.no_peer),
            *(f"compute {pid} {size}" for pid, size in self.compute.items()),
            *(f"graphics {pid} {size}" for pid, size in self.graphics.items()),
            *(f"number {name} {value}" for name, value in self.numbers.items()),
            *(f"fail {what} {code}" for what, code in self.fails.items()),
            *(line for mig in self.migs for line in mig.lines(index, "mig")),
        ]


class Machine:
    """A described machine: `environ` for a process that shall see it, `run` for a bit of Python there."""

    def __init__(self, libraries: Path, folder: Path, gpus: Sequence[StandInGpu], **settings: object) -> None:
        self._libraries, self._file = libraries, folder / "machine.txt"
        self.describe(gpus, **settings)

    def describe(self, gpus: Sequence[StandInGpu], **settings: object) -> None:
        """Change the machine; ``settings``: driver, cuda, init (an error code)."""
        lines = [f"{name} {value}" for name, value in settings.items()]
        lines += [line for index, gpu in enumerate(gpus) for line in gpu.lines(index)]
        self._file.write_text("\n".join(lines) + "\n")

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a process on this machine, without any CUDA variable of the real one."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        return {**kept, "LD_LIBRARY_PATH": str(self._libraries), "STAND_IN_NVML": str(self._file), **more}

    def run(self, code: str, *args: str, **more: str) -> str:
        """What a fresh Python on this machine prints."""
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            env=self.environ(**more),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def build_libraries(folder: Path) -> Path:
    """Compile the stand-ins into ``folder``; skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in NVML library with")
    for name in ("libnvidia-ml", "libcuda"):
        target = folder / f"{name}.so.1"
        words = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(target)]
        subprocess.run([*words, str(HERE / f"{name}.c")], check=True)
    return folder

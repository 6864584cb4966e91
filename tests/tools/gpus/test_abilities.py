"""What GPUs can do, and how they are connected."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.tools.gpus.abilities import Topology, TorchBuild
from phalanx.tools.gpus.capability import ask_torch, capability, capability_lines, features_of
from phalanx.tools.gpus.readings import GpuReading
from phalanx.tools.gpus.topology import ranges, topology_lines
from tests.nvml.machine import StandInGpu, uuid_of
from tests.tools.gpus.conftest import MakeMachine
from tests.tools.gpus.test_screens import check

CU126 = TorchBuild(version="2.6.0+cu126", cuda="12.6", architectures=("sm_50", "sm_80", "sm_86", "sm_90"))
PTX = TorchBuild(version="2.6.0", cuda="12.6", architectures=("sm_80", "compute_80"))


@pytest.mark.parametrize(
    ("name", "number", "torch", "code", "runs"),
    [
        ("NVIDIA GeForce RTX 5090", "12.0", CU126, None, False),
        ("NVIDIA H100 80GB HBM3", "9.0", CU126, "sm_90", True),
        ("NVIDIA L4", "8.9", CU126, "sm_86", True),
        ("NVIDIA H100 80GB HBM3", "9.0", PTX, "compute_80", True),
        ("Tesla K40c", None, CU126, None, False),  # by the table of products
        ("NVIDIA H100 80GB HBM3", "9.0", TorchBuild(version="2.6.0+cpu"), None, False),
        ("NVIDIA H100 80GB HBM3", "9.0", TorchBuild(error="not installed"), None, None),
        ("NVIDIA Something New", None, CU126, None, None),
    ],
)
def test_whether_torch_has_code(
    name: str, number: str | None, torch: TorchBuild, code: str | None, runs: bool | None
) -> None:
    found = capability(GpuReading(index=0, name=name, compute_capability=number), torch)
    assert (found.torch_code, found.torch_runs) == (code, runs)
    assert bool(found.advice) == (runs is False or code == "compute_80")


def test_a_lost_gpu_can_do_nothing() -> None:
    found = capability(
        GpuReading(index=0, name="NVIDIA H100", compute_capability="9.0", problem="lost"), CU126
    )
    assert (found.torch_runs, found.advice) == (False, "lost")


def test_features_come_with_the_generations() -> None:
    assert features_of("7.0") == ("fp16",)
    assert features_of("8.6") == ("fp16", "int8", "bf16", "tf32")
    assert features_of("12.0")[-2:] == ("fp8", "fp4")
    assert features_of(None) == ()


def test_the_capability_screen() -> None:
    gpus = [("NVIDIA GeForce RTX 5090", "12.0"), ("NVIDIA H100 80GB HBM3", "9.0"), ("NVIDIA New", None)]
    found = [
        capability(GpuReading(index=i, cuda_ordinal=i, name=name, compute_capability=number), CU126)
        for i, (name, number) in enumerate(gpus)
    ]
    check("capability", "\n".join(capability_lines(found, CU126, width=None, colour=False)) + "\n")


FAKE = {
    "raises": (
        "raise ImportError('libcudart.so.12: cannot open')",
        "ImportError: libcudart.so.12: cannot open",
    ),
    "crashes": ("import os; os.abort()", "its import crashed (exit code -6)"),
    "prints": (
        "print('hello'); __version__ = '2.9.1'; version = type('v', (), {'cuda': None}); _C = None",
        "",
    ),
}


@pytest.mark.parametrize("kind", FAKE)
def test_a_torch_that_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    code, error = FAKE[kind]
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = ask_torch()
    assert error in found.error
    assert bool(found.error) == bool(error)
    assert found.version == (None if error else "2.9.1")


def test_a_python_that_is_not_there() -> None:
    assert "cannot be started" in ask_torch("/nonexistent/python").error


# ---------------------------------------------------------------------------------------------------- topology

SHOW = """
import sys
from pathlib import Path
from phalanx.tools.gpus.topology import read_topology, topology_lines
found = read_topology(Path(sys.argv[1]))
print("\\n".join(topology_lines(found)))
"""


def test_nvlinks_bridges_and_cpus(machine: MakeMachine, tmp_path: Path) -> None:
    """Two pairs joined by four NVLinks each, on two CPUs; the last one sits behind a bridge of its own."""
    gpus = []
    for index, partner in enumerate((1, 0, 3, 2)):
        far = {other: 50 if other // 2 != index // 2 else 30 for other in range(4) if other != index}
        gpus.append(
            StandInGpu(
                uuid=uuid_of("abcd"[index]),
                links=[partner] * 4,
                near={**far, 4: 20},
                cpus=0x00FF if index < 2 else 0xFF00,
                no_peer=[4],
            )
        )
        folder = tmp_path / f"sys/bus/pci/devices/0000:0{index + 1}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{index // 2}\n")
    gpus.append(StandInGpu(uuid=uuid_of("e"), near=dict.fromkeys(range(4), 20), no_peer=range(4)))
    check("topology", machine(gpus).run(SHOW, str(tmp_path)))


def test_nvswitch_joins_all(machine: MakeMachine, tmp_path: Path) -> None:
    gpus = [StandInGpu(uuid=uuid_of(letter), links=[-1] * 18, cpus=0xF) for letter in "abc"]
    check("topology-nvswitch", machine(gpus).run(SHOW, str(tmp_path)))


def test_what_is_not_told_is_not_guessed(machine: MakeMachine, tmp_path: Path) -> None:
    closed = {"topology": 4, "p2p": 3, "nvlink": 3, "affinity": 3}
    gpus = [StandInGpu(uuid=uuid_of("a"), fails=closed), StandInGpu(uuid=uuid_of("b"), fails={"handle": 15})]
    text = machine(gpus).run(SHOW, str(tmp_path))
    assert "GPU 0  X      n/a" in text
    assert "Note" not in text


def test_one_gpu_has_no_pairs() -> None:
    lines = topology_lines(Topology(links=(("X",),), peers=((True,),), cpus=(None,), numa_nodes=(None,)))
    assert lines[1].split() == ["GPU", "0", "X", "n/a", "n/a"]
    assert ranges([0, 2, 3]) == "0,2-3"

"""The screens themselves, kept in golden/*.txt. PHALANX_WRITE_GOLDEN=1 writes them anew: read the difference."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.nvml.machine import (
    FUNCTION_NOT_FOUND,
    GIB,
    GPU_IS_LOST,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    StandInGpu,
    uuid_of,
)
from tests.tools.gpus.conftest import MakeMachine

GOLDEN = Path(__file__).parent / "golden"

# The reading is the real one, on a node whose name, load and processes are always the same.
SHOW = """
import json, sys
from pathlib import Path
from phalanx.dist.rank_signs import RankSign
from phalanx.tools.gpus import node_reading, processes
from phalanx.tools.gpus.readings import Holder, HostReading
from phalanx.tools.gpus.screen import screen
from dataclasses import replace
scene = json.loads(sys.argv[1])
signs = {int(pid): RankSign(pid=int(pid), **sign) for pid, sign in scene["signs"].items()}
table = processes.ProcessTable(Path(scene["proc"]), signs)
processes.in_container = node_reading.in_container = lambda: False
processes._user = lambda number: "ada"
node_reading.ProcessTable = lambda: table
node_reading.Holders = lambda *_: type("Fixed", (), {"holder_of": staticmethod(
    lambda name: Holder(**scene["held"][name]) if name in scene["held"] else None)})
node = node_reading.read_node({}, None)
computer = HostReading(cores=64, load_1m=3.2, memory_total_bytes=512 << 30, memory_used_bytes=90 << 30)
nodes = [replace(node, host=host, computer=computer) for host in scene["hosts"]]
print(screen(nodes, width=scene["width"], colour=scene["colour"]))
"""

GPU = [uuid_of(letter) for letter in "abcdef01"]


class Scene:
    """What `SHOW` is told."""

    def __init__(self, folder: Path) -> None:
        self._proc = folder / "proc"
        self._proc.mkdir()
        self.signs: dict[int, dict[str, object]] = {}
        self.held: dict[str, dict[str, object]] = {}

    def process(self, pid: int, command: str, parent: int = 1, **variables: str) -> None:
        folder = self._proc / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        (folder / "comm").write_text(command.split(" ", maxsplit=1)[0].rpartition("/")[2] + "\n")
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
        environ = "".join(f"{name}={value}\0" for name, value in variables.items())
        (folder / "environ").write_bytes(environ.encode())

    def words(
        self, hosts: tuple[str, ...] = ("node-1",), width: int | None = None, colour: bool = False
    ) -> str:
        scene = {"proc": str(self._proc), "signs": self.signs, "held": self.held, "hosts": hosts}
        return json.dumps({**scene, "width": width, "colour": colour})


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def check(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("PHALANX_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_one_idle_gpu(machine: MakeMachine, scene: Scene) -> None:
    check(
        "one",
        machine([StandInGpu(uuid=GPU[0], name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB)]).run(
            SHOW, scene.words()
        ),
    )


def test_two_gpus_with_ranks_of_torchrun_and_a_desktop(machine: MakeMachine, scene: Scene) -> None:
    for rank in (0, 1):
        scene.process(
            4100 + rank,
            "/usr/bin/python3 -u train.py --lr 0.1",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            TORCHELASTIC_RUN_ID="resnet-7",
        )
    scene.process(900, "/usr/lib/xorg/Xorg :0")
    gpus = [
        StandInGpu(
            uuid=GPU[rank],
            used_bytes=(30 + rank) * GIB,
            compute={4100 + rank: (30 + rank) * GIB},
            graphics={900: 50 * MIB} if rank == 0 else {},
            utilization=(97 - rank, 60),
            temperature=61,
            power=(655_300, 700_000),
            mode=3 * rank,
        )
        for rank in (0, 1)
    ]
    check("two", machine(gpus).run(SHOW, scene.words()))


def eight(machine: MakeMachine, scene: Scene) -> list[StandInGpu]:
    """A job of phalanx run on four GPUs, one that is only held, a stranger's process, two idle ones."""
    scene.process(4000, "/venv/bin/python /venv/bin/phalanx run train.py")
    for rank in range(4):
        scene.process(4100 + rank, "/venv/bin/python /venv/bin/phalanx run train.py", parent=4001)
        scene.signs[4100 + rank] = {
            "rank": rank,
            "local_rank": rank,
            "world_size": 4,
            "job": "20261130-101500-train",
        }
        scene.held[GPU[rank]] = {
            "pid": 4000,
            "user": "ada",
            "name": "phalanx run train.py",
            "job": "20261130-101500-train",
        }
    scene.process(4200, "/venv/bin/python -c loader", parent=4101)  # a worker of rank 1
    scene.process(777, "jupyter-kernel")
    scene.held[GPU[4]] = {"pid": 4300, "user": "ada", "name": "python sweep.py"}
    gpus = []
    for index, uuid in enumerate(GPU):
        pids = {0: [4100], 1: [4101, 4200], 2: [4102], 3: [4103], 5: [777]}.get(index, [])
        gpus.append(
            StandInGpu(
                uuid=uuid,
                used_bytes=(20 * GIB if pids else 1 * MIB),
                compute=dict.fromkeys(pids, 10 * GIB),
                utilization=(90 if pids else 0, 0),
                temperature=70 if pids else 33,
                power=(500_000 if pids else 70_000, 700_000),
            )
        )
    return gpus


def test_eight_gpus_with_a_job_of_phalanx_run(machine: MakeMachine, scene: Scene) -> None:
    check("eight", machine(eight(machine, scene)).run(SHOW, scene.words()))


def test_a_narrow_terminal_loses_columns_and_never_wraps(machine: MakeMachine, scene: Scene) -> None:
    described = machine(eight(machine, scene))
    text = described.run(SHOW, scene.words(width=60))
    check("narrow", text)
    for width in (60, 40, 20, 5):
        lines = described.run(SHOW, scene.words(width=width)).splitlines()
        table = [line for line in lines if line[:1].isdigit() or line.startswith("GPU ")]
        assert len(table) == 16 or width < 40
        assert max(map(len, table)) <= width


def test_colours_are_only_colours(machine: MakeMachine, scene: Scene) -> None:
    described = machine(eight(machine, scene))
    coloured = described.run(SHOW, scene.words(colour=True))
    assert "\033[32midle\033[0m" in coloured
    for code in (1, 2, 31, 32, 33, 0):
        coloured = coloured.replace(f"\033[{code}m", "")
    assert coloured == described.run(SHOW, scene.words())


def test_mig(machine: MakeMachine, scene: Scene) -> None:
    scene.process(4100, "python serve.py")
    parts = [
        StandInGpu(uuid=uuid_of("1", "MIG"), name="NVIDIA A100-SXM4-80GB MIG 1g.10gb", total_bytes=10 * GIB,
                   reserved_bytes=0, used_bytes=4 * GIB, compute={4100: 4 * GIB}),
        StandInGpu(uuid=uuid_of("2", "MIG"), name="NVIDIA A100-SXM4-80GB MIG 1g.10gb", total_bytes=10 * GIB,
                   reserved_bytes=0, used_bytes=20 * MIB),
        StandInGpu(uuid=uuid_of("3", "MIG"), name="NVIDIA A100-SXM4-80GB MIG 2g.20gb",
                   fails={"memory": NO_PERMISSION}),
    ]  # fmt: skip
    whole = StandInGpu(
        uuid=GPU[0],
        name="NVIDIA A100-SXM4-80GB",
        migs=parts,
        compute={4100: 4 * GIB},
        fails={"utilization": NOT_SUPPORTED},
    )
    other = StandInGpu(uuid=GPU[1], name="NVIDIA A100-SXM4-80GB")
    check("mig", machine([whole, other]).run(SHOW, scene.words()))


def test_a_lost_gpu_hides_no_other(machine: MakeMachine, scene: Scene) -> None:
    gpus = [StandInGpu(uuid=uuid) for uuid in GPU[:4]]
    gpus[2] = StandInGpu(uuid=GPU[2], fails={"all": GPU_IS_LOST})
    check("lost", machine(gpus).run(SHOW, scene.words()))


def test_no_permission_and_what_a_gpu_does_not_have(machine: MakeMachine, scene: Scene) -> None:
    closed = StandInGpu(
        uuid=GPU[0],
        fails={"memory": NO_PERMISSION, "compute": NO_PERMISSION, "graphics": NO_PERMISSION, "power": NOT_SUPPORTED,
               "utilization": NO_PERMISSION},
    )  # fmt: skip
    asked = ("memory", "compute", "utilization", "temperature", "power", "name", "pci", "mode", "capability")
    mute = StandInGpu(uuid=GPU[1], fails=dict.fromkeys(asked, NO_PERMISSION))
    check("no-permission", machine([closed, mute]).run(SHOW, scene.words()))


def test_unified_memory_and_an_old_driver(machine: MakeMachine, scene: Scene) -> None:
    spark = StandInGpu(
        uuid=GPU[0],
        name="NVIDIA GB10",
        fails={"memory": NOT_SUPPORTED, "power": NOT_SUPPORTED},
        capability=(12, 1),
    )
    old = StandInGpu(uuid=GPU[1], name="Tesla P100-PCIE-16GB", total_bytes=16 * GIB, reserved_bytes=308 * MIB,
                     fails={"memory_v2": FUNCTION_NOT_FOUND})  # fmt: skip
    check("unified-and-old", machine([spark, old], driver="418.87.01", cuda=10010).run(SHOW, scene.words()))


def test_several_hosts_are_one_table(machine: MakeMachine, scene: Scene) -> None:
    scene.process(4100, "python train.py", RANK="0", LOCAL_RANK="0", WORLD_SIZE="8", SLURM_JOB_ID="99")
    gpu = StandInGpu(uuid=GPU[0], used_bytes=3 * GIB, compute={4100: 3 * GIB})
    check("hosts", machine([gpu]).run(SHOW, scene.words(("node-1", "node-2"))))


def test_no_gpu_is_one_line_and_the_computer(machine: MakeMachine, scene: Scene) -> None:
    check("none", machine([], init=9).run(SHOW, scene.words()))
    check("none-listed", machine([]).run(SHOW, scene.words()))

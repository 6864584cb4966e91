"""Devices as NVML's own library answers: a stand-in in C, spoken to by the real nvidia-ml-py in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.nvml.machine import (
    FUNCTION_NOT_FOUND,
    GIB,
    GPU_IS_LOST,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Machine,
    StandInGpu,
    build_libraries,
    uuid_of,
)

A, B, C, D = (uuid_of(letter) for letter in "abcd")
MIG_1, MIG_2 = uuid_of("1", "MIG"), uuid_of("2", "MIG")
FOUR = [StandInGpu(uuid=uuid) for uuid in (A, B, C, D)]

INVENTORY = (
    "import dataclasses, json; from phalanx.dist.devices import nvml_inventory; gpus = nvml_inventory()\n"
)
INVENTORY += "print(json.dumps(gpus and [dataclasses.asdict(gpu) for gpu in gpus]))"
SELECT = """
import json, os, sys, warnings
from phalanx.dist.devices import select_devices
from phalanx.dist import gpu_locks
from pathlib import Path
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        found = select_devices(sys.argv[1], lock_folder=Path(sys.argv[2]))
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit()
print(json.dumps({"value": os.environ["CUDA_VISIBLE_DEVICES"], "order": os.environ["CUDA_DEVICE_ORDER"],
    "physical": found.physical, "held": sorted(gpu_locks._held), "warnings": [str(w.message) for w in caught]}), flush=True)
if len(sys.argv) > 3:
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libraries(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(libraries: Path, tmp_path: Path) -> Callable[..., Machine]:
    def make(gpus: Sequence[StandInGpu] = FOUR, **settings: object) -> Machine:
        return Machine(libraries, tmp_path, gpus, **settings)

    return make


def inventory(machine: Machine) -> Any:
    return json.loads(machine.run(INVENTORY))


def select(machine: Machine, spec: str, locks: Path, **environ: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(machine.run(SELECT, spec, str(locks), **environ))
    return answer


def test_what_nvml_says_of_a_gpu(machine: Callable[..., Machine]) -> None:
    busy = StandInGpu(uuid=B, pci="00000000:C1:00.0", used_bytes=3 * GIB, compute={4711: 3 * GIB}, mode=3)
    first, second = inventory(machine([FOUR[0], busy]))
    assert first["uuid"] == A
    assert first["memory_used_bytes"] == 1 * MIB  # what the driver reserves for itself is not in use
    assert first["processes"] == []
    assert (second["index"], second["pci_bus_id"], second["processes"]) == (1, "00000000:C1:00.0", [4711])
    assert (second["compute_mode"], second["memory_total_bytes"]) == ("exclusive", 80 * GIB)


def test_what_nvml_does_not_say_is_none(machine: Callable[..., Machine]) -> None:
    closed = StandInGpu(
        uuid=A, fails={"memory": NO_PERMISSION, "compute": NOT_SUPPORTED, "mode": NOT_SUPPORTED}
    )
    old = StandInGpu(uuid=B, fails={"memory_v2": FUNCTION_NOT_FOUND})
    first, second = inventory(machine([closed, old]))
    assert [first[name] for name in ("memory_total_bytes", "processes", "compute_mode")] == [None] * 3
    assert second["memory_used_bytes"] == 601 * MIB  # an old driver counts its own part in


@pytest.mark.parametrize("asked", ["handle", "all"])
def test_a_lost_gpu_hides_no_other_and_is_never_chosen(
    machine: Callable[..., Machine], tmp_path: Path, asked: str
) -> None:
    lost = StandInGpu(uuid=C, fails={asked: GPU_IS_LOST})
    here = machine([FOUR[0], FOUR[1], lost, FOUR[3]])
    gpus = inventory(here)
    assert [gpu["uuid"] for gpu in gpus] == [A, B, "", D]
    assert [bool(gpu["problem"]) for gpu in gpus] == [False, False, True, False]
    assert select(here, "auto", tmp_path / "a")["value"] == "0,1,3"
    assert "GPU 2: NVML cannot reach it" in select(here, "auto:4", tmp_path / "b")["error"]
    assert "GPU 2 cannot be used" in select(here, "2", tmp_path / "c")["error"]


def test_no_driver(machine: Callable[..., Machine], tmp_path: Path) -> None:
    here = machine(init=9)
    assert inventory(here) is None
    assert "NVML does not answer" in select(here, "0", tmp_path / "locks")["error"]


def test_uuids_and_spaces_are_mapped_to_physical_numbers(machine: Callable[..., Machine]) -> None:
    code = (
        "import os; from phalanx.dist.devices import visible_devices\n"
        'os.environ.setdefault("CUDA_VISIBLE_DEVICES", "2, 3")\n'
        "found = visible_devices(); print(found.physical, found.to_physical(1), found.uuids[1])"
    )
    here = machine()
    assert here.run(code) == f"(2, 3) 3 {D}\n"
    # What was set before Python started stays: setdefault only fills a gap.
    assert here.run(code, CUDA_VISIBLE_DEVICES=f"{D},{B}") == f"(3, 1) 1 {B}\n"


def test_two_kinds_of_gpu_are_mapped_by_uuid_or_bus_and_not_by_guess(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    slow, fast = StandInGpu(uuid=A, name="T4"), StandInGpu(uuid=B, name="H100")
    here = machine([slow, fast])
    code = "from phalanx.dist.devices import visible_devices; print(visible_devices().physical)"
    assert here.run(code, CUDA_VISIBLE_DEVICES="0") == "(None,)\n"
    assert here.run(code, CUDA_VISIBLE_DEVICES=B) == "(1,)\n"
    chosen = select(here, "0", tmp_path / "locks")
    # The number alone would be CUDA's own count, the fast one: the order goes with it.
    assert (chosen["value"], chosen["order"]) == ("0", "PCI_BUS_ID")


def _start(machine: Machine, spec: str, locks: Path, **options: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SELECT, spec, str(locks), "stay"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=machine.environ(), **pipes, **options)


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for job in started:
        job.kill()
        job.communicate()


def test_jobs_started_together_take_different_gpus(
    machine: Callable[..., Machine], tmp_path: Path, jobs: list[subprocess.Popen[str]]
) -> None:
    here, locks = machine(), tmp_path / "locks"
    jobs += [_start(here, "auto:1", locks) for _ in range(3)]
    values = [json.loads(job.stdout.readline())["value"] for job in jobs]  # type: ignore[union-attr]
    assert len(set(values)) == 3
    jobs[0].kill()
    jobs[0].wait()
    free = {"0", "1", "2", "3"} - set(values[1:])
    assert set(select(here, "auto:2", locks)["value"].split(",")) == free


def test_named_gpus_are_held_too_and_shared_with_a_word(
    machine: Callable[..., Machine], tmp_path: Path, jobs: list[subprocess.Popen[str]]
) -> None:
    here, locks = machine(), tmp_path / "locks"
    jobs.append(_start(here, "2,1", locks))
    first = json.loads(jobs[0].stdout.readline())  # type: ignore[union-attr]
    assert (first["value"], first["physical"], first["held"]) == ("2,1", [2, 1], [B, C])
    assert select(here, "auto:2", locks)["value"] == "0,3"
    shared = select(here, "1,0", locks)
    assert (shared["value"], shared["held"]) == ("1,0", [A])
    assert len(shared["warnings"]) == 1
    assert f"GPU 1 is held by another job (process {jobs[0].pid}) and shared with it" in shared["warnings"][0]


CHILD = """
import subprocess, sys
from pathlib import Path
from phalanx.dist.devices import select_devices
select_devices("auto:2", lock_folder=Path(sys.argv[1]))
print(subprocess.check_output([sys.executable, "-c", sys.argv[2], "auto", sys.argv[1]], text=True))
"""


def test_what_a_parent_holds_is_its_childrens(machine: Callable[..., Machine], tmp_path: Path) -> None:
    found = json.loads(machine().run(CHILD, str(tmp_path / "locks"), SELECT))
    assert (found["value"], found["warnings"]) == ("0,1", [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a second user")
def test_a_gpu_held_by_another_user(
    machine: Callable[..., Machine],
    libraries: Path,
    tmp_path: Path,
    jobs: list[subprocess.Popen[str]],
) -> None:
    here, locks = machine(), tmp_path / "locks"
    jobs.append(_start(here, "auto:1", locks))
    assert json.loads(jobs[0].stdout.readline())["value"] == "0"  # type: ignore[union-attr]
    # Imported first: the other user may not be let into this Python's folder.
    code = "import json, os, re, warnings, pynvml\nfrom phalanx.dist import devices, gpu_locks\n"
    code += f"os.setgid(65534); os.setuid(65534)\n{SELECT}"
    folders = [libraries, tmp_path, *tmp_path.parents]
    modes = {folder: folder.stat().st_mode for folder in folders if str(folder).startswith("/tmp/")}
    try:
        for folder in modes:
            folder.chmod(0o755)
        (tmp_path / "machine.txt").chmod(0o644)
        other = json.loads(here.run(code, "auto:2", str(locks)))
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)
    assert (other["value"], other["held"]) == ("1,2", [B, C])
    # And the other way round: root finds what the other user has left behind usable.
    assert select(here, "auto:3", locks)["value"] == "1,2,3"


def test_mig_instances(machine: Callable[..., Machine], tmp_path: Path) -> None:
    instances = [
        StandInGpu(uuid=MIG_1, total_bytes=10 * GIB, compute={99: GIB}),
        StandInGpu(uuid=MIG_2, total_bytes=10 * GIB),
    ]
    here = machine([StandInGpu(uuid=A, migs=instances), FOUR[1]])
    gpu = inventory(here)[0]
    assert (gpu["mig_uuids"], gpu["busy_migs"]) == ([MIG_1, MIG_2], [MIG_1])
    named = select(here, "MIG-2", tmp_path / "a")
    assert (named["value"], named["physical"], named["held"]) == (MIG_2, [0], [MIG_2])
    assert "one MIG instance at most" in select(here, f"{MIG_1},{MIG_2}", tmp_path / "b")["error"]
    assert select(here, "auto", tmp_path / "c")["value"] == "1"  # a whole GPU first
    inherited = {"CUDA_VISIBLE_DEVICES": f"{MIG_1},{MIG_2}"}
    assert select(here, "auto:1", tmp_path / "d", **inherited)["value"] == MIG_2  # the idle one
    assert "hidden by the inherited" in select(here, "1", tmp_path / "e", **inherited)["error"]
    code = "from phalanx.dist import visible_devices_per_rank; print(visible_devices_per_rank(2))"
    assert here.run(code, **inherited) == f"['{MIG_1}', '{MIG_2}']\n"


# ---- too late

LATE = """
import ctypes, os, sys
from phalanx.dist.devices import select_devices
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,3"
if sys.argv[1] != "not loaded":
    library = ctypes.CDLL("libcuda.so.1")
    if sys.argv[1] == "started":
        library.cuInit(0)
try:
    print(select_devices("3").physical)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("state", ["not loaded", "loaded", "started"])
def test_cuda_started_by_any_library_is_too_late(machine: Callable[..., Machine], state: str) -> None:
    """As torch.cuda.is_available() does: torch.cuda.is_initialized() stays False."""
    text = machine().run(LATE, state)
    if state != "started":
        assert text == "(3,)\n"
    else:
        assert "select_devices('3') comes too late" in text
        assert "go on with the GPUs it has (3 GPUs)" in text
        assert "torch.cuda.set_device()" in text

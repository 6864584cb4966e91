"""Facts of a machine put together from probes, whatever the probes do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.tools.doctor import gather as module
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.facts_json import from_json
from phalanx.tools.doctor.gather import PROBES, age_of_this_process_s, gather, gather_node
from phalanx.tools.doctor.probes.scene import Scene
from tests.nvml.machine import GIB, GPU_IS_LOST, Machine, StandInGpu, build_libraries, uuid_of

PATIENCE_S = 60.0


def fake(answer: Any = None, act: Callable[[], Any] | None = None) -> Callable[[Scene], Any]:
    def probe(_: Scene) -> Any:
        if act is not None:
            act()
        return answer

    return probe


def fail() -> None:
    raise OSError("it broke")


def test_sections_are_put_together() -> None:
    probes = {
        "one": fake({"limits": {"nofile": 1, "nproc": None}, "messages": ["a"]}),
        "two": fake({"limits": {"nproc": 2}, "messages": ["b"], "driver": {"error": "x"}}),
    }
    facts = gather(Scene(), timeout_s=PATIENCE_S, torch=False, probes=probes)
    assert facts.limits is not None
    assert (facts.limits.nofile, facts.limits.nproc) == (1, 2)
    assert facts.messages == ("a", "b")
    assert facts.live
    assert facts.probes == ()


def test_a_probe_s_fault_is_named_and_costs_nothing_else() -> None:
    probes = {
        "raises": fake(act=fail),
        "crashes": fake(act=lambda: os.kill(os.getpid(), signal.SIGSEGV)),
        "fine": fake({"env": {"A": "1"}}),
        "not a dict": fake(7),
    }
    facts = gather(Scene(), timeout_s=PATIENCE_S, torch=False, probes=probes)
    assert facts.env == {"A": "1"}
    said = {probe.name: probe.error for probe in facts.probes}
    assert said["raises"] == "OSError: it broke"
    assert said["crashes"] == "ended by SIGSEGV"


def test_a_probe_that_hangs_is_named() -> None:
    facts = gather(Scene(), timeout_s=0.3, torch=False, probes={"NVML": fake(act=signal.pause)})
    assert [probe.name for probe in facts.probes] == ["NVML"]
    assert "in time" in facts.probes[0].error


def test_no_descriptors_for_the_probes() -> None:
    """Those that could not be asked are named, the others answer."""
    code = """
import json, resource
from phalanx.tools.doctor.facts_json import to_json
from phalanx.tools.doctor.gather import gather
from phalanx.tools.doctor.probes.scene import Scene
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
print(json.dumps(to_json(gather(Scene(), timeout_s=60, torch=False))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert any("could not be started" in probe["error"] for probe in facts["probes"])
    assert facts["driver"]


def test_the_job_is_kept() -> None:
    facts = gather(Scene(nnodes=2, loader_workers=4), timeout_s=PATIENCE_S, torch=False, probes={})
    assert facts.job is not None
    assert (facts.job.nnodes, facts.job.local_world_size, facts.job.loader_workers) == (2, None, 4)


def test_a_node_s_time_counts_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(module, "age_of_this_process_s", lambda: 1.5)
    monkeypatch.setattr(
        module, "gather", lambda scene, **options: given.append(options["timeout_s"]) or Facts()
    )
    gather_node(Scene(), timeout_s=5.0)
    gather_node(Scene(), timeout_s=1.0)
    assert given == [pytest.approx(3.1), 0.1]


def test_the_age_of_a_process() -> None:
    assert age_of_this_process_s() > 0.01


def test_this_machine() -> None:
    """Every probe answers here, with torch."""
    facts = gather(Scene(), timeout_s=PATIENCE_S)
    assert facts.probes == ()
    assert facts.torch is not None
    assert facts.torch.version is not None
    assert facts.torch.numpy_works is True
    assert facts.python is not None
    assert facts.python.executable == sys.executable
    assert facts.platform is not None
    assert facts.platform.system == "linux"
    assert facts.limits is not None
    assert facts.limits.nofile
    assert facts.disks
    assert any(package.name == "torch" for package in facts.packages or ())
    assert any(library.name.startswith("libtorch") for library in facts.libraries or ())


# with the stand-in NVML, in a process of its own


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libraries(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(libraries: Path, tmp_path: Path) -> Machine:
    return Machine(libraries, tmp_path, [])


_GATHER = """
import json
from phalanx.tools.doctor.facts_json import to_json
from phalanx.tools.doctor.gather import gather, PROBES
from phalanx.tools.doctor.probes.scene import Scene
print(json.dumps(to_json(gather(Scene(), timeout_s=30, torch=False, probes={"NVML": PROBES["NVML"]}))))
"""


def seen_by(machine: Machine) -> Facts:
    return from_json(json.loads(machine.run(_GATHER)))


def test_two_gpus_joined_by_nvlink(machine: Machine) -> None:
    numbers = {
        "pcie_gen": 1,
        "pcie_gen_max": 5,
        "pcie_width": 8,
        "pcie_width_max": 16,
        "throttle": 0x48,
        "ecc_mode": 1,
    }
    numbers |= {"remapped": 3, "remap_pending": 1, "bar1": 256 << 20, "persistence": 0, "fabric_state": 3}
    first = StandInGpu(uuid=uuid_of("a"), links=(1, 1), numbers=numbers, uncorrected_ecc=2)
    second = StandInGpu(uuid=uuid_of("b"), links=(0, 0), mode=3, compute={77: GIB})
    machine.describe([first, second], driver="550.54.15", cuda=12040)
    facts = seen_by(machine)
    assert facts.driver is not None
    assert (facts.driver.version, facts.driver.cuda) == ("550.54.15", "12.4")
    one, two = facts.gpus or ()
    assert (one.uuid, one.capability, one.name) == (uuid_of("a"), "9.0", "NVIDIA H100 80GB HBM3")
    assert (one.pcie_width, one.pcie_width_max, one.pcie_gen, one.pcie_gen_max) == (8, 16, 1, 5)
    assert one.throttle_reasons == ("hw_slowdown", "hw_thermal_slowdown")
    assert (one.ecc_enabled, one.ecc_uncorrectable) == (True, 2)
    assert (one.remapped_rows_uncorrectable, one.remap_pending, one.remap_failed) == (3, True, False)
    assert (one.bar1_total_bytes, one.persistence, one.fabric_state) == (256 << 20, False, "Completed")
    assert one.nvlinks_active == 2
    assert (two.compute_mode, two.process_count, two.pcie_width) == ("exclusive", 1, None)
    assert facts.topology is not None
    (link,) = facts.topology.links or ()
    assert (link.first, link.second, link.kind) == (0, 1, "NV2")


def test_a_lost_gpu_hides_no_other(machine: Machine) -> None:
    machine.describe(
        [
            StandInGpu(uuid=uuid_of("a"), fails={"all": GPU_IS_LOST}),
            StandInGpu(uuid=uuid_of("b"), near={0: 50}),
        ]
    )
    facts = seen_by(machine)
    lost, well = facts.gpus or ()
    assert (lost.index, lost.problem) == (0, "GPU is lost")
    assert (well.index, well.problem) == (1, None)


@pytest.mark.parametrize(
    ("code", "words"),
    [(9, "Driver Not Loaded"), (18, "Driver/library version mismatch"), (4, "Insufficient Permissions")],
)
def test_a_driver_that_does_not_start(machine: Machine, code: int, words: str) -> None:
    machine.describe([], init=code)
    facts = seen_by(machine)
    assert facts.driver is not None
    assert facts.driver.error == words
    assert facts.gpus is None


def test_mig(machine: Machine) -> None:
    instance = StandInGpu(uuid=uuid_of("c", "MIG"), total_bytes=10 * GIB)
    machine.describe([StandInGpu(uuid=uuid_of("a"), migs=(instance,))])
    (gpu,) = seen_by(machine).gpus or ()
    assert (gpu.mig_enabled, gpu.mig_uuids) == (True, (uuid_of("c", "MIG"),))


def test_a_machine_without_the_library() -> None:
    facts = gather(Scene(), timeout_s=PATIENCE_S, torch=False, probes={"NVML": PROBES["NVML"]})
    assert facts.driver is not None
    assert facts.driver.error in ("NVML Shared Library Not Found", "Driver Not Loaded", None)


# torches of other kinds, in front of the real one


def torch_says(folder: Path, code: str, timeout_s: float = PATIENCE_S) -> Facts:
    """What is gathered where the package torch is this code."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return gather(Scene(environ=environ), timeout_s=timeout_s, probes={})


def test_a_torch_that_hangs(tmp_path: Path) -> None:
    facts = torch_says(tmp_path, "import signal\nwhile True: signal.pause()", timeout_s=0.5)
    assert facts.torch is not None
    assert (facts.torch.installed, facts.torch.timed_out) == (True, True)


def test_a_torch_that_crashes(tmp_path: Path) -> None:
    facts = torch_says(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert facts.torch is not None
    assert (facts.torch.installed, facts.torch.signal) == (True, "SIGSEGV")


def test_a_torch_that_raises(tmp_path: Path) -> None:
    facts = torch_says(tmp_path, "raise ImportError('libcudnn.so.9: cannot open shared object file')")
    assert facts.torch is not None
    assert facts.torch.error == "ImportError: libcudnn.so.9: cannot open shared object file"
    assert facts.torch.file == str(tmp_path / "torch" / "__init__.py")


def test_a_torch_that_ends_the_process(tmp_path: Path) -> None:
    facts = torch_says(tmp_path, "import os\nos.write(2, b'terminate called\\n')\nos._exit(3)")
    assert facts.torch is not None
    assert (facts.torch.installed, facts.torch.error) == (True, "terminate called")


def test_a_folder_named_torch_is_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wins over nothing: a real torch, even later on the path, is taken before a folder without __init__.py."""
    (tmp_path / "torch").mkdir()
    found = _bare_python(tmp_path)
    assert found["torch"]["installed"] is False
    assert str(tmp_path / "torch") in found["torch"]["error"]


def test_no_torch(tmp_path: Path) -> None:
    assert _bare_python(tmp_path)["torch"] == {
        "installed": False,
        "error": "ModuleNotFoundError: No module named 'torch'",
    }


def _bare_python(folder: Path) -> dict[str, Any]:
    """The answer of a Python without any package."""
    child = Path(module.__file__).parent / "probes" / "torch_child.py"
    done = subprocess.run(
        [sys.executable, "-S", "-c", child.read_text()],
        cwd=folder,
        capture_output=True,
        check=True,
        text=True,
    )
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer

"""CUDA_VISIBLE_DEVICES by the driver's rules, and choosing GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist import gpu_locks
from phalanx.dist.devices import (
    InvalidVisibleDevices,
    VisibleDevices,
    select_devices,
    visible_devices,
    visible_devices_per_rank,
)
from phalanx.dist.gpus import Gpu, nvml_inventory

A, B, C, D = (f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "abcd")
FOUR = [Gpu(i, uuid, f"0000000{i}:00:00.0", "H100", processes=()) for i, uuid in enumerate((A, B, C, D))]
MIG_1, MIG_2 = "MIG-11111111-2222-3333-4444-555555555555", "MIG-99999999-2222-3333-4444-555555555555"
WITH_MIG = [Gpu(0, A, name="A100"), Gpu(1, B, name="A100", mig_uuids=(MIG_1, MIG_2))]


def see(value: str | None, inventory: int | list[Gpu] | None = 4, **more: str) -> VisibleDevices:
    return visible_devices({**more, **({} if value is None else {"CUDA_VISIBLE_DEVICES": value})}, inventory)


@pytest.mark.parametrize(
    ("value", "physical"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("  ", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("none", ()),
        ("2,3", (2, 3)),
        ("1,0", (1, 0)),
        ("3, 1 ,0", (3, 1, 0)),
        ("0,2,-1,1", (0, 2)),  # NVIDIA's own example
        ("0,9,1", (0,)),
        ("7", ()),
        ("0,,1", (0,)),
        (",0", ()),
        ("0,", (0,)),
        ("0,0", ()),
        ("1,2,1", ()),
        ("1,01", ()),
        ("0,9,0", (0,)),  # what comes after the bad entry is not read
        ("1gpu2,2ampere", (1, 2)),
        ("+1,2", (1, 2)),
        ("0x1,2", (0, 2)),
        ("1.5", (1,)),
        ("1;2", (1,)),
        ("all", ()),
        (f"0,{A}", (0,)),
        ("٣", ()),  # a digit, not one of C's
    ],
)
def test_numbers(value: str | None, physical: tuple[int, ...]) -> None:
    found = see(value)
    assert found.physical == physical
    assert len(found) == len(physical)
    for logical, number in enumerate(physical):
        assert found.to_physical(logical) == number
        assert found.to_logical(number) == logical


@pytest.mark.parametrize(
    ("value", "physical"),
    [
        (A, (0,)),
        (f"{C},{A}", (2, 0)),
        ("GPU-c,GPU-a", (2, 0)),
        (f"{B}, {A}", (1, 0)),
        ("GPU-", ()),  # fits four
        ("GPU-e", ()),
        (A + "0", ()),
        ("GPU-a,GPU-e,GPU-b", (0,)),
        (f"{A},GPU-aaaa", ()),  # the same one twice
        (f"{A},1", (0,)),
        ("gpu-a", ()),
    ],
)
def test_uuids(value: str, physical: tuple[int, ...]) -> None:
    assert see(value, FOUR).physical == physical


def test_a_prefix_that_fits_two_gpus_is_no_device() -> None:
    twins = [Gpu(0, "GPU-aaaa1"), Gpu(1, "GPU-aaaa2")]
    assert see("GPU-aaaa1,GPU-aaaa2", twins).physical == (0, 1)
    found = see("GPU-aaaa2,GPU-aaaa", twins)
    assert found.physical == (1,)
    assert "'GPU-aaaa' fits 2 GPUs." in found.notes[0]


def test_mig() -> None:
    assert see(MIG_1, WITH_MIG).physical == (1,)
    assert see(f"MIG-{B}/1/0", WITH_MIG).physical == (1,)
    unknown = see(MIG_1, 2)  # never "no GPU"
    assert unknown.physical == (None,)
    assert len(unknown) == 1
    both = see(f"{MIG_1},{MIG_2}", WITH_MIG)
    assert both.physical == (1,)
    assert both.dropped == (MIG_2,)
    assert "one MIG instance at most" in both.notes[-1]
    assert see(f"{MIG_1},{MIG_1}", WITH_MIG).physical == ()
    assert see("MIG-0", WITH_MIG).physical == ()
    assert "split into MIG" in see("1", WITH_MIG).notes[0]


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.dist.visibility.nvml_inventory", lambda: None)
    unset, listed, by_uuid = see(None, None), see("5,1", None), see(A, None)
    assert (unset.physical, unset.known) == ((), False)
    assert "number of GPUs is unknown" in unset.notes[0]
    assert (listed.physical, listed.known) == ((5, 1), False)
    assert (by_uuid.physical, by_uuid.uuids) == ((None,), (A,))


UNLIKE = [Gpu(0, A, name="slow"), Gpu(1, B, name="fast")]


def test_numbers_are_not_guessed_when_cuda_counts_by_speed() -> None:
    # NVML 0 is the slow card, CUDA 0 the fast one
    found = see("0", UNLIKE)
    assert found.physical == (None,)
    assert "CUDA counts from the fastest" in found.notes[-1]
    with pytest.raises(InvalidVisibleDevices, match="export CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        found.to_physical(0)
    assert see("0", UNLIKE, CUDA_DEVICE_ORDER="PCI_BUS_ID").physical == (0,)
    assert see(B, UNLIKE).physical == (1,)
    assert see(None, UNLIKE).physical == (None, None)
    known = [Gpu(0, A, name="slow", cuda_ordinal=1), Gpu(1, B, name="fast", cuda_ordinal=0)]
    assert see("0", known).physical == (1,)
    assert see(None, known).physical == (1, 0)


def test_the_message_for_a_bad_entry() -> None:
    with pytest.raises(InvalidVisibleDevices) as error:
        see("0,9,1").check()
    assert str(error.value) == (
        "CUDA_VISIBLE_DEVICES='0,9,1': '9' is not one of this node's GPUs (0-3).\n"
        "CUDA hides that entry and every one after it: 1 of 3 GPUs would be visible, and LOCAL_RANK 1 and up would have "
        "no device.\n"
        "Fix: export CUDA_VISIBLE_DEVICES=0,1"
    )
    with pytest.raises(
        InvalidVisibleDevices, match=r"0 of 1 GPUs would be visible, and no rank would have a device"
    ):
        see("7").check()
    with pytest.raises(
        InvalidVisibleDevices, match=r"(?s)'1' names a GPU that is in the list already.*=1,2$"
    ):
        see("1,2,1").check()
    assert see("1,2").check().physical == (1, 2)


def test_an_index_that_is_not_visible() -> None:
    with pytest.raises(
        InvalidVisibleDevices, match=r"cuda:1 does not exist: visible devices are \{0: physical 1\}"
    ):
        see("1").to_physical(1)
    with pytest.raises(InvalidVisibleDevices, match="GPU 0 is not visible"):
        see("1").to_logical(0)
    with pytest.raises(InvalidVisibleDevices, match="no device is visible"):
        see("").to_physical(0)
    with pytest.raises(ValueError, match="inventory=-1"):
        see("0", -1)


@given(st.lists(st.integers(0, 7), unique=True), st.integers(1, 8))
def test_any_list_of_numbers(numbers: list[int], count: int) -> None:
    expected = []
    for number in numbers:
        if number >= count:
            break
        expected.append(number)
    assert see(",".join(map(str, numbers)), count).physical == tuple(expected)


@given(st.text("019, +-xGPUMI/a\t", max_size=20), st.sampled_from([0, 1, 4, None]))
def test_any_text_is_read(value: str, count: int | None) -> None:
    found = see(value, FOUR if count is None else count)
    assert len(found) <= value.count(",") + 1
    assert len({p for p in found.physical if p is not None}) == sum(p is not None for p in found.physical)
    if found.dropped:
        with pytest.raises(InvalidVisibleDevices, match="Fix: "):
            found.check()


# ---- choosing


@pytest.fixture
def locks(tmp_path: Path):
    yield tmp_path / "locks"
    for uuid in list(gpu_locks._held):
        gpu_locks.release(uuid)


def choose(
    spec: str, locks: Path, gpus: list[Gpu] = FOUR, **environ: str
) -> tuple[VisibleDevices, dict[str, str]]:
    variables = dict(environ)
    return select_devices(spec, variables, gpus, locks), variables


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("2,1,3", "2,1,3"),
        ("all", "0,1,2,3"),
        (f"{C},0", "2,0"),
        ("GPU-d", "3"),
        ("auto:2", "0,1"),
        ("auto", "0,1,2,3"),
    ],
)
def test_choosing(locks: Path, spec: str, expected: str) -> None:
    found, variables = choose(spec, locks)
    assert variables == {"CUDA_VISIBLE_DEVICES": expected, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found.physical == tuple(int(number) for number in expected.split(","))


def test_choosing_none(locks: Path) -> None:
    found, variables = choose("cpu", locks)
    assert variables == {"CUDA_VISIBLE_DEVICES": ""}
    assert len(found) == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4", r"'4' is not one of this node's GPUs \(0-3\)"),
        ("1,1", "GPU 1 is named twice"),
        ("0,a", "'a' is no GPU's number or UUID"),
        ("GPU-", "fits 4 GPUs"),
        ("auto:0", "takes no GPU"),
        ("auto:9", "9 idle GPUs asked for, 4 found"),
        ("auto:x", "no choice of GPUs"),
        ("", "no choice of GPUs"),
    ],
)
def test_bad_choices(locks: Path, spec: str, message: str) -> None:
    with pytest.raises(InvalidVisibleDevices, match=message):
        choose(spec, locks)
    assert not gpu_locks._held


def test_an_inherited_list_is_an_upper_bound(locks: Path) -> None:
    assert choose("all", locks, CUDA_VISIBLE_DEVICES="3,1")[1]["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert choose("auto:1", locks, CUDA_VISIBLE_DEVICES=D)[1]["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(
        InvalidVisibleDevices,
        match=r"GPU 0 is hidden by the inherited CUDA_VISIBLE_DEVICES, which leaves 3, 1",
    ):
        choose("0", locks, CUDA_VISIBLE_DEVICES="3,1")
    with pytest.raises(InvalidVisibleDevices, match="cannot be told"):
        choose("0", locks, UNLIKE, CUDA_VISIBLE_DEVICES="0")


def test_auto_takes_idle_gpus_and_names_who_has_the_rest(locks: Path) -> None:
    gpus = [
        Gpu(0, A, processes=(4711,)),
        Gpu(1, B, processes=(), memory_used_bytes=5 << 30),
        Gpu(2, C, processes=(), compute_mode="prohibited"),
        Gpu(3, D, processes=(), memory_used_bytes=400 << 20),
    ]
    assert choose("auto:1", locks, gpus)[1]["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(InvalidVisibleDevices) as error:
        choose("auto:2", locks, gpus)
    for words in ("process 4711", "GPU 1: 5.0 GiB in use", "GPU 2: compute mode is prohibited"):
        assert words in str(error.value)


HOLDS = """
import sys, time
from pathlib import Path
from phalanx.dist import gpu_locks
assert gpu_locks.hold(sys.argv[1], Path(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_gpu_is_held_until_the_job_ends(locks: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", HOLDS, A, str(locks)], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == "held\n"
        assert choose("auto:2", locks)[1]["CUDA_VISIBLE_DEVICES"] == "1,2"
        with pytest.warns(UserWarning, match="GPU 0 is held by another job"):
            assert choose("0", locks)[1]["CUDA_VISIBLE_DEVICES"] == "0"  # by number: on purpose
        with pytest.raises(InvalidVisibleDevices, match=rf"GPU 0: held by another job \(process {job.pid}\)"):
            choose("auto:4", locks)
    finally:
        job.kill()
        job.communicate()
    assert gpu_locks.hold(A, locks)
    assert locks.stat().st_mode & 0o7777 == 0o1777
    assert (locks / f"{A}.lock").stat().st_mode & 0o777 == 0o666


def test_too_late_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"comes too late.*\n.*\nFix: .*set_device"):
        select_devices("1")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "1"


def test_no_nvml_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.dist.visibility.nvml_inventory", lambda: None)
    with pytest.raises(InvalidVisibleDevices, match="NVML does not answer"):
        select_devices("0", {})


def test_torch_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from phalanx.dist import devices; import phalanx.dist.environments; "
        "print(devices.visible_devices({'CUDA_VISIBLE_DEVICES': '1'}, 2).physical)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "(1,)\n"


# ---- NVML


class _NvmlError(Exception):
    pass


def _fake_nvml(answers: bool) -> types.SimpleNamespace:
    def pci(handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(busId=b"00000000:07:00.0")

    def memory(handle: int, version: int | None = None) -> types.SimpleNamespace:
        if version is not None:
            raise _NvmlError("old driver")
        return types.SimpleNamespace(total=80 << 30, used=1 << 30)

    def fails(*args: object) -> None:
        raise _NvmlError("not supported")

    def init() -> None:
        if not answers:
            raise _NvmlError("no driver")

    return types.SimpleNamespace(
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlMemory_v2=2,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=pci,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUUID=lambda handle: A,
        nvmlDeviceGetName=lambda handle: b"H100",
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [types.SimpleNamespace(pid=7)],
        nvmlDeviceGetComputeMode=lambda handle: 3,
        nvmlDeviceGetMigMode=fails,
    )


def test_what_nvml_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(True))  # type: ignore[arg-type]
    (gpu,) = nvml_inventory() or []
    assert gpu == Gpu(0, A, "00000000:07:00.0", "H100", None, 80 << 30, 1 << 30, (7,), "exclusive")
    monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(False))  # type: ignore[arg-type]
    assert nvml_inventory() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert nvml_inventory() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_agrees() -> None:
    """CUDA itself, asked in a fresh process, shows what we say it does."""
    gpus = nvml_inventory()
    assert gpus
    count = len(gpus)
    values = [
        "",
        "0",
        "0,0",
        "-1",
        f"0,{count}",
        "0x0",
        " 0",
        gpus[0].uuid,
        gpus[0].uuid[:12],
        f"{gpus[0].uuid},0",
        "GPU-0",
    ]
    code = "import torch; print(torch._C._cuda_getDeviceCount())"
    for value in values:
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        shown = int(subprocess.check_output([sys.executable, "-c", code], env=environ, text=True))
        assert len(visible_devices(environ, gpus)) == shown, value


# ---- bad input

ANYTHING = st.one_of(
    st.none(), st.integers(), st.floats(), st.booleans(), st.binary(), st.lists(st.integers())
)


@given(ANYTHING.filter(lambda value: not isinstance(value, str)))
def test_a_choice_that_is_no_text(value: object) -> None:
    with pytest.raises(ValueError, match=r"select_devices\((.|\n)*Fix: "):
        select_devices(value, {}, FOUR)  # type: ignore[arg-type]


@given(st.text(max_size=12))
def test_any_text_is_a_choice_or_a_mistake(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    variables: dict[str, str] = {}
    folder = tmp_path_factory.getbasetemp() / "any-text"
    mistake = ""
    try:
        found = select_devices(text, variables, FOUR, folder)
    except InvalidVisibleDevices as error:
        mistake = str(error)
    finally:
        for uuid in list(gpu_locks._held):
            gpu_locks.release(uuid)
    if mistake:
        assert "Fix: " in mistake
        assert variables == {}
    else:
        assert len(found) == len([entry for entry in variables["CUDA_VISIBLE_DEVICES"].split(",") if entry])


@pytest.mark.parametrize("inventory", ["4", 1.5, True, [1], [Gpu(0), Gpu(0)], [Gpu(1)], {0: A}])
def test_bad_inventories(inventory: object) -> None:
    with pytest.raises(ValueError, match="inventory"):
        visible_devices({}, inventory)  # type: ignore[arg-type]


@pytest.mark.parametrize("environ", [3, "CUDA_VISIBLE_DEVICES=1", {"CUDA_VISIBLE_DEVICES": 1}])
def test_bad_environments(environ: object) -> None:
    with pytest.raises(ValueError, match="environ: a mapping"):
        visible_devices(environ, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="environ: a mapping"):
        visible_devices_per_rank(1, environ, 4)  # type: ignore[arg-type]


@given(ANYTHING)
def test_any_index_is_a_device_or_a_mistake(index: object) -> None:
    found = see("2,0")
    for ask, known in ((found.to_physical, {0: 2, 1: 0}), (found.to_logical, {2: 0, 0: 1})):
        if type(index) is int and index in known:
            assert ask(index) == known[index]
        else:
            with pytest.raises(InvalidVisibleDevices, match="Fix: "):
                ask(index)  # type: ignore[arg-type]


def test_each_rank_gets_one_mig_instance() -> None:
    both = {"CUDA_VISIBLE_DEVICES": f"{MIG_2}, MIG-1"}
    assert visible_devices_per_rank(2, both, WITH_MIG) == [MIG_2, MIG_1]
    assert visible_devices_per_rank(1, both, WITH_MIG) == [MIG_2]
    assert visible_devices_per_rank(2, {"CUDA_VISIBLE_DEVICES": "0,1"}, WITH_MIG) is None
    assert visible_devices_per_rank(2, {}, WITH_MIG) is None
    with pytest.raises(InvalidVisibleDevices, match=r"2 MIG instances for 3 ranks(.|\n)*Fix: start 2 ranks"):
        visible_devices_per_rank(3, both, WITH_MIG)
    with pytest.raises(InvalidVisibleDevices, match="is there twice"):
        visible_devices_per_rank(1, {"CUDA_VISIBLE_DEVICES": f"{MIG_1},MIG-1"}, WITH_MIG)
    with pytest.raises(InvalidVisibleDevices, match="fits 0 of this node's 2 MIG instances"):
        visible_devices_per_rank(1, {"CUDA_VISIBLE_DEVICES": "MIG-7"}, WITH_MIG)


@pytest.mark.parametrize("ranks", [0, -1, 1.0, "2", None, True])
def test_bad_numbers_of_ranks(ranks: object) -> None:
    with pytest.raises(ValueError, match="local_world_size="):
        visible_devices_per_rank(ranks, {}, 2)  # type: ignore[arg-type]

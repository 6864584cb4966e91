"""GPUs, driver version and topology as NVML tells them; it may hang with a broken driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable
from typing import Any

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene

_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
_UNCORRECTED, _VOLATILE, _AGGREGATE = 1, 0, 1
_THROTTLES = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_FABRIC_STATES = {0: "Not Supported", 1: "Not Started", 2: "In Progress", 3: "Completed"}
_NVLINKS = 18


def probe(scene: Scene) -> Partial:
    """``driver``, ``gpus`` and ``topology``, as far as NVML answers."""
    try:
        import pynvml
    except Exception as error:  # not only when it is missing: a broken file must not hide the rest
        return {"driver": {"error": f"nvidia-ml-py cannot be imported: {error}"}}
    try:
        pynvml.nvmlInit()
    except Exception as error:
        library = _library_version()
        return {
            "driver": {
                "error": _in_words(pynvml, error),
                **({"user_version": library} if library else {}),
            }
        }
    driver = {
        "version": _text(_ask(pynvml.nvmlSystemGetDriverVersion)),
        "cuda": _cuda(_ask(pynvml.nvmlSystemGetCudaDriverVersion)),
        "user_version": _library_version(),
    }
    handles = _handles(pynvml)
    gpus = [_gpu(pynvml, scene, index, handle) for index, handle in enumerate(handles)]
    return {
        "driver": {name: value for name, value in driver.items() if value},
        "gpus": gpus,
        "topology": {"links": _links(pynvml, handles)},
    }


def _handles(nvml: Any) -> list[Any]:
    """A handle for each GPU, or the error that stood in its place."""
    found: list[Any] = []
    for index in range(int(_ask(nvml.nvmlDeviceGetCount) or 0)):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetUUID(handle)  # a handle may be had of a GPU that has fallen off the bus
            found.append(handle)
        except Exception as error:
            found.append(error)
    return found


def _gpu(nvml: Any, scene: Scene, index: int, handle: Any) -> Partial:
    if isinstance(handle, Exception):
        return {"index": index, "problem": _in_words(nvml, handle)}
    answers = {"index": index, **_identity(nvml, handle), **_state(nvml, handle), **_health(nvml, handle)}
    answers.update(_links_of(nvml, handle))
    bus = answers.get("pci_bus_id") or ""
    node = scene.number(f"/sys/bus/pci/devices/{bus[-12:].lower()}/numa_node") if bus else None
    answers["numa_node"] = node if node is not None and node >= 0 else None
    return {name: value for name, value in answers.items() if value is not None}


def _identity(nvml: Any, handle: Any) -> Partial:
    capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = _ask(nvml.nvmlDeviceGetMigMode, handle)
    pci = _ask(nvml.nvmlDeviceGetPciInfo, handle)
    return {
        "name": _text(_ask(nvml.nvmlDeviceGetName, handle)),
        "uuid": _text(_ask(nvml.nvmlDeviceGetUUID, handle)),
        "pci_bus_id": _text(getattr(pci, "busId", None)),
        "capability": None if capability is None else "{}.{}".format(*capability),
        "mig_enabled": None if mig is None else bool(mig[0]),
        "mig_uuids": _mig_uuids(nvml, handle) if mig and mig[0] else None,
    }


def _mig_uuids(nvml: Any, handle: Any) -> list[str]:
    count = int(_ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
    instances = (_ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index) for index in range(count))
    uuids = (_text(_ask(nvml.nvmlDeviceGetUUID, instance)) for instance in instances if instance is not None)
    return [uuid for uuid in uuids if uuid]


def _state(nvml: Any, handle: Any) -> Partial:
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle, getattr(nvml, "nvmlMemory_v2", None))
    memory = memory or _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    mode = _ask(nvml.nvmlDeviceGetComputeMode, handle)
    processes = _ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    power = _ask(nvml.nvmlDeviceGetPowerUsage, handle)
    persistence = _ask(nvml.nvmlDeviceGetPersistenceMode, handle)
    bar = _ask(nvml.nvmlDeviceGetBAR1MemoryInfo, handle)
    return {
        "memory_total_bytes": None if memory is None else int(memory.total),
        "memory_used_bytes": None if memory is None else int(memory.used),
        "compute_mode": None if mode is None else _MODES.get(int(mode)),
        "process_count": None if processes is None else len(processes),
        "power_w": None if power is None else power / 1000,
        "temperature_c": _ask(nvml.nvmlDeviceGetTemperature, handle, 0),
        "utilization_percent": getattr(_ask(nvml.nvmlDeviceGetUtilizationRates, handle), "gpu", None),
        "persistence": None if persistence is None else bool(persistence),
        "bar1_total_bytes": getattr(bar, "bar1Total", None),
    }


def _health(nvml: Any, handle: Any) -> Partial:
    ecc = _ask(nvml.nvmlDeviceGetEccMode, handle)
    remapped = _ask(nvml.nvmlDeviceGetRemappedRows, handle)
    retired = _ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    reasons = _ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return {
        "pcie_gen": _ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_gen_max": _ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width": _ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_width_max": _ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "ecc_enabled": None if ecc is None else bool(ecc[0]),
        "ecc_uncorrectable": _ask(nvml.nvmlDeviceGetTotalEccErrors, handle, _UNCORRECTED, _VOLATILE),
        "ecc_uncorrectable_total": _ask(nvml.nvmlDeviceGetTotalEccErrors, handle, _UNCORRECTED, _AGGREGATE),
        "remapped_rows_uncorrectable": remapped and int(remapped[1]),
        "remap_pending": remapped and bool(remapped[2]),
        "remap_failed": remapped and bool(remapped[3]),
        "retired_pages_pending": None if retired is None else bool(retired),
        "throttle_reasons": None
        if reasons is None
        else [name for bit, name in _THROTTLES.items() if int(reasons) & bit],
        "fabric_state": _fabric_state(nvml, handle),
    }


def _fabric_state(nvml: Any, handle: Any) -> str | None:
    """Whether the GPU has joined its NVSwitches; a status other than 0 is an error of the fabric."""
    kind = getattr(nvml, "c_nvmlGpuFabricInfo_t", None)
    if kind is None:
        return None
    info = kind()
    if _ask(nvml.nvmlDeviceGetGpuFabricInfo, handle, ctypes.byref(info)) is None:
        return None
    state = _FABRIC_STATES.get(int(info.state), f"state {int(info.state)}")
    return state if not int(info.status) else f"{state} (error {int(info.status)})"


def _links_of(nvml: Any, handle: Any) -> Partial:
    states = []
    for link in range(_NVLINKS):
        state = _ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break
        states.append(bool(state))
    if not states:
        return {}
    return {"nvlinks_active": sum(states), "nvlinks_inactive": len(states) - sum(states)}


def _links(nvml: Any, handles: list[Any]) -> list[Partial]:
    """How each two GPUs are joined, as nvidia-smi topo -m says it: NVLinks where there are some."""
    live = [(index, handle) for index, handle in enumerate(handles) if not isinstance(handle, Exception)]
    peers = {index: _peers(nvml, handle) for index, handle in live}
    by_bus = {index: _bus(nvml, handle) for index, handle in live}
    found = []
    for place, (first, one) in enumerate(live):
        for second, other in live[place + 1 :]:
            direct = peers[first].count(by_bus[second])
            switched = min(peers[first].count("switch"), peers[second].count("switch"))
            level = _ask(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
            kind = f"NV{direct or switched}" if direct or switched else _LEVELS.get(int(level or 0), "")
            if direct or switched or level is not None:
                found.append({"first": first, "second": second, "kind": kind})
    return found


def _peers(nvml: Any, handle: Any) -> list[str]:
    """The other end of each active NVLink: a PCI bus id, or "switch"."""
    found = []
    for link in range(_NVLINKS):
        if not _ask(nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        kind = _ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        remote = _ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        found.append("switch" if kind == 2 else _short(_text(getattr(remote, "busId", None)) or ""))
    return found


def _bus(nvml: Any, handle: Any) -> str:
    pci = _ask(nvml.nvmlDeviceGetPciInfo, handle)
    return _short(_text(getattr(pci, "busId", None)) or "")


def _short(bus: str) -> str:
    """NVML writes the domain with eight digits or four."""
    return bus[-12:].lower()


def _in_words(nvml: Any, error: Exception) -> str:
    """The error as nvidia-smi words it, where it does."""
    codes = {
        getattr(nvml, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", -1): "Driver/library version mismatch",
        getattr(nvml, "NVML_ERROR_DRIVER_NOT_LOADED", -1): "Driver Not Loaded",
        getattr(nvml, "NVML_ERROR_LIBRARY_NOT_FOUND", -1): "NVML Shared Library Not Found",
        getattr(nvml, "NVML_ERROR_GPU_IS_LOST", -1): "GPU is lost",
        getattr(nvml, "NVML_ERROR_RESET_REQUIRED", -1): "GPU requires reset",
        getattr(nvml, "NVML_ERROR_NO_PERMISSION", -1): "Insufficient Permissions",
    }
    code = getattr(error, "value", None)
    return codes.get(code) or f"NVML: {error}" if isinstance(code, int) else f"NVML: {error}"


def _library_version() -> str | None:
    """The driver that the user-space libraries belong to: in the name of the file that is mapped."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            if "libnvidia-ml.so" in line:
                path = os.path.realpath(line.split(None, 5)[-1].strip())
                match = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", path)
                return match[1] if match else None
    return None


def _cuda(number: int | None) -> str | None:
    return None if not number else f"{number // 1000}.{number % 1000 // 10}"


def _ask(function: Callable[..., Any], *args: Any) -> Any:
    """NVML's answer, None when this GPU, driver or nvidia-ml-py has none."""
    try:
        return function(*args)
    except Exception:
        return None


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

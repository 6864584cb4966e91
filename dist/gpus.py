"""This node's GPUs as NVML lists them, without torch or CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU of this node. None, or an empty text, where NVML has no answer.

    Args:
        index: NVML's and nvidia-smi's number: by PCI bus.
        uuid: ``GPU-...``.
        pci_bus_id: ``00000000:07:00.0``.
        name: ``NVIDIA H100 80GB HBM3``.
        cuda_ordinal: CUDA's own number with CUDA_DEVICE_ORDER unset, where it is known.
        memory_total_bytes: Its memory.
        memory_used_bytes: What is in use.
        processes: Process ids that compute on it.
        compute_mode: ``default``, ``exclusive`` or ``prohibited``.
        mig_uuids: Its MIG instances, ``MIG-...``.
        busy_migs: Those of them that a process uses.
        problem: Why it cannot be used, such as having fallen off the bus; empty when it can.
    """

    index: int
    uuid: str = ""
    pci_bus_id: str = ""
    name: str = ""
    cuda_ordinal: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    processes: tuple[int, ...] | None = None
    compute_mode: str | None = None
    mig_uuids: tuple[str, ...] = ()
    busy_migs: tuple[str, ...] = ()
    problem: str = ""


IDLE_MIG_MEMORY_BYTES = 256 << 20  # an instance nobody uses shows some tens of MiB
_COMPUTE_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}


def nvml_inventory() -> list[Gpu] | None:
    """This node's GPUs by NVML, in its order; None where NVML is missing or does not answer (no driver).

    CUDA_VISIBLE_DEVICES plays no part: NVML sees every GPU of the node or container.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no nvidia-ml-py, no library, no driver: all the same here
        return None
    try:
        count = int(pynvml.nvmlDeviceGetCount())
        return [_read(pynvml, index) for index in range(count)]
    except Exception:
        return None
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        problem = _lost(nvml, handle)
    except Exception as error:  # one GPU's fault must not hide the others
        return Gpu(index, problem=f"NVML cannot reach it ({error})")
    instances = _mig_instances(nvml, handle)
    pci = _ask(nvml.nvmlDeviceGetPciInfo, handle)
    memory = _memory(nvml, handle)
    processes = _ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    mode = _ask(nvml.nvmlDeviceGetComputeMode, handle)
    return Gpu(
        index=index,
        uuid=_text(_ask(nvml.nvmlDeviceGetUUID, handle)),
        pci_bus_id=_text(getattr(pci, "busId", "")),
        name=_text(_ask(nvml.nvmlDeviceGetName, handle)),
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_used_bytes=None if memory is None else int(memory.used),
        processes=None if processes is None else tuple(int(process.pid) for process in processes),
        compute_mode=None if mode is None else _COMPUTE_MODES.get(int(mode)),
        mig_uuids=tuple(instances),
        busy_migs=tuple(uuid for uuid, busy in instances.items() if busy),
        problem=problem,
    )


def _memory(nvml: Any, handle: Any) -> Any:
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle, getattr(nvml, "nvmlMemory_v2", None))
    if memory is None:  # an old driver: what it reserves for itself counts as used
        memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    return memory


def _lost(nvml: Any, handle: Any) -> str:
    """Whether NVML says that the GPU has fallen off the bus, or needs a reset: its handle may be had all the same."""
    try:
        nvml.nvmlDeviceGetUUID(handle)
    except Exception as error:
        code = getattr(error, "value", None)
        gone = {getattr(nvml, f"NVML_ERROR_{name}", -1) for name in ("GPU_IS_LOST", "RESET_REQUIRED")}
        return f"NVML cannot reach it ({error})" if code in gone else ""
    return ""


def _mig_instances(nvml: Any, handle: Any) -> dict[str, bool]:
    """UUID of each MIG instance, and whether somebody uses it."""
    mode = _ask(nvml.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return {}
    found = {}
    for index in range(int(_ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)):
        instance = _ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if instance is not None:
            memory = _memory(nvml, instance)
            in_use = memory is not None and memory.used > IDLE_MIG_MEMORY_BYTES
            processes = _ask(nvml.nvmlDeviceGetComputeRunningProcesses, instance)
            found[_text(_ask(nvml.nvmlDeviceGetUUID, instance))] = bool(processes) or in_use
    return {uuid: busy for uuid, busy in found.items() if uuid}


def _ask(function: Callable[..., Any], *args: Any) -> Any:
    """NVML's answer, None when this GPU or driver has none."""
    try:
        return function(*args)
    except Exception:
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")

"""Readings from NVML. Every answer may be missing, and the rest still counts."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.dist.gpus import Gpu, is_busy_mig, read_gpu, why_busy
from phalanx.dist.nvml import Nvml, NvmlDevice
from phalanx.tools.gpus.readings import DeviceReading, GpuReading, Holder, ProcessReading

BUSY_PERCENT = 5  # a GPU that works this much has a user, whatever the list of processes says

#: Who holds a device, by the name of its lock; who a process is, by its id, memory and kind.
Describe = Callable[[int, "int | None", str], ProcessReading]
FindHolder = Callable[[str], "Holder | None"]


class NvmlReader:
    """Turns NVML's devices into readings.

    Args:
        describe: Finds out who a process is.
        holder_of: Finds out who holds a device.
    """

    def __init__(self, describe: Describe, holder_of: FindHolder) -> None:
        self._describe, self._holder_of = describe, holder_of

    def gpu(self, device: NvmlDevice, ordinal: int | None) -> GpuReading:
        """One GPU with its MIG instances."""
        base = read_gpu(device)
        utilization = _whole(device, "UtilizationRates", lambda rates: rates.gpu, high=100)
        instances = device.instances()
        inside = {int(process.pid) for one in instances for process in _processes(one) or ()}
        mode = device.ask("MigMode")
        capability = device.ask("CudaComputeCapability")
        state = _whole(device, "PerformanceState", int, high=15)
        power = _whole(device, "PowerUsage", int, high=10**8)
        limit = _whole(device, "EnforcedPowerLimit", int, high=10**8)
        holder = self._holder_of(base.uuid or f"index-{base.index}")
        return GpuReading(
            **self._common(device, skip=inside),
            held_by=holder,
            idle=_is_idle(base, utilization, holder),
            pci_bus_id=base.pci_bus_id or None,
            cuda_ordinal=ordinal,
            compute_capability=None if capability is None else ".".join(map(str, capability)),
            utilization_percent=utilization,
            temperature_c=_whole(device, "Temperature", int, 0, low=-100, high=300),
            power_w=None if power is None else round(power / 1000, 1),
            power_limit_w=None if limit is None else round(limit / 1000, 1),
            compute_mode=base.compute_mode,
            performance_state=None if state is None else f"P{state}",
            ecc_uncorrected=_whole(device, "TotalEccErrors", int, 1, 0),
            mig_mode=bool(mode[0]) if mode else None,
            mig_instances=tuple(self.instance(one) for one in instances),
            problem=base.problem,
            why=_reasons(device),
        )

    def instance(self, device: NvmlDevice) -> DeviceReading:
        """One MIG instance: never its GPU's numbers."""
        common = self._common(device, skip=set())
        holder = self._holder_of(common["uuid"] or "")
        unknown = device.problem or ("MemoryInfo" in device.why and "ComputeRunningProcesses" in device.why)
        return DeviceReading(
            **common,
            held_by=holder,
            idle=None if unknown else not is_busy_mig(device) and holder is None,
            why=_reasons(device),
        )

    def _common(self, device: NvmlDevice, skip: set[int]) -> dict[str, Any]:
        memory = device.memory()
        found = _processes(device)
        shared = device.ask("MPSComputeRunningProcesses") or ()
        graphics = device.ask("GraphicsRunningProcesses") or ()
        known = {int(process.pid) for process in (*(found or ()), *shared)}
        others = [process for process in graphics if int(process.pid) not in known]
        source = None if memory is None else "nvml-v1" if memory.reserved is None else "nvml"
        return {
            "index": device.index,
            "uuid": device.text("UUID") or None,
            "name": device.text("Name") or None,
            "memory_total_bytes": None if memory is None else memory.total,
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_reserved_bytes": None if memory is None else memory.reserved,
            "memory_source": source,
            "processes": None
            if found is None
            else tuple(
                self._describe(int(process.pid), process.usedGpuMemory, kind)
                for kind, listed in (("compute", found), ("mps", shared), ("graphics", others))
                for process in listed
                if int(process.pid) not in skip
            ),
        }


def _processes(device: NvmlDevice) -> list[Any] | None:
    found: list[Any] | None = device.ask("ComputeRunningProcesses")
    return found


def _is_idle(gpu: Gpu, utilization: int | None, holder: Holder | None) -> bool | None:
    """Whether a job may take it; None where NVML tells nothing to judge by."""
    if gpu.problem or holder is not None or why_busy(gpu):
        return False
    if gpu.memory_used_bytes is None and gpu.processes is None and utilization is None:
        return None
    return utilization is None or utilization < BUSY_PERCENT


def _whole(
    device: NvmlDevice, name: str, take: Callable[[Any], Any], *args: int, low: int = 0, high: int = 2**62
) -> int | None:
    """A number within its range; drivers fill in 2^32 - 1 and the like for what they do not know."""
    answer = device.ask(name, *args)
    if answer is None:
        return None
    value = take(answer)
    if not math.isfinite(value) or not low <= value <= high:
        device.why[name] = f"reads {value}"
        return None
    return int(value)


#: JSON's names of what NVML is asked.
_FIELDS = {
    "UUID": ("uuid",),
    "Name": ("name",),
    "PciInfo": ("pci_bus_id",),
    "MemoryInfo": ("memory_total_bytes", "memory_used_bytes"),
    "ComputeRunningProcesses": ("processes",),
    "UtilizationRates": ("utilization_percent",),
    "Temperature": ("temperature_c",),
    "PowerUsage": ("power_w",),
    "EnforcedPowerLimit": ("power_limit_w",),
    "ComputeMode": ("compute_mode",),
    "CudaComputeCapability": ("compute_capability",),
    "PerformanceState": ("performance_state",),
    "TotalEccErrors": ("ecc_uncorrected",),
    "MigMode": ("mig_mode",),
}


def _reasons(device: NvmlDevice) -> dict[str, str]:
    return {name: reason for asked, reason in device.why.items() for name in _FIELDS.get(asked, ())}


def versions(nvml: Nvml) -> tuple[str | None, str | None]:
    """The driver's version, and the newest CUDA that it runs."""
    driver = nvml.ask("SystemGetDriverVersion")
    number = nvml.ask("SystemGetCudaDriverVersion")
    text = driver.decode(errors="replace") if isinstance(driver, bytes) else driver
    return text or None, f"{number // 1000}.{number % 1000 // 10}" if number else None


def ordinals(
    gpus: list[Gpu], environ: Mapping[str, str] = os.environ
) -> tuple[dict[int, int], tuple[str, ...]]:
    """For each nvidia-smi number that CUDA shows here, CUDA's; and what is odd about CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" not in environ and _alike(gpus):
        # CUDA leaves out one that is lost, if it starts at all: the numbers after it are anybody's guess.
        usable = itertools.takewhile(lambda gpu: not gpu.problem, gpus)
        return {gpu.index: gpu.index for gpu in usable}, ()
    from phalanx.dist.visibility import visible_devices

    found = visible_devices(environ, gpus)
    table = {number: ordinal for ordinal, number in enumerate(found.physical) if number is not None}
    notes = tuple(" ".join(note.split()) for note in found.notes)
    if found.value is not None:
        return table, tuple(f"CUDA_VISIBLE_DEVICES={found.value!r}: {note}" for note in notes)
    # GPUs whose names are secret are not known to differ.
    return table, notes if all(gpu.name for gpu in gpus) else ()


def _alike(gpus: list[Gpu]) -> bool:
    """Whether CUDA and nvidia-smi number them alike: only different GPUs are sorted by their speed."""
    return len({gpu.name for gpu in gpus if not gpu.problem}) <= 1

"""One node, read as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.dist.gpus import Gpu, read_gpu
from phalanx.dist.nvml import Nvml, NvmlAbsent, open_nvml
from phalanx.tools.gpus.computer import read_computer
from phalanx.tools.gpus.driver_files import gpus_of_kernel, kernel_driver
from phalanx.tools.gpus.holders import Holders
from phalanx.tools.gpus.nvml_reading import NvmlReader, ordinals, versions
from phalanx.tools.gpus.processes import ProcessTable, in_container
from phalanx.tools.gpus.readings import DeviceReading, GpuReading, NodeReading

#: GPUs that have no memory of their own.
_UNIFIED = ("GB10", "ORIN", "THOR", "XAVIER", "TEGRA", "JETSON", "NVGPU")


def read_node(environ: Mapping[str, str] = os.environ, lock_folder: Path | None = None) -> NodeReading:
    """This node's GPUs, who is on them, and the computer itself; nothing is started and nothing is held."""
    host = os.uname().nodename
    try:
        with open_nvml() as nvml:
            return _from_nvml(nvml, host, environ, lock_folder)
    except NvmlAbsent as absent:
        return _without_nvml(host, absent)


def _from_nvml(nvml: Nvml, host: str, environ: Mapping[str, str], lock_folder: Path | None) -> NodeReading:
    driver, cuda = versions(nvml)
    devices = nvml.devices()
    inventory = [read_gpu(device) for device in devices]
    table, notes = ordinals(inventory, environ) if inventory else ({}, ())
    processes = ProcessTable()
    reader = NvmlReader(processes.describe, Holders(processes.holder, lock_folder).holder_of)
    gpus = tuple(reader.gpu(device, table.get(device.index)) for device in devices)
    gpus = _with_memory_of_driver(gpus, inventory)
    return NodeReading(
        host=host,
        driver_version=driver,
        cuda_driver_version=cuda,
        gpus=gpus,
        notes=(*notes, *_notes(gpus)),
        no_gpus="" if gpus else f"the driver {driver or ''} lists none".replace("  ", " "),
        computer=read_computer(),
    )


def _without_nvml(host: str, absent: NvmlAbsent, root: Path = Path("/")) -> NodeReading:
    driver = kernel_driver(root)
    if absent.mismatch:
        problem = (
            f"driver/library mismatch: the kernel has driver {driver or 'of another version'}, "
            "the NVML library is of another"
        )
        fix = "Fix: restart the computer, or reload the nvidia modules; in a container, use the host's libraries."
    else:
        problem, fix = f"NVML does not answer: {absent}", ""
    gpus = gpus_of_kernel(problem, root)
    return NodeReading(
        host=host,
        driver_version=driver,
        gpus=gpus,
        notes=(fix,) if gpus and fix else (),
        no_gpus="" if gpus else str(absent),
        computer=read_computer(root),
    )


def _with_memory_of_driver(gpus: tuple[GpuReading, ...], inventory: Sequence[Gpu]) -> tuple[GpuReading, ...]:
    """MIG instances whose memory NVML keeps to itself: the CUDA driver tells the size of the one it shows."""
    silent = [one for gpu in gpus for one in gpu.mig_instances if _is_silent(one)]
    if not silent:
        return gpus
    from phalanx.tools.gpus.cuda_driver import visible_memory

    sizes = visible_memory()
    return tuple(
        replace(gpu, mig_instances=tuple(_completed(one, sizes) for one in gpu.mig_instances)) for gpu in gpus
    )


def _is_silent(device: DeviceReading) -> bool:
    return device.memory_total_bytes is None and bool(device.uuid)


def _completed(device: DeviceReading, sizes: Mapping[str, int]) -> DeviceReading:
    size = sizes.get(device.uuid or "")
    if size is None or not _is_silent(device):
        return device
    why = {name: reason for name, reason in device.why.items() if name != "memory_total_bytes"}
    return replace(device, memory_total_bytes=size, memory_source="cuda", why=why)


def _notes(gpus: Sequence[GpuReading]) -> tuple[str, ...]:
    notes: list[str] = []
    listed = [process for gpu in gpus for one in (gpu, *gpu.mig_instances) for process in one.processes or ()]
    if in_container():
        notes.append(
            "this is a container with process ids of its own: processes outside of it are shown by the machine's "
            "ids, without names, or not at all; memory and utilization count them."
        )
    if any(process.note == "ended" for process in listed):
        notes.append("a process that has ended still has GPU memory, or ended this moment.")
    if any(gpu.memory_source == "nvml-v1" for gpu in gpus):
        notes.append("this driver is too old to tell its own share: memory in use includes it.")
    shared = [gpu.index for gpu in gpus if gpu.memory_total_bytes is None and is_unified(gpu)]
    if shared:
        notes.append(f"GPU {', '.join(map(str, shared))} has no memory of its own: it shares the computer's.")
    return tuple(notes)


def is_unified(gpu: GpuReading) -> bool:
    """Whether a GPU uses the computer's own memory."""
    name = (gpu.name or "").upper()
    return any(word in name.replace("-", " ").split() or f"({word}" in name for word in _UNIFIED)

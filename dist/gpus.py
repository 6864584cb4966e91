"""This node's GPUs as NVML lists them, without torch or CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.dist.arguments import require_int, short
from phalanx.dist.nvml import NvmlAbsent, NvmlDevice, open_nvml, text_of


@dataclass(frozen=True)
class Gpu:
    """One GPU of this node. None, or an empty text, where NVML has no answer.

    >>> Gpu(0, "GPU-8f2c", name="T4").memory_total_bytes is None
    True

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

    Raises:
        ValueError: A field is of another kind: ``Gpu("GPU-8f2c")`` would be a GPU without a number.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", require_int("index", self.index, at_least=0))
        for name in ("uuid", "pci_bus_id", "name", "problem"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(
                    f"Gpu: {name}={short(getattr(self, name))} is no text.\nFix: leave out what is unknown"
                )
        for name in ("cuda_ordinal", "memory_total_bytes", "memory_used_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(
                    self, name, require_int(name, getattr(self, name), at_least=0, at_most=None)
                )
        if self.compute_mode is not None and not isinstance(self.compute_mode, str):
            raise ValueError(
                f"Gpu: compute_mode={short(self.compute_mode)} is no text.\nFix: 'default', or None"
            )
        if self.processes is not None and not isinstance(self.processes, tuple | list):
            raise ValueError(
                f"Gpu: processes={short(self.processes)} is no sequence.\nFix: (pid, ...), or None"
            )
        for name in ("mig_uuids", "busy_migs"):
            uuids = getattr(self, name)
            if (
                isinstance(uuids, str)
                or not isinstance(uuids, Sequence)
                or not all(isinstance(u, str) for u in uuids)
            ):
                raise ValueError(
                    f"Gpu: {name}={short(uuids)} is no sequence of UUIDs.\nFix: ('MIG-...', ...)"
                )


IDLE_MEMORY_BYTES = 1 << 30  # a GPU nobody uses still shows some: driver, display, persistence
IDLE_MIG_MEMORY_BYTES = 256 << 20  # an instance nobody uses shows some tens of MiB
_COMPUTE_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}


def nvml_inventory() -> list[Gpu] | None:
    """This node's GPUs by NVML, in its order; None where NVML is missing or does not answer (no driver).

    CUDA_VISIBLE_DEVICES plays no part: NVML sees every GPU of the node or container.
    """
    try:
        with open_nvml() as nvml:
            return [read_gpu(device) for device in nvml.devices()]
    except NvmlAbsent:
        return None


def read_gpu(device: NvmlDevice) -> Gpu:
    """What NVML says of one GPU."""
    instances = {instance.text("UUID"): instance for instance in device.instances()}
    memory = device.memory()
    processes = device.ask("ComputeRunningProcesses")
    mode = device.ask("ComputeMode")
    return Gpu(
        index=device.index,
        uuid=device.text("UUID"),
        pci_bus_id=text_of(getattr(device.ask("PciInfo"), "busId", "")),
        name=device.text("Name"),
        memory_total_bytes=None if memory is None else memory.total,
        memory_used_bytes=None if memory is None else memory.used,
        processes=None if processes is None else tuple(int(process.pid) for process in processes),
        compute_mode=None if mode is None else _COMPUTE_MODES.get(int(mode)),
        mig_uuids=tuple(uuid for uuid in instances if uuid),
        busy_migs=tuple(uuid for uuid, instance in instances.items() if uuid and is_busy_mig(instance)),
        problem=device.problem,
    )


def is_busy_mig(instance: NvmlDevice) -> bool:
    """Whether somebody uses a MIG instance."""
    memory = instance.memory()
    in_use = memory is not None and memory.used > IDLE_MIG_MEMORY_BYTES
    return bool(instance.ask("ComputeRunningProcesses")) or in_use


def why_busy(gpu: Gpu) -> str:
    """Why nobody else should use this GPU now; empty when it is idle."""
    if gpu.problem:
        return gpu.problem
    if gpu.compute_mode == "prohibited":
        return "compute mode is prohibited"
    if gpu.processes:
        return f"in use by process {', '.join(map(str, gpu.processes))}"
    if gpu.memory_used_bytes is not None and gpu.memory_used_bytes > IDLE_MEMORY_BYTES:
        return (
            f"{gpu.memory_used_bytes / (1 << 30):.1f} GiB in use"  # by a process that a container cannot see
        )
    return ""

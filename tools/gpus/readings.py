"""What one GPU, one MIG instance and one process on it show: values, None where there is none, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.tools.gpus.abilities import Capability, Topology, TorchBuild


@dataclass(frozen=True, kw_only=True)
class ProcessReading:
    """A process that has memory of a GPU.

    Args:
        pid: As NVML gives it.
        kind: ``compute``, ``mps`` (through NVIDIA's Multi-Process Service) or ``graphics``.
        memory_bytes: On this GPU.
        name: Short command line; None when the process cannot be seen.
        user: Who runs it.
        job: The job it is a rank of: the run's id or the name of its log folder.
        note: Why there is no name: ended, in another PID namespace, another user's.
    """

    pid: int
    kind: str = "compute"
    memory_bytes: int | None = None
    name: str | None = None
    user: str | None = None
    job: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The `phalanx run` or `select_devices` that holds a GPU until it ends."""

    pid: int | None = None
    user: str | None = None
    name: str | None = None
    job: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """What a GPU and a MIG instance have in common. ``why`` says for each field that is None what NVML answered."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None  # by the driver for itself; not in ``memory_used_bytes``
    memory_source: str | None = None  # nvml, cuda, or nvml-v1: then what is reserved counts as used
    idle: bool | None = None
    held_by: Holder | None = None
    processes: tuple[ProcessReading, ...] | None = None
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GpuReading(DeviceReading):
    """One GPU. ``problem`` says why it cannot be used, such as having fallen off the bus; empty when it can."""

    pci_bus_id: str | None = None
    cuda_ordinal: int | None = None  # cuda:<n> of a program started from here
    compute_capability: str | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    compute_mode: str | None = None
    performance_state: str | None = None
    ecc_uncorrected: int | None = None
    mig_mode: bool | None = None
    mig_instances: tuple[DeviceReading, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class HostReading:
    """The computer itself; the limits of a container count where they are lower."""

    cores: int | None = None
    load_1m: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class NodeReading:
    """Everything about one node; the last three only where they are asked for. ``error``: it could not be read; ``no_gpus``: why the list of GPUs is empty."""

    host: str
    driver_version: str | None = None
    cuda_driver_version: str | None = None
    gpus: tuple[GpuReading, ...] = ()
    notes: tuple[str, ...] = ()
    no_gpus: str = ""
    error: str = ""
    computer: HostReading = HostReading()
    torch: TorchBuild | None = None
    capabilities: tuple[Capability, ...] | None = None
    topology: Topology | None = None

    @property
    def is_bad(self) -> bool:
        """Whether something here needs somebody's attention: exit code 1."""
        unusable = any(one.torch_runs is False for one in self.capabilities or ())
        return bool(self.error) or unusable or any(gpu.problem for gpu in self.gpus)


def plain(value: Any) -> Any:
    """A reading as JSON has it. By hand: ``dataclasses.asdict`` copies deeply, which takes far longer."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else {name: plain(getattr(value, name)) for name in fields}

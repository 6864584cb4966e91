"""This node's GPUs as the launcher needs them: number, UUID, and who uses each."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.tools.usage import UsageMistake

if TYPE_CHECKING:
    from phalanx.dist.devices import Gpu


@dataclass(frozen=True)
class NodeGpu:
    """One GPU: nvidia-smi's number, its UUID (or that of a MIG instance) and name, and who uses it, in words."""

    index: int
    uuid: str
    name: str = ""
    users: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"GPU {self.index} ({', '.join(word for word in (self.name, self.uuid) if word)})"


@dataclass(frozen=True, kw_only=True)
class NodeGpus:
    """All GPUs of the node by number, and the visible ones in CUDA's order."""

    every: tuple[NodeGpu, ...] = ()
    visible: tuple[NodeGpu, ...] = ()
    notes: tuple[str, ...] = ()
    order_known: bool = True  # whether cuda:i is visible[i]
    one_per_process: bool = False  # MIG: a process sees one instance at most


def node_gpus(
    environ: Mapping[str, str], inventory: Sequence[Gpu] | None = None, lock_folder: Path | None = None
) -> NodeGpus:
    """The facts about this node's GPUs; empty where NVML does not answer.

    Args:
        environ: For CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
        inventory: The node's GPUs; None asks NVML.
        lock_folder: Where jobs mark the GPUs that they hold.

    Raises:
        UsageMistake: CUDA_VISIBLE_DEVICES names what is not there, or what cannot be told.
    """
    from phalanx.dist.devices import InvalidVisibleDevices, nvml_inventory, visible_devices

    gpus = nvml_inventory() if inventory is None else inventory
    if not gpus:
        return NodeGpus()
    every = {gpu.index: NodeGpu(gpu.index, gpu.uuid, gpu.name, users_of(gpu, lock_folder)) for gpu in gpus}
    found = visible_devices(environ, gpus)
    instances = _mig_instances(found.value or "", gpus)
    if len(instances) > 1:
        return NodeGpus(
            every=tuple(every.values()),
            visible=tuple(
                replace(every[index], uuid=uuid, users=_instance_users(uuid, gpus, lock_folder))
                for index, uuid in instances
            ),
            notes=("each rank gets one MIG instance; collectives between them are not generally supported.",),
            one_per_process=True,
        )
    try:
        found.check()
    except InvalidVisibleDevices as error:
        raise UsageMistake(str(error)) from None
    if None not in found.physical:
        visible = tuple(every[index] for index in found.physical if index is not None)
        return NodeGpus(every=tuple(every.values()), visible=visible, notes=found.notes)
    if found.value is None:
        return NodeGpus(every=tuple(every.values()), visible=tuple(every.values()), order_known=False)
    raise UsageMistake(
        f"CUDA_VISIBLE_DEVICES={found.value!r}: which GPUs it means cannot be told. {' '.join(found.notes)}",
        fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID",
    )


def _mig_instances(value: str, gpus: Sequence[Gpu]) -> list[tuple[int, str]]:
    """Number of the GPU and UUID of each instance, when the variable is a list of MIG instances."""
    owner = {uuid: gpu.index for gpu in gpus for uuid in gpu.mig_uuids}
    entries = [entry.strip() for entry in value.split(",")]
    return [(owner[entry], entry) for entry in entries] if all(entry in owner for entry in entries) else []


def users_of(gpu: Gpu, lock_folder: Path | None = None) -> tuple[str, ...]:
    """Who uses a GPU: processes that compute on it, or a job that holds it; empty when it is idle."""
    from phalanx.dist.devices import why_busy

    if gpu.processes and gpu.compute_mode != "prohibited":
        return tuple(_process(pid) for pid in gpu.processes)
    reason = why_busy(gpu)
    if reason:
        return (
            f"nobody, but {reason}"
            if gpu.compute_mode == "prohibited"
            else f"a process not seen here ({reason})",
        )
    return _held_by_a_job(lock_name(gpu.index, gpu.uuid), lock_folder)


def _instance_users(uuid: str, gpus: Sequence[Gpu], lock_folder: Path | None) -> tuple[str, ...]:
    """Who uses a MIG instance: its neighbours on the GPU do not count."""
    if any(uuid in gpu.busy_migs for gpu in gpus):
        return ("a process in it",)
    return _held_by_a_job(uuid, lock_folder)


def _held_by_a_job(name: str, lock_folder: Path | None) -> tuple[str, ...]:
    from phalanx.dist import gpu_locks

    try:
        if not gpu_locks.hold(name, lock_folder):
            pid = gpu_locks.holder(name, lock_folder)
            return (f"another job ({_process(pid)})" if pid is not None else "another job",)
        gpu_locks.release(name)
    except OSError:  # no lock can be made: then no job holds one either
        pass
    return ()


def hold(gpus: Sequence[NodeGpu], lock_folder: Path | None = None) -> list[NodeGpu]:
    """Hold GPUs until this process and what it forks have ended; those that another job has are returned."""
    from phalanx.dist import gpu_locks

    try:
        return [gpu for gpu in gpus if not gpu_locks.hold(lock_name(gpu.index, gpu.uuid), lock_folder)]
    except OSError:
        return []


def lock_name(index: int, uuid: str) -> str:
    """As `phalanx.dist.select_devices` names its locks."""
    return uuid or f"index-{index}"


def _process(pid: int) -> str:
    """Name, user and start of a process, or its number alone: it is gone, or in another container."""
    import psutil  # only where a GPU is in use

    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        user = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(psutil.Process(pid).create_time()))
    except (OSError, KeyError, psutil.Error):
        return f"pid {pid}"
    return f"{name} (pid {pid}, {user}, since {since})"

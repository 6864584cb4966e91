"""Limits of this process and its container: descriptors, locked memory, shared memory, cgroups, CPUs, RAM."""

from __future__ import annotations

import os
import resource

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene

_RLIMITS = {
    "memlock_bytes": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "stack_bytes": resource.RLIMIT_STACK,
}
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number of this size


def probe(scene: Scene) -> Partial:
    """``limits`` and ``memory``."""
    return {"limits": {**_own(scene), **_shm(scene), **_cgroup(scene)}, "memory": _memory(scene)}


def _own(scene: Scene) -> Partial:
    if not scene.is_this_machine:
        return {}
    found = {name: resource.getrlimit(which)[0] for name, which in _RLIMITS.items()}
    found["nofile_hard"] = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found["affinity_cpus"] = len(os.sched_getaffinity(0))
    return {name: -1 if value == resource.RLIM_INFINITY else value for name, value in found.items()}


def _shm(scene: Scene) -> Partial:
    try:
        seen = os.statvfs(scene.path("/dev/shm"))
    except OSError:
        return {}
    total = seen.f_blocks * seen.f_frsize
    return {"shm_total_bytes": total, "shm_used_bytes": total - seen.f_bavail * seen.f_frsize}


def _memory(scene: Scene) -> Partial:
    names = {
        "MemTotal": "total_bytes",
        "MemAvailable": "available_bytes",
        "SwapTotal": "swap_total_bytes",
    }
    found = {}
    for line in (scene.read("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name in names and words and words[0].isdigit():
            found[names[name]] = int(words[0]) * 1024
    return found


def _cgroup(scene: Scene) -> Partial:
    """The tightest limit on the way from this process's group up to the root that is mounted here."""
    groups = _groups(scene)
    readings: list[Partial] = []
    for controller, path in groups.items():
        for folder in _upwards(_mount(scene, controller), path):
            readings.append(_version_2(scene, folder) if controller == "" else _version_1(scene, folder))
    found: Partial = {}
    for name in ("cgroup_memory_bytes", "cgroup_cpus", "cgroup_pids"):
        values = [reading[name] for reading in readings if reading.get(name) is not None]
        if values:
            found[name] = min(values)
    if "cgroup_memory_bytes" in found:
        limited = next(
            reading
            for reading in readings
            if reading.get("cgroup_memory_bytes") == found["cgroup_memory_bytes"]
        )
        if limited.get("used") is not None:
            found["cgroup_memory_used_bytes"] = limited["used"]
    return found


def _groups(scene: Scene) -> dict[str, str]:
    """This process's group by controller; "" is the one hierarchy of version 2."""
    found = {}
    for line in (scene.read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found[""] = path
        for controller in controllers.split(","):
            if controller in ("memory", "cpu", "pids"):
                found[controller] = path
    return found


def _mount(scene: Scene, controller: str) -> str:
    """Where the controller's hierarchy is mounted."""
    for line in (scene.read("/proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 4:
            continue
        if controller == "" and words[2] == "cgroup2":
            return words[1]
        if controller and words[2] == "cgroup" and controller in words[3].split(","):
            return words[1]
    return "/sys/fs/cgroup" + (f"/{controller}" if controller else "")


def _upwards(mount: str, path: str) -> list[str]:
    """The group's folder and its parents'. In a container the path may lie outside of what is mounted."""
    parts = [part for part in path.split("/") if part and part != ".."]
    folders = ["/".join([mount, *parts[:count]]) for count in range(len(parts), 0, -1)]
    return [*folders, mount]


def _version_2(scene: Scene, folder: str) -> Partial:
    quota = (scene.read(f"{folder}/cpu.max") or "").split()
    cpus = None
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
        cpus = int(quota[0]) / int(quota[1])
    return {
        "cgroup_memory_bytes": _limit(scene.number(f"{folder}/memory.max")),
        "used": scene.number(f"{folder}/memory.current"),
        "cgroup_cpus": cpus,
        "cgroup_pids": _limit(scene.number(f"{folder}/pids.max")),
    }


def _version_1(scene: Scene, folder: str) -> Partial:
    quota, period = scene.number(f"{folder}/cpu.cfs_quota_us"), scene.number(f"{folder}/cpu.cfs_period_us")
    return {
        "cgroup_memory_bytes": _limit(scene.number(f"{folder}/memory.limit_in_bytes")),
        "used": scene.number(f"{folder}/memory.usage_in_bytes"),
        "cgroup_cpus": quota / period if quota and quota > 0 and period else None,
        "cgroup_pids": _limit(scene.number(f"{folder}/pids.max")),
    }


def _limit(value: int | None) -> int | None:
    return None if value is None or value >= _UNLIMITED else value

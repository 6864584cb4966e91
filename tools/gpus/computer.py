"""Cores, load and memory of this computer, without psutil: its import takes longer than all of this."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.tools.gpus.readings import HostReading


def read_computer(root: Path = Path("/")) -> HostReading:
    """What this process may use; the limits of its cgroup count where they are lower."""
    total, available = _meminfo(root / "proc/meminfo")
    used = None if total is None or available is None else total - available
    limit = _number(root / "sys/fs/cgroup/memory.max")
    if limit is not None and (total is None or limit < total):
        total, used = limit, _container_used(root / "sys/fs/cgroup")
    return HostReading(
        cores=_cores(root / "sys/fs/cgroup/cpu.max"),
        load_1m=_load(root / "proc/loadavg"),
        memory_total_bytes=total,
        memory_used_bytes=used,
    )


def _cores(limit: Path) -> int:
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = limit.read_text().split()
        return count if quota == "max" else min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return count


def _load(path: Path) -> float | None:
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _meminfo(path: Path) -> tuple[int | None, int | None]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None, None
    values = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}

    def size(name: str) -> int | None:
        words = values.get(name)
        return int(words[0]) * 1024 if words and words[0].isdigit() else None

    return size("MemTotal"), size("MemAvailable")


def _container_used(folder: Path) -> int | None:
    """What the kernel could not take back: without the cache of files that are not in use."""
    used = _number(folder / "memory.current")
    try:
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = int(lines.get("inactive_file", 0))
    except (OSError, ValueError):
        cache = 0
    return None if used is None else max(0, used - cache)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None

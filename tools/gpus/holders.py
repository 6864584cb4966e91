"""Which GPUs a phalanx job holds. The locks are looked at, never taken: not even for a moment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from phalanx.dist import gpu_locks
from phalanx.tools.gpus.readings import Holder


class Holders:
    """Looks up who holds a device, by the name of its lock: its UUID, or ``index-<n>``.

    Args:
        who: Who a process that holds a lock is, see `ProcessTable.holder`.
        folder: Where the lock files are.
        locks: The kernel's table of file locks.
    """

    def __init__(
        self,
        who: Callable[[int], Holder],
        folder: Path | None = None,
        locks: Path = Path("/proc/locks"),
    ) -> None:
        self._who = who
        self._folder = folder
        self._locks = _flocks(locks) if (folder or gpu_locks.default_folder()).is_dir() else {}

    def holder_of(self, name: str) -> Holder | None:
        """Who holds it, None when nobody does."""
        if not name or not self._locks:
            return None
        try:
            status = os.stat(gpu_locks.lock_file(name, self._folder))
        except OSError:
            return None
        noted = gpu_locks.holder(name, self._folder)
        for device, pid in self._locks.get(status.st_ino, ()):
            # A file system of several devices (btrfs, overlay) names another one here: then the note must fit.
            if device == (os.major(status.st_dev), os.minor(status.st_dev)) or pid == noted:
                # Zero and below: the lock was taken in another PID namespace.
                return self._who(pid) if pid > 0 else Holder()
        return None


def _flocks(table: Path) -> dict[int, list[tuple[tuple[int, int], int]]]:
    """For each inode with a lock on the whole file, the devices and processes."""
    try:
        text = table.read_text()
    except OSError:
        return {}
    found: dict[int, list[tuple[tuple[int, int], int]]] = {}
    for pid, major, minor, inode in re.findall(
        r"^\d+: FLOCK +\w+ +WRITE (-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", text, re.MULTILINE
    ):
        found.setdefault(int(inode), []).append(((int(major, 16), int(minor, 16)), int(pid)))
    return found

"""The folder that a run's checkpoints lie in: names, order, replacing, deleting, and who may write."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import time
import weakref
from pathlib import Path

from phalanx.dist.checkpoint_errors import FolderInUseError
from phalanx.dist.checkpoint_files import find_problems, quick_problem, read_manifest, sync_folder

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")
_TEMPORARY = re.compile(r"step-\d+\.tmp-[0-9a-f]+")
_SET_ASIDE = re.compile(r"(step-\d+)\.old-[0-9a-f]+")
LOCK_FILE = ".lock"


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints by number, oldest first, whole or not; temporary names and strangers are left out."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [(int(match[1]), folder / name) for name in names if (match := _STEP.fullmatch(name))]
    return sorted((number, path) for number, path in found if path.name == f"step-{number}")


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint whose manifest and file sizes are right."""
    return next((path for _, path in reversed(steps_in(folder)) if quick_problem(path) is None), None)


def temporary_path(folder: Path, name: str, kind: str = "tmp") -> Path:
    """A fresh name beside `name` that no reader takes for a checkpoint."""
    return folder / f"{name}.{kind}-{secrets.token_hex(4)}"


def remove(path: Path) -> None:
    """Delete a folder so that no half of it ever looks whole; one that is gone already is fine."""
    if _STEP.fullmatch(path.name):
        doomed = temporary_path(path.parent, path.name)
        try:
            path.rename(doomed)
        except FileNotFoundError:
            return
        path = doomed
    shutil.rmtree(path, ignore_errors=True)


def clear_leftovers(folder: Path) -> list[str]:
    """Remove what dead runs left half-written; call it only while holding the folder's lock."""
    cleared = []
    for name in sorted(os.listdir(folder)):
        aside = _SET_ASIDE.fullmatch(name)
        if aside and not (folder / aside[1]).exists():
            (folder / name).rename(folder / aside[1])  # the run died between two renames: undo the first
        elif aside or _TEMPORARY.fullmatch(name):
            remove(folder / name)
            cleared.append(name)
    return cleared


def publish(temporary: Path, final: Path, known_damaged: bool) -> None:
    """Give a complete checkpoint its name; one of the same number is kept if it is the same, else swapped."""
    folder = final.parent
    if final.exists() and not known_damaged and _same_content(temporary, final):
        remove(temporary)
        return
    if not final.exists():
        temporary.rename(final)
    elif _exchange(temporary, final):
        remove(temporary)
    else:
        aside = temporary_path(folder, final.name, "old")
        final.rename(aside)
        temporary.rename(final)
        sync_folder(folder)
        remove(aside)
    sync_folder(folder)


def _same_content(temporary: Path, final: Path) -> bool:
    try:
        same = bool(read_manifest(temporary)["files"] == read_manifest(final)["files"])
    except (OSError, ValueError):
        return False
    return same and not find_problems(final)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (Linux's renameat2); False where the file system cannot."""
    rename_exchange, at_fdcwd = 2, -100
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    result: int = renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange)
    return result == 0


def keep_newest(folder: Path, keep: int | None, just_saved: int, damaged: set[int]) -> None:
    """Delete old checkpoints: the `keep` newest stay, and always the one just saved.

    Damaged ones do not count; they go once a newer whole one is there.
    """
    if keep is None:
        return
    present = [number for number, _ in steps_in(folder)]
    whole = [number for number in present if number not in damaged]
    kept = {just_saved, *whole[-keep:]}
    for number in present:
        newer = any(number < other for other in kept)
        if number not in kept and newer:
            remove(folder / f"step-{number}")


# POSIX locks rather than flock(): a forked loader worker that outlives its killed parent for some
# seconds would go on holding an flock, and the restarted run would find its own folder taken. They
# are dropped when *any* handle of the file is closed, so a process opens each lock file once.
_held: dict[tuple[int, str], tuple[int, int]] = {}  # (pid, path) -> (handle, users)


class FolderLock:
    """Held by one process at a time, until it is closed, collected, or the process ends in any way."""

    def __init__(self, folder: Path, patience_s: float) -> None:
        self.key = (os.getpid(), str(folder.resolve()))
        if self.key in _held:
            handle, users = _held[self.key]
            _held[self.key] = (handle, users + 1)
        else:
            _held[self.key] = (_lock(folder, patience_s), 1)
        self.close = weakref.finalize(self, _release, self.key)


def _lock(folder: Path, patience_s: float) -> int:
    path = folder / LOCK_FILE
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}:
                    logger.warning("%s: this file system has no locks; two runs would not be noticed", folder)
                    return handle
                if error.errno not in {errno.EACCES, errno.EAGAIN}:
                    raise
                if time.monotonic() > deadline:
                    holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "an unknown process"
                    raise FolderInUseError(
                        f"{folder}: another run writes its checkpoints here ({holder}). Two runs in one folder would "
                        "delete each other's.\nFix: give this run a folder of its own, or end the other one"
                    ) from None
            time.sleep(0.1)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _release(key: tuple[int, str]) -> None:
    if key[0] != os.getpid():  # a forked child: the lock is its parent's
        return
    handle, users = _held.pop(key)
    if users > 1:
        _held[key] = (handle, users - 1)
        return
    with contextlib.suppress(OSError):
        os.close(handle)


def write_probe(folder: Path) -> str:
    """A file that ranks on other nodes look for, to learn whether the folder is shared."""
    path = temporary_path(folder, ".probe")
    path.touch()
    return path.name


def sees_probe(folder: Path, name: str, patience_s: float) -> bool:
    """Whether the probe is here, asked again for a while: network file systems remember absence."""
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(OSError):
            if name in os.listdir(folder):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)

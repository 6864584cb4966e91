"""Holding GPUs for a job: one lock file per GPU, in a folder that all users of the node share."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

_held: dict[str, int] = {}  # uuid -> open file; closed with the process, which is what frees the GPU


def default_folder() -> Path:
    """Where the lock files are: the same folder for every user of this node."""
    usual = os.environ.get("TMPDIR") or "/tmp"
    if os.path.isabs(usual) and os.access(usual, os.W_OK | os.X_OK):
        return Path(usual) / "phalanx-gpus"
    import tempfile  # its rules for other cases; slow to import, and it writes a file to find out

    return Path(tempfile.gettempdir()) / "phalanx-gpus"


def hold(uuid: str, folder: Path | None = None) -> bool:
    """Hold the GPU for this process and its forked children; False when another job has it.

    It is freed when the last of them ends, however that happens: the kernel drops the lock. What a parent of
    this process holds (the launcher, for its ranks) counts as held.

    Raises:
        OSError: The folder cannot be used.
    """
    if uuid in _held:
        return True
    handle = open_lock_file(uuid, folder or default_folder())
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return _is_ancestor(holder(uuid, folder))
        raise
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    except OSError:  # a note for others, no more
        pass
    _held[uuid] = handle
    return True


def _is_ancestor(wanted: int | None) -> bool:
    """Whether the process is one of this one's parents."""
    pid = os.getpid()
    while wanted is not None and pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
        if pid == wanted:
            return True
    return False


def holder(uuid: str, folder: Path | None = None) -> int | None:
    """Process id that the GPU's holder left, None when none can be read. It may have ended."""
    try:
        text = lock_file(uuid, folder).read_text()
        return int(text.split()[0])
    except (OSError, ValueError, IndexError):
        return None


def release(uuid: str) -> None:
    """Let go of a GPU that `hold` took; nothing happens when it is not held."""
    handle = _held.pop(uuid, None)
    if handle is not None:
        os.close(handle)


def lock_file(uuid: str, folder: Path | None = None) -> Path:
    """The file whose lock stands for the GPU."""
    return (folder or default_folder()) / (re.sub(r"[^A-Za-z0-9-]", "_", uuid) + ".lock")


def open_lock_file(uuid: str, folder: Path) -> int:
    """The lock file, made when it is not there, for all users.

    Without O_CREAT first: Linux refuses that flag on somebody else's file in a sticky folder
    (fs.protected_regular), though the file may be opened.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            folder.chmod(0o1777)
        except PermissionError:  # another user made it this moment
            pass
    path = lock_file(uuid, folder)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(3):
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            pass
        try:
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        os.fchmod(handle, 0o666)  # whatever the umask
        return handle
    raise OSError(errno.EAGAIN, "the lock file comes and goes", str(path))

"""Processes as the launcher sees them: who descends from whom, and ending all of them.

A *sub-reaper* is a process to which orphaned descendants are handed by the kernel, in place of
init. `kill_descendants` relies on it: as long as the calling process is one, none of its
descendants can leave its tree, whatever they do (setsid, double fork), so "no child left to wait
for" means "no descendant left".
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def become_subreaper() -> None:
    """Let the kernel hand orphaned descendants to this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """End this process (SIGKILL) when ``parent``, the process that forked it, ends in any way."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was made
        os.kill(os.getpid(), signal.SIGKILL)


def set_process_name(name: str) -> None:
    """Set what ``ps -o comm`` shows (15 bytes at most)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def parents() -> dict[int, int]:
    """Every process that /proc shows, with its parent's id."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        # The name in parentheses may hold anything, a closing parenthesis too.
        found[int(entry)] = int(stat[stat.rindex(b")") + 2 :].split()[1])
    return found


def descendants(root: int, *, spare: Collection[int] = ()) -> list[int]:
    """Ids of the processes below ``root``, without those in ``spare`` and what is below them."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    to_visit = [pid for pid in children.get(root, []) if pid not in spare]
    while to_visit:
        pid = to_visit.pop()
        found.append(pid)
        to_visit.extend(child for child in children.get(pid, []) if child not in spare)
    return found


def send_signal(pid: int, signum: int) -> bool:
    """Send a signal; False when there is no such process or it is somebody else's."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_descendants(
    reap: Callable[[], bool], *, spare: Collection[int] = (), patience_s: float = 0.0, limit_s: float = 30.0
) -> list[int]:
    """End everything below this process and return what could not be ended (normally nothing).

    The first pass sends SIGTERM, so that helpers which clean up by themselves can (multiprocessing's
    resource tracker removes shared memory once its clients are gone); after ``patience_s`` seconds
    every pass sends SIGKILL. This process must be a sub-reaper.

    Args:
        reap: Waits for whatever has ended without blocking; returns whether a child is left.
        spare: Ids of children to leave alone, with what is below them.
        patience_s: Seconds between SIGTERM and SIGKILL; 0 sends SIGKILL at once.
        limit_s: Give up after this many seconds: a process stuck in the kernel cannot be ended.
    """
    own = os.getpid()
    began = time.monotonic()
    asked: set[int] = set()
    pause_s = 0.001
    while reap():
        waited_s = time.monotonic() - began
        left = descendants(own, spare=spare)
        if not left and spare:
            break
        if waited_s > limit_s:
            return left
        for pid in left:
            if waited_s >= patience_s:
                send_signal(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                send_signal(pid, signal.SIGTERM)
        select.select([], [], [], pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return []


def signal_name(signum: int) -> str:
    """``SIGKILL`` for 9; ``SIGRTMIN+3`` and the like where Python has no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        offset = signum - signal.SIGRTMIN
        return f"SIGRTMIN+{offset}" if offset > 0 else f"signal {signum}"


def handles_signal(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, or ignores it; False when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("SigIgn", "SigCgt")))
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks.values())

"""The kernel's log, as far as this user may read it: what the driver, the memory and the OOM killer said."""

from __future__ import annotations

import os
import re

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene

KEPT_LINES = 200
_PROGRAMS = (["dmesg"], ["journalctl", "-k", "-b", "--no-pager", "-n", "5000"])
_MATTERS = re.compile(
    r"\bNVRM\b|\bXid\b|nvidia|nouveau|fallen off the bus|SXid|out of memory|oom-kill|Killed process|memory cgroup"
    r"|\bAER\b|PCIe Bus Error|\bmce:|Hardware Error|EDAC|IO_PAGE_FAULT|DMAR:.*fault|I/O error|nfs: server|mlx5|infiniband"
    r"|module verification failed|amdgpu|segfault|link is not ready|link is down",
    re.IGNORECASE,
)


def probe(scene: Scene) -> Partial | None:
    """``kernel_log``: the newest lines that matter. None where nobody but root may read it."""
    lines = _kmsg(scene)
    for words in _PROGRAMS if lines is None else ():
        text = scene.run(words)
        if text:
            lines = text.splitlines()
            break
    if lines is None:
        return None
    return {"kernel_log": [line[:500] for line in lines if _MATTERS.search(line)][-KEPT_LINES:]}


def _kmsg(scene: Scene) -> list[str] | None:
    """/dev/kmsg: one record a read, ``priority,sequence,microseconds,flags;text``; EAGAIN after the last."""
    try:
        handle = os.open(scene.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    try:
        while True:
            try:
                record = os.read(handle, 8192)
            except BrokenPipeError:  # overwritten while we read: the next one is there
                continue
            except OSError:
                break
            if not record:  # a plain file, in a made root
                break
            lines += _records(record.decode(errors="replace"))
    finally:
        os.close(handle)
    return lines


def _records(text: str) -> list[str]:
    """The record's line; lines with a leading space are the device that it is about."""
    found = []
    for line in text.splitlines():
        head, semicolon, message = line.partition(";")
        if semicolon and not line.startswith(" "):
            fields = head.split(",")
            seconds = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0
            found.append(f"[{seconds:12.6f}] {message}")
    return found

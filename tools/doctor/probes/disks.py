"""The places where the run reads and writes: free space, inodes, kind of filesystem."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene


def places(scene: Scene, *, of_a_job: bool = True) -> dict[str, Path]:
    """What the run uses, by purpose; a purpose that nobody set is left out.

    Without ``of_a_job`` only what every job on this node needs: a prolog starts in /, as root.
    """
    environ = scene.environ
    found: dict[str, Path] = {}
    if of_a_job:
        with contextlib.suppress(OSError):  # it was removed under us
            found["working folder"] = Path.cwd()
    if scene.output_dir is not None:
        found["output folder"] = scene.output_dir
    found["temporary files"] = Path(environ.get("TMPDIR") or "/tmp")
    if not of_a_job:
        return found
    if environ.get("HOME"):
        found["home"] = Path(environ["HOME"])
    for name in ("HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        if environ.get(name):
            found[name] = Path(environ[name])
    return found


def probe(scene: Scene, purpose: str, path: Path) -> Partial:
    """``disks``, of one place. It hangs where a server of the filesystem is gone."""
    there = path
    while not there.exists() and there != there.parent:  # it will be made in the first parent that exists
        there = there.parent
    seen = os.statvfs(there)
    return {
        "disks": [
            {
                "path": str(path),
                "purpose": purpose,
                "total_bytes": seen.f_blocks * seen.f_frsize,
                "free_bytes": seen.f_bavail * seen.f_frsize,
                "inodes_total": seen.f_files,
                "inodes_free": seen.f_favail,
                "filesystem": _filesystem(scene, there.resolve()),
                "read_only": bool(seen.f_flag & os.ST_RDONLY),
                "writable": os.access(there, os.W_OK | os.X_OK) if there.is_dir() else False,
            }
        ]
    }


def _filesystem(scene: Scene, path: Path) -> str | None:
    """The type of the mount that the path lies in: the longest mount point that is a parent, the last one wins."""
    best, kind = -1, None
    for line in (scene.read("/proc/self/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = Path(words[1].encode().decode("unicode_escape", errors="replace"))
        if (point == path or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), words[2]
    return kind

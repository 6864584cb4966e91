"""Python, and every distribution that it would find, with the folder it lies in."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene


def probe(_: Scene) -> Partial:
    """``python`` and ``packages``. Folder names are enough: reading every METADATA costs a second on network disks."""
    packages = [entry for folder in search_path() for entry in installed_in(folder)]
    conda = _conda_packages(Path(sys.prefix))
    return {"python": _python(bool(conda)), "packages": [*packages, *conda]}


def search_path() -> list[Path]:
    """The folders that imports look in, once each, in order."""
    found = dict.fromkeys(os.path.realpath(entry) for entry in sys.path if entry and os.path.isdir(entry))
    return [Path(folder) for folder in found]


def installed_in(folder: Path) -> list[Partial]:
    """The distributions of one folder.

    A second torch in the user's own folder is seen by its name alone::

        torch-2.6.0+cu126.dist-info  ->  {"name": "torch", "version": "2.6.0+cu126", "location": ...}
    """
    found = []
    for name in sorted(_entries(folder)):
        stem, dot, kind = name.rpartition(".")
        if not dot or kind not in ("dist-info", "egg-info"):
            continue
        project, dash, rest = stem.partition("-")
        version = rest.partition("-py")[0] if kind == "egg-info" else rest
        if not dash:  # made by `pip install -e` of old: the version is inside
            version = _version_inside(folder / name)
        conda = (folder / name / "INSTALLER").is_file() and _first_word(
            folder / name / "INSTALLER"
        ) == "conda"
        found.append(
            {
                "name": project.lower().replace("_", "-"),
                "version": version,
                "location": str(folder),
                "source": "conda" if conda else "pip",
            }
        )
    return found


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _first_word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _version_inside(folder: Path) -> str:
    for line in _first_word(folder / "PKG-INFO").splitlines():
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return ""


def _conda_packages(prefix: Path) -> list[Partial]:
    """conda's own list: builds tell the CUDA that a package was made for."""
    found = []
    for name in sorted(_entries(prefix / "conda-meta")):
        parts = name.removesuffix(".json").rsplit("-", 2)
        if name.endswith(".json") and len(parts) == 3:
            found.append(
                {
                    "name": parts[0],
                    "version": parts[1],
                    "build": parts[2],
                    "location": str(prefix),
                    "source": "conda",
                }
            )
    return found


def _python(conda: bool) -> Partial:
    return {
        "version": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "installer": "conda" if conda else "uv" if _made_by_uv() else "pip",
        **({"user_site": site.getusersitepackages()} if site.ENABLE_USER_SITE else {}),
    }


def _made_by_uv() -> bool:
    try:
        text = (Path(sys.prefix) / "pyvenv.cfg").read_text(errors="replace")
    except OSError:
        return False
    return any(line.partition("=")[0].strip() == "uv" for line in text.splitlines())

"""What can compile an extension here: CUDA toolkits, host compilers, ninja, Python's headers."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from pathlib import Path

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene


def probe(scene: Scene) -> Partial:
    """``compilers``; "" says that there is none."""
    nvcc, home = _nvcc(scene)
    gcc = _version(scene, _compiler(scene, "CXX", ("g++", "gcc", "c++")), r"(\d+\.\d+(?:\.\d+)?)")
    found: Partial = {
        "nvcc": _version(scene, nvcc, r"release (\d+\.\d+)(?:, V([\d.]+))?"),
        "gcc": gcc,
        "clang": _version(scene, shutil.which("clang", path=_path(scene)), r"version (\d+\.\d+\.\d+)"),
        "ninja": _version(scene, shutil.which("ninja", path=_path(scene)), r"([\d.]+)"),
        "toolkits": [f"/usr/local/{name}" for name in scene.names("/usr/local") if _is_toolkit(name)],
        "python_headers": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
    }
    if nvcc:
        found["nvcc_path"] = nvcc
    if home:
        found["cuda_home"] = home
    return {"compilers": found}


def _path(scene: Scene) -> str:
    """Without PATH, Python's own default would be searched: say that nothing is found there either way."""
    return scene.environ.get("PATH", os.defpath)


def _is_toolkit(name: str) -> bool:
    return re.fullmatch(r"cuda-\d+\.\d+", name) is not None


def _nvcc(scene: Scene) -> tuple[str | None, str | None]:
    """The nvcc that torch's extension builder would take, and the toolkit's folder: as torch finds CUDA_HOME."""
    home = scene.environ.get("CUDA_HOME") or scene.environ.get("CUDA_PATH")
    if home:
        inside = scene.path(home) / "bin" / "nvcc"
        return (str(inside), home) if inside.is_file() else (None, home)
    found = shutil.which("nvcc", path=_path(scene)) if scene.is_this_machine else None
    if found:
        return found, str(Path(found).parent.parent)
    standard = scene.path("/usr/local/cuda")
    if (standard / "bin" / "nvcc").is_file():
        return str(standard / "bin" / "nvcc"), str(standard)
    return None, None


def _compiler(scene: Scene, variable: str, names: tuple[str, ...]) -> str | None:
    chosen = scene.environ.get(variable)
    candidates = (chosen.split()[0],) if chosen and chosen.split() else names
    return next(filter(None, (shutil.which(name, path=_path(scene)) for name in candidates)), None)


def _version(scene: Scene, program: str | None, pattern: str) -> str | None:
    """The version that a program gives, "" where there is no such program, None where it does not answer."""
    if program is None:
        return ""
    words = [program, "-dumpfullversion", "-dumpversion"] if _is_gcc(program) else [program, "--version"]
    text = scene.run(words)
    match = re.search(pattern, text or "")
    if match is None:
        return None
    return next(group for group in reversed(match.groups()) if group)


def _is_gcc(program: str) -> bool:
    return re.match(r"(g\+\+|gcc|c\+\+)", os.path.basename(program)) is not None

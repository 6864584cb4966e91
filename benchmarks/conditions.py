"""Under what a figure was taken, and how it is told: what every benchmark prints beside its numbers.

Not a benchmark. Scripts run as files, so that this one is found beside them: ``from conditions import conditions``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _torch() -> str:
    import torch  # a package's metadata leaves out the build: 2.14.1 for 2.14.1+cu130

    return str(torch.__version__)


def _cpu_capability() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


_READ: dict[str, Callable[[], Any]] = {
    "cores": _cores,  # that this process may run on
    "cpu": _cpu,
    "cpu_capability": _cpu_capability,
    "cpus": _cores,
    "hardware": lambda: f"{platform.machine()}, {_cores()} cores, {_cpu_capability()}",
    "load": lambda: round(os.getloadavg()[0], 2),
    "load_average": lambda: os.getloadavg()[0],
    "machine": platform.machine,
    "memory_gb": lambda: round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
    "python": platform.python_version,
    "torch": _torch,
}


def conditions(*names: str) -> dict[str, Any]:
    """These facts of this machine and process, by name; a name that is none of them is a package's.

    >>> sorted(conditions("python", "cores", "numpy"))
    ['cores', 'numpy', 'python']
    """
    return {name: _READ[name]() if name in _READ else version(name) for name in names}


def in_words(found: Mapping[str, Any]) -> str:
    """The versions and the hardware among the entries of a result, for a line.

    >>> in_words({"torch": "2.14.1", "python": "3.11.7", "cores": 2, "machine": "x86_64", "ratio": 0.5})
    'torch 2.14.1, Python 3.11.7, 2 cores x86_64'
    """
    words = [f"torch {found['torch']}"] if "torch" in found else []
    if "python" in found:
        words.append(f"Python {found['python']}")
    cores = found.get("cores", found.get("cpus"))
    if cores is not None:
        words.append(f"{cores} cores {found['machine']}" if "machine" in found else f"{cores} cores")
    return ", ".join(words)


def arguments(doc: str | None, *, whole: bool = False) -> argparse.ArgumentParser:
    """A parser with ``--json``, described by the first line of a script's docstring, or by all of it."""
    text = (doc or "") if whole else (doc or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def told_as_json(result: Mapping[str, Any], options: argparse.Namespace) -> bool:
    """Print the result when ``--json`` asks for it; whether it did."""
    if options.json:
        print(json.dumps(result))
    return bool(options.json)

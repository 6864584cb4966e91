"""The GPUs that the kernel knows of, for when NVML cannot be used: /proc/driver/nvidia, else the PCI bus."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.tools.gpus.readings import GpuReading

NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


def gpus_of_kernel(problem: str, root: Path = Path("/")) -> tuple[GpuReading, ...]:
    """GPUs by PCI bus, each with ``problem``: NVML's numbers are by the same order."""
    listed = _of_driver(root / "proc/driver/nvidia/gpus") or _of_pci_bus(root / "sys/bus/pci/devices")
    return tuple(
        GpuReading(index=index, uuid=uuid, name=name, pci_bus_id=bus, problem=problem)
        for index, (bus, name, uuid) in enumerate(listed)
    )


def kernel_driver(root: Path = Path("/")) -> str | None:
    """Version of the driver that is loaded, None where none is."""
    match = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", _read(root / "proc/driver/nvidia/version"))
    return match[1] if match else None


def _of_driver(folder: Path) -> list[tuple[str, str | None, str | None]]:
    found: list[tuple[str, str | None, str | None]] = []
    for entry in _entries(folder):
        lines = (line.partition(":") for line in _read(entry / "information").splitlines())
        values = {name.strip(): value.strip() for name, _, value in lines}
        uuid = values.get("GPU UUID", "")
        found.append((entry.name, values.get("Model") or None, uuid if "?" not in uuid and uuid else None))
    return found


def _of_pci_bus(folder: Path) -> list[tuple[str, str | None, str | None]]:
    found: list[tuple[str, str | None, str | None]] = []
    for entry in _entries(folder):
        is_gpu = _read(entry / "class").startswith(_DISPLAY_CLASSES)
        if is_gpu and _read(entry / "vendor").strip() == NVIDIA:
            found.append((entry.name, f"PCI device 10de:{_read(entry / 'device').strip()[2:]}", None))
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

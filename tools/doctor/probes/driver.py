"""The NVIDIA driver without its own libraries: kernel modules, PCI bus, device nodes, services; and CUDA's start."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene

_NVIDIA = "0x10de"
_SWITCH_CLASS = "0x0680"  # a bridge of another kind: NVIDIA's NVSwitches
_GPU_CLASSES = ("0x0300", "0x0302")
_ACS_CAPABILITY = 0x000D
_ACS_REDIRECT = 0x0C  # request redirect, completion redirect


def probe(scene: Scene) -> Partial:
    """``driver`` and ``topology`` from files alone."""
    modules = {line.split()[0] for line in (scene.read("/proc/modules") or "").splitlines() if line.strip()}
    version, is_open = _module(scene.read("/proc/driver/nvidia/version") or "")
    hardware, switches = _hardware(scene)
    driver: Partial = {
        "version": version,
        "open_module": is_open,
        "module_loaded": "nvidia" in modules or version is not None,
        "module_on_disk": _on_disk(scene),
        "nouveau_loaded": "nouveau" in modules,
        "hardware": hardware,
        "nvswitch": bool(switches),
        "device_nodes": scene.exists("/dev/nvidiactl"),
        "rocm": scene.read("/opt/rocm/.info/version"),
    }
    if switches:
        driver["fabric_manager"] = _fabric_manager(scene)
        driver["fabric_manager_version"] = _fabric_manager_version(scene)
    topology: Partial = {"iommu": _iommu(scene), "acs_enabled": _acs(scene)}
    return {
        "driver": {name: value for name, value in driver.items() if value is not None},
        "topology": {name: value for name, value in topology.items() if value is not None},
    }


def probe_cuda(scene: Scene) -> Partial | None:
    """``driver.cuda_init_error``: cuInit's own answer, and whether a compatibility library gave it."""
    if not (scene.exists("/dev/nvidiactl") or scene.exists("/dev/dxg")):
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"messages": [f"libcuda.so.1: {error}"]}
    code = int(library.cuInit(0))
    found: Partial = {"cuda_init_error": code}
    path = _mapped("libcuda.so")
    if path and "/compat" in path:
        found["compat_libcuda"] = path
    return {"driver": found}


def _mapped(name: str) -> str | None:
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            if name in line:
                return os.path.realpath(line.split(None, 5)[-1].strip())
    return None


def _module(text: str) -> tuple[str | None, bool | None]:
    """Version of the loaded module, and whether it is the open one.

    >>> _module("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023")
    ('535.104.05', False)
    """
    match = re.search(r"NVRM version:.*?\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return (match[1], "Open Kernel Module" in text) if match else (None, None)


def _on_disk(scene: Scene) -> bool | None:
    release = scene.read("/proc/sys/kernel/osrelease")
    listed = scene.read(f"/lib/modules/{release}/modules.dep") if release else None
    return None if listed is None else re.search(r"(^|/)nvidia\.ko", listed, re.MULTILINE) is not None


def _hardware(scene: Scene) -> tuple[list[str] | None, int]:
    """NVIDIA's GPUs on the PCI bus, and how many NVSwitches."""
    if not scene.exists("/sys/bus/pci/devices"):
        return None, 0
    gpus, switches = [], 0
    for address in scene.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{address}"
        if scene.read(f"{folder}/vendor") != _NVIDIA:
            continue
        kind = scene.read(f"{folder}/class") or ""
        if kind.startswith(_GPU_CLASSES):
            gpus.append(f"{address} NVIDIA [10de:{(scene.read(f'{folder}/device') or '0x?')[2:]}]")
        switches += kind.startswith(_SWITCH_CLASS)
    return gpus, switches


def _fabric_manager(scene: Scene) -> str | None:
    """``systemctl is-active`` fails, and still answers, for a service that does not run."""
    for path in ("/usr/lib/systemd/system", "/lib/systemd/system", "/etc/systemd/system"):
        if scene.exists(f"{path}/nvidia-fabricmanager.service"):
            text = scene.run(["sh", "-c", "systemctl is-active nvidia-fabricmanager || true"])
            return (text or "").strip() or None
    processes = (scene.read(f"/proc/{pid}/comm") for pid in scene.names("/proc") if pid.isdigit())
    return "active" if any(name == "nv-fabricmanage" for name in processes) else "absent"


def _fabric_manager_version(scene: Scene) -> str | None:
    match = re.search(r"(\d{3}\.\d+(?:\.\d+)?)", scene.run(["nv-fabricmanager", "--version"]) or "")
    return match[1] if match else None


def _iommu(scene: Scene) -> str | None:
    """Whether device addresses are translated, as far as sysfs says: by the type of a group with a GPU in it."""
    if not scene.exists("/sys/class/iommu"):
        return None
    if not scene.names("/sys/class/iommu"):
        return "off"
    for group in scene.names("/sys/kernel/iommu_groups"):
        devices = scene.names(f"/sys/kernel/iommu_groups/{group}/devices")
        vendors = {scene.read(f"/sys/bus/pci/devices/{device}/vendor") for device in devices}
        kind = scene.read(f"/sys/kernel/iommu_groups/{group}/type")
        if _NVIDIA in vendors and kind:
            return "passthrough" if kind == "identity" else "translating"
    return "passthrough" if "iommu=pt" in (scene.read("/proc/cmdline") or "") else None


def _acs(scene: Scene) -> bool | None:
    """Whether a PCI bridge above a GPU redirects peer-to-peer traffic to the root. Needs root to read."""
    answers = []
    for address in scene.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{address}"
        is_gpu = (scene.read(f"{folder}/class") or "").startswith(_GPU_CLASSES)
        if is_gpu and scene.read(f"{folder}/vendor") == _NVIDIA:
            answers += [_redirects(scene, bridge) for bridge in _bridges_above(scene, folder)]
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def _bridges_above(scene: Scene, folder: str) -> list[str]:
    """The addresses on the way to the root: /sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0."""
    parts = scene.path(folder).resolve().parts[:-1]
    return [part for part in parts if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part)]


def _redirects(scene: Scene, address: str) -> bool | None:
    try:
        config = scene.path(f"/sys/bus/pci/devices/{address}/config").read_bytes()
    except OSError:
        return None
    return acs_redirects(config)


def acs_redirects(config: bytes) -> bool | None:
    """Whether ACS redirection is on, from a device's configuration space; None where it is not to be seen.

    Extended capabilities are a list from byte 256 on: id in 16 bits, version in 4, place of the next in 12.
    """
    place, seen = 0x100, set()
    while 0x100 <= place <= len(config) - 8 and place not in seen:
        seen.add(place)
        (header,) = struct.unpack_from("<I", config, place)
        if header & 0xFFFF == _ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, place + 6)
            return bool(control & _ACS_REDIRECT)
        place = header >> 20
    return None if len(config) <= 0x100 else False

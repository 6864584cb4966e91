"""Operating system, machine and container."""

from __future__ import annotations

import os
import platform
import re

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene

_EFI_GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
_CONTAINERS = {
    "docker": "docker",
    "containerd": "containerd",
    "kubepods": "kubernetes",
    "libpod": "podman",
    "lxc": "lxc",
    "garden": "garden",
}


def probe(scene: Scene) -> Partial:
    """``platform`` and ``container``."""
    return {"platform": _platform(scene), "container": _container(scene)}


def _platform(scene: Scene) -> Partial:
    kernel = scene.read("/proc/sys/kernel/osrelease") or platform.release()
    machine = platform.machine()
    found: Partial = {
        "system": platform.system().lower(),
        "os": _os(scene, machine),
        "machine": machine,
        "kernel": kernel,
        "kernel_cmdline": scene.read("/proc/cmdline"),
        "libc": platform.libc_ver()[1] or None,
        "wsl": "microsoft" in kernel.lower() or scene.exists("/dev/dxg"),
        "jetson": _jetson(scene),
        "secure_boot": _secure_boot(scene),
        "virtual_machine": _virtual(scene),
        "libstdcxx": _libstdcxx(scene),
        "cpu_count": os.cpu_count(),
        "numa_nodes": sum(
            re.fullmatch(r"node\d+", name) is not None for name in scene.names("/sys/devices/system/node")
        )
        or None,
        "uptime_s": _uptime(scene),
    }
    return {name: value for name, value in found.items() if value is not None}


def _os(scene: Scene, machine: str) -> str | None:
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        match = re.search(r'^PRETTY_NAME="?([^"\n]*)', scene.read(path) or "", re.MULTILINE)
        if match:
            return f"{match[1]} ({machine})"
    return None


def _jetson(scene: Scene) -> bool:
    model = scene.read("/proc/device-tree/model") or ""
    return scene.exists("/etc/nv_tegra_release") or "jetson" in model.lower() or "tegra" in model.lower()


def _secure_boot(scene: Scene) -> bool | None:
    """From EFI's own variable (4 bytes of attributes, then the value); None without EFI."""
    try:
        data = scene.path(f"/sys/firmware/efi/efivars/SecureBoot-{_EFI_GLOBAL}").read_bytes()
    except OSError:
        return None
    return bool(data[4]) if len(data) > 4 else None


def _virtual(scene: Scene) -> bool | None:
    info = scene.read("/proc/cpuinfo")
    return None if info is None else re.search(r"^flags\s*:.*\bhypervisor\b", info, re.MULTILINE) is not None


def _libstdcxx(scene: Scene) -> str | None:
    """The newest symbol version of the system's libstdc++; its file name says it since GCC 3.4."""
    machine = platform.machine()
    for folder in (f"/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib"):
        for name in scene.names(folder):
            match = re.fullmatch(r"libstdc\+\+\.so\.6\.0\.(\d+)", name)
            if match:
                return f"3.4.{match[1]}"
    return None


def _uptime(scene: Scene) -> float | None:
    words = (scene.read("/proc/uptime") or "").split()
    return float(words[0]) if words else None


def _container(scene: Scene) -> Partial:
    environ = scene.environ
    found: Partial = {
        "kind": _kind(scene),
        "cuda": environ.get("CUDA_VERSION") or None,
        "visible_devices": environ.get("NVIDIA_VISIBLE_DEVICES"),
        "image": environ.get("SINGULARITY_CONTAINER") or environ.get("APPTAINER_CONTAINER") or None,
        "gpu_devices": any(re.fullmatch(r"nvidia\d+", name) for name in scene.names("/dev"))
        or scene.exists("/dev/dxg")
        or scene.exists("/dev/kfd"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _kind(scene: Scene) -> str:
    """The container that this runs in, "" for none."""
    environ = scene.environ
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if environ.get("APPTAINER_CONTAINER") or environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if environ.get("ENROOT_ROOTFS"):
        return "enroot"
    if scene.exists("/run/.containerenv"):
        return "podman"
    if scene.exists("/.dockerenv"):
        return "docker"
    groups = (scene.read("/proc/1/cgroup") or "") + (scene.read("/proc/self/cgroup") or "")
    return next((kind for word, kind in _CONTAINERS.items() if f"/{word}" in groups), "")

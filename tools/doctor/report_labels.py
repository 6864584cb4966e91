"""Labelled values: "CUDA used to build PyTorch: 11.3", "torch cuda version ... 12.1", {"torch_cuda": "11.3"}.

A label is known by its letters and digits alone, so that one table reads collect_env of every release,
`accelerate env`, `ds_report`, `nvidia-smi -q`, issue forms, and loosely named JSON.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.tools.doctor import report_gpus as gpus
from phalanx.tools.doctor import report_values as read
from phalanx.tools.doctor.draft import Draft
from phalanx.tools.doctor.quantities import number, size_bytes, truth

Reader = Callable[[Draft, Any], None]


def _text(path: str) -> Reader:
    def reader(draft: Draft, value: Any) -> None:
        draft.put(path, read.known(value))

    return reader


def _version(path: str) -> Reader:
    def reader(draft: Draft, value: Any) -> None:
        draft.put(path, read.version_text(value))

    return reader


def _truth(path: str) -> Reader:
    def reader(draft: Draft, value: Any) -> None:
        draft.put(path, truth(value))

    return reader


def _size(path: str, unit: str = "") -> Reader:
    def reader(draft: Draft, value: Any) -> None:
        draft.put(path, size_bytes(value, unit))

    return reader


def _number(path: str) -> Reader:
    def reader(draft: Draft, value: Any) -> None:
        draft.put(path, number(value))

    return reader


def _ignored(draft: Draft, value: Any) -> None:
    """A label whose value no check needs, and whose line is no symptom."""


_READERS: tuple[tuple[str, Reader], ...] = (
    ("pytorch version|torch version|torch|pytorch|torch __version__|pytorch version gpu|pytorch version accelerator|"
     "pytorch build|installed torch", read.torch_version),
    ("cuda used to build pytorch|torch cuda|torch cuda version|torch version cuda|pytorch cuda|pytorch cuda version|"
     "cuda built with|torch built with cuda", read.torch_cuda),
    ("rocm used to build pytorch|torch hip|torch hip version|torch version hip|rocm|rocm version|hip", read.torch_hip),
    ("is cuda available|cuda available|available|torch cuda is available|cuda is available|gpu available|is available", _truth("torch.cuda_available")),
    ("torch arch list|arch list|torch cuda arch list|torch get arch list|cuda arch list", read.arch_list),
    ("torch git version|torch git|deepspeed info|cmake version|llvm version|is debug build|cuda module loading set to|"
     "miopen runtime version|is xnnpack available|build settings", _ignored),
    ("torch install path|torch file|torch path|torch location", _text("torch.file")),
    ("torch cxx11 abi|compiled with cxx11 abi|cxx11 abi", _truth("torch.cxx11_abi")),
    ("import error|torch error|torch import error", _text("torch.error")),
    ("os|operating system|os platform|system|os version|distribution|host os|environment os", read.operating_system),
    ("platform|python platform|machine|environment", read.platform),
    ("kernel|kernel version|linux kernel|uname|uname a", read.kernel),
    ("kernel cmdline|kernel command line|proc cmdline|cmdline|boot parameters|kernel parameters", _text("platform.kernel_cmdline")),
    ("libc version|libc|glibc|glibc version", _version("platform.libc")),
    ("gcc version|gcc|host compiler|g|gxx", read.gcc),
    ("clang version|clang", read.clang),
    ("ninja|ninja version", _text("compilers.ninja")),
    ("python version|python", read.python_version),
    ("python executable|which python", _text("python.executable")),
    ("install|installer|install method|how you installed pytorch|package manager|installation method", read.installer),
    ("cuda runtime version|nvcc|nvcc version|system cuda|cuda toolkit|cuda toolkit version|toolkit|local cuda|"
     "system cuda version|cuda home version|toolkit version", read.nvcc),
    ("cuda home|cuda path", _text("compilers.cuda_home")),
    ("gpu models and configuration|gpu names|gpus|gpu|gpu type|gpu name|device name|gpu model|gpu models|graphics card|"
     "video card|nvidia gpu models|nvidia gpu|cards|card|hardware|accelerator|product name|devices", gpus.gpus),
    ("compute capability|compute capabilities|cuda capability|capability|gpu capability|sm|gpu compute capability", gpus.capability),
    ("gpu arch|gfx|gfx target|amd gpu arch|gfx version", gpus.gpu_arch),
    ("gpu count|num gpus|number of gpus|device count|ngpus|torch cuda device count", _number("torch.device_count")),
    ("nvidia driver version|driver version|driver|nvidia driver|host driver|gpu driver|kernel driver version|"
     "driver kernel|kernel module version|host driver version|kmd version|nvrm version", read.driver),
    ("driver library version|libcuda version|nvml version|nvml library version|userspace driver|user space driver version|"
     "driver userspace|libnvidia ml version|driver user|user space|userspace|libraries version|driver libraries|libnvidia version|"
     "client version|libcuda|nvml|driver in container|container driver|driver version in container|container driver version", read.driver_library),
    ("driver cuda|driver cuda version|cuda driver version|max cuda|cuda umd version|driver supports cuda|nvidia smi cuda", read.driver_cuda),
    ("cudnn version|cudnn|cudnn compiled|torch cudnn|compiled cudnn|cudnn built", read.cudnn),
    ("cudnn found|cudnn runtime|cudnn loaded|cudnn runtime version|loaded cudnn", _version("torch.cudnn_loaded")),
    ("nccl|nccl version|torch nccl", read.nccl),
    ("nccl loaded|nccl found|loaded nccl|nccl runtime", _version("torch.nccl_loaded")),
    ("torchvision version|torchvision", read.torchvision),
    ("torchvision cuda|torchvision cuda version", read.torchvision_cuda),
    ("torchvision build", read.torchvision_cuda),
    ("torchaudio version|torchaudio", read.torchaudio),
    ("torchaudio cuda", read.torchaudio_cuda),
    ("cuda in container|container cuda|image cuda|cuda image|docker cuda|cuda version in container", _version("container.cuda")),
    ("container|container runtime|docker|virtualization|runtime", read.container),
    ("docker image|image|container image", read.image),
    ("nvidia visible devices", _text("container.visible_devices")),
    ("shm size|shm|shared memory dev shm size|dev shm|shared memory|dev shm size|shm total", read.shm),
    ("ulimit memlock kb|max locked memory kbytes l|memlock kb|max locked memory kb", _size("limits.memlock_bytes", "k")),
    ("memlock|ulimit memlock|memlock limit|max locked memory|ulimit l", _size("limits.memlock_bytes", "k")),
    ("memlock bytes|max locked memory bytes l", _size("limits.memlock_bytes")),
    ("open files n|nofile|ulimit nofile|ulimit n|open files", _size("limits.nofile")),
    ("max user processes u|nproc|ulimit u", _size("limits.nproc")),
    ("stack size kbytes s", _size("limits.stack_bytes", "k")),
    ("cgroup memory|memory limit|container memory", _size("limits.cgroup_memory_bytes")),
    ("system ram|ram|host memory|memory total|total memory|memtotal", _size("memory.total_bytes")),
    ("compute mode|gpu compute mode", gpus.compute_mode),
    ("mig mode|mig|mig enabled", gpus.mig),
    ("persistence mode|persistence", gpus.persistence),
    ("fabric state|fabric", gpus.fabric_state),
    ("fabric manager|fabricmanager|nvidia fabricmanager|fabric manager status", read.fabric_manager),
    ("secure boot|secureboot|uefi secure boot", _truth("platform.secure_boot")),
    ("nouveau|nouveau loaded", _truth("driver.nouveau_loaded")),
    ("module loaded|nvidia module loaded|kernel module loaded", _truth("driver.module_loaded")),
    ("iommu|iommu enabled", read.iommu),
    ("acs|acs enabled", _truth("topology.acs_enabled")),
    ("jetson|jetpack|jetpack version|l4t|l4t version|tegra", read.jetson),
    ("wsl|wsl2|is wsl", _truth("platform.wsl")),
    ("host name|hostname", _text("network.host_name")),
    ("host name resolves to|hostname resolves to|hostname address|host address|resolves to|host addresses", read.host_addresses),
    ("nnodes|nodes|num nodes|number of nodes|node count|num machines", _number("job.nnodes")),
    ("local world size|nproc per node|processes per node|gpus per node|num processes per node", _number("job.local_world_size")),
    ("num workers|loader workers|dataloader workers|workers", _number("job.loader_workers")),
    ("backend|process group backend|distributed backend", _text("job.backend")),
    ("interconnect|network|fabric type", read.interconnect),
    ("libstdcxx|libstdc|libstdcxx in env|libstdcxx version", read.libstdcxx),
    ("cuda init error|cuinit|cuda error code", _number("driver.cuda_init_error")),
    ("nccl available|nccl built|is nccl available", _truth("torch.nccl_built")),
    ("hip runtime version|clang", _ignored),
    ("libraries mapped|loaded libraries|ldd", read.libraries),
    ("numpy version|numpy", read.distribution("numpy")),
    ("accelerate version|accelerate", read.distribution("accelerate")),
    ("transformers version|transformers", read.distribution("transformers")),
    ("deepspeed version|deepspeed", read.distribution("deepspeed")),
    ("flash attn|flash attention|flash attn version", read.distribution("flash-attn")),
    ("xformers|xformers version", read.distribution("xformers")),
    ("mkl|mkl version", read.distribution("mkl")),
    ("env|environment variables|variables|environ", read.environment),
    ("packages|pip packages|pip list|installed packages|extra|requirements|pip|pip freeze", read.packages),
    ("master addr|rendezvous address", read.variable("MASTER_ADDR")),
    ("kernel log|dmesg|xid|xids", read.kernel_log),
)  # fmt: skip

LABELS: Mapping[str, Reader] = {
    re.sub(r"[^a-z0-9]", "", name): reader for names, reader in _READERS for name in names.split("|")
}

# Labels of collect_env that are read though their colon is gone; longest first, so that none hides another.
_SPOKEN = sorted(
    [
        "pytorch version",
        "is debug build",
        "cuda used to build pytorch",
        "rocm used to build pytorch",
        "os",
        "gcc version",
        "clang version",
        "libc version",
        "python version",
        "python platform",
        "is cuda available",
        "cuda runtime version",
        "nvidia driver version",
        "cudnn version",
        "gpu models and configuration",
        "cmake version",
        "torch cuda version",
        "torch version",
        "nvcc version",
    ],
    key=len,
    reverse=True,
)
PLAIN_LABELS = frozenset(
    re.sub(r"[^a-z0-9]", "", name) for name in _SPOKEN
)  # lines that hold a value and no more
_NO_COLON = re.compile(
    rf"^\W{{0,6}}({'|'.join(_SPOKEN)})\s{{1,8}}(?!is\b|of\b|and\b|was\b)(\S.{{0,200}})$", re.I
)
# detectron2's table has neither colon nor equals sign, only room between the columns.
_COLUMNS = re.compile(
    r"^\s{0,8}(PyTorch|torchvision|numpy|GPU available|CUDA available|CUDA_HOME|GCC|Driver version|Python|"
    r"GPU \d{1,2}(?:,\d{1,2}){0,15}) {2,60}(\S.{0,200})$",
    re.I,
)
_LABELLED = re.compile(
    r"^[\s|*\-•#`\"'\[]{0,12}([A-Za-z_][^:=\n]{0,60}?)[\s`*\"'\]]{0,4}(?:\s{0,4}\.{3,80}|:|\s?=(?!=))\s*(.*)$"
)
_BRACKETS = re.compile(r"\[[^\[\]]{0,20}\]")


def key_of(label: str) -> str:
    """A label by its letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", label.lower())


# Words that a name of people's own making has around the one that counts: "installed_torch_version".
_FILLERS = frozenset(
    [
        "version",
        "versions",
        "installed",
        "current",
        "detected",
        "reported",
        "used",
        "actual",
        "name",
        "names",
        "model",
        "found",
        "string",
        "number",
        "info",
        "list",
        "value",
        "my",
        "local",
        "is",
        "the",
    ]
)


def loose_label(name: str) -> str:
    """A known label in a name of somebody's own making, else the name itself.

    >>> loose_label("local_torchvision_version"), loose_label("actual_driver"), loose_label("color")
    ('torchvision', 'driver', 'color')
    """
    if key_of(name) in LABELS:
        return name
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    while words and key_of("".join(words)) not in LABELS:
        if words[-1] in _FILLERS:
            words.pop()
        elif words[0] in _FILLERS:
            words.pop(0)
        else:
            return name
    return " ".join(words) or name


def read_value(draft: Draft, label: str, value: Any) -> bool:
    """Read a value by its label; False where the label is not known."""
    reader = LABELS.get(key_of(label))
    if reader is None:
        return False
    with contextlib.suppress(ArithmeticError, LookupError, TypeError, ValueError):
        reader(draft, value)  # a value of a kind nobody expected must not lose the others
    return True


def split_label(line: str) -> tuple[str, str] | None:
    """Label and value of a line, by colon, dots or equals sign, or by a label known without one."""
    match = _LABELLED.match(line)
    if match and key_of(match[1]) in LABELS:
        return match[1], _trimmed(match[2])
    bare = _NO_COLON.match(line)
    return (bare[1], _trimmed(bare[2])) if bare else _split_columns(line)


def _split_columns(line: str) -> tuple[str, str] | None:
    columns = _COLUMNS.match(line)
    if columns is None:
        return None
    label, value = columns[1], columns[2]
    if label.lower().startswith("gpu "):
        return ("gpus", f"{label}: {value}") if label[4].isdigit() else ("cuda available", value)
    return label, _trimmed(value)


def _trimmed(value: str) -> str:
    value = value.strip()
    if value.startswith(("[", "{")):
        return value.rstrip(",")
    return value.strip("`*\"', |").strip()

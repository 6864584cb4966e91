"""How much memory a GPU has for tensors: by product name, by size, or the ones that are here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from phalanx.tools.facts.tables import capability_of_gpu, table
from phalanx.tools.usage import UsageMistake, nearest

MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
#: What CUDA, cuBLAS and cuDNN take before the first tensor, by the major number of the compute capability. Measured
#: values lie within about 100 MiB of these, depending on driver and libraries: an assumption, and printed as one.
CONTEXT_MIB = {5: 200, 6: 250, 7: 320, 8: 450, 9: 550, 10: 600, 12: 500}
CONTEXT_DEFAULT_MIB = 450
NCCL_MIB = 200  # NCCL's buffers and its kernels' memory, with more than one rank
SLACK = 0.05  # rounding and fragmentation of torch's allocator, as a share of the tensors' peak
COMMON_GB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)


@dataclass(frozen=True)
class GpuMemory:
    """One GPU's memory.

    Attributes:
        name: As nvidia-smi prints it, or the size that was typed.
        memory_bytes: All of it; None where only the kind of device is known.
        context_bytes: Taken before the first tensor.
        certain: False where the table is best knowledge.
        note: How the name was understood.
    """

    name: str
    memory_bytes: int | None
    context_bytes: int
    certain: bool = True
    note: str = ""

    def overhead_bytes(self, world_size: int) -> int:
        """What is taken beside tensors on one of so many ranks."""
        if not self.context_bytes:
            return 0
        return self.context_bytes + (NCCL_MIB * MIB if world_size > 1 else 0)


NO_GPU = GpuMemory("CPU", None, 0)
UNKNOWN_GPU = GpuMemory("a GPU", None, CONTEXT_DEFAULT_MIB * MIB)


def find_gpu(text: str | None) -> GpuMemory:
    """The GPU that ``--gpu`` names; without it the smallest one here, or none in particular.

    >>> find_gpu("24GiB").memory_bytes == 24 << 30, find_gpu("80 GB").memory_bytes
    (True, 80000000000)

    Raises:
        UsageMistake: No GPU is called so.
    """
    if text is None:
        return _present() or UNKNOWN_GPU
    if text.strip().lower() in ("none", "cpu"):
        return NO_GPU
    size = re.fullmatch(r"\s*(\d{1,7}(?:\.\d{1,3})?)\s*(gb|gib|mib|mb|g)\s*", text, re.I)
    if size is not None:
        unit = {"gb": GB, "g": GIB, "gib": GIB, "mib": MIB, "mb": 10**6}[size[2].lower()]
        if float(size[1]) <= 0:
            raise UsageMistake(f"--gpu {text}: no memory at all.", fix="--gpu 24GiB")
        return GpuMemory(text.strip(), int(float(size[1]) * unit), CONTEXT_DEFAULT_MIB * MIB)
    return _by_name(text)


def _by_name(text: str) -> GpuMemory:
    rows = table("gpus")["gpus"]
    words = re.findall(r"[a-z0-9]+", text.lower())
    known = {row["name"]: row for row in rows}
    if not words:
        raise UsageMistake(f"--gpu {text!r}: a name, or a size.", fix="--gpu H100, or --gpu 24GiB")
    exact = [
        row
        for row in rows
        if text.lower() in (name.lower() for name in (row["name"], *(row.get("aliases") or ())))
    ]
    found = exact or [row for row in rows if all(word in _words(row) for word in words)]
    if not found:
        near = nearest(text, known) or ["NVIDIA A100-SXM4-80GB"]
        raise UsageMistake(
            f"--gpu {text}: no GPU of that name is in the table.",
            fix=f"--gpu '{near[0]}', or its memory: --gpu 24GiB",
        )
    row = min(found, key=_memory)
    others = sorted({other["memory_gb"] for other in found if other["memory_gb"] != row["memory_gb"]})
    note = f"the smallest called so; others have {', '.join(map(str, others))} GB" if others else ""
    certain = bool(row.get("certain", True) and row.get("memory_mib_reported"))
    return GpuMemory(row["name"], _memory(row), _context(row["compute_capability"]), certain, note)


def _memory(row: dict[str, Any]) -> int:
    """As nvidia-smi reports it, else as it is sold."""
    reported = row.get("memory_mib_reported")
    return int(reported * MIB if reported else row["memory_gb"] * GB)


def _words(row: dict[str, object]) -> set[str]:
    names = [row["name"], *(row.get("aliases") or ())]  # type: ignore[misc]
    return {word for name in names for word in re.findall(r"[a-z0-9]+", str(name).lower())}


def _context(capability: str | None) -> int:
    major = int((capability or "0").split(".")[0])
    return CONTEXT_MIB.get(major, CONTEXT_DEFAULT_MIB) * MIB


def _present() -> GpuMemory | None:
    """The smallest GPU of this node; None without any."""
    from phalanx.dist.gpus import nvml_inventory

    gpus = [gpu for gpu in nvml_inventory() or [] if gpu.memory_total_bytes]
    if not gpus:
        return None
    smallest = min(gpus, key=lambda gpu: gpu.memory_total_bytes or 0)
    return GpuMemory(smallest.name, smallest.memory_total_bytes, _context(capability_of_gpu(smallest.name)))

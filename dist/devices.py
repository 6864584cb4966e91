"""This process's GPUs: which it sees, in which order, and choosing them before CUDA starts. No torch needed.

The parts: `visibility` reads CUDA_VISIBLE_DEVICES, `device_selection` sets it, `gpus` asks NVML.
"""

from __future__ import annotations

from phalanx.dist.device_selection import select_devices
from phalanx.dist.gpus import Gpu, nvml_inventory, why_busy
from phalanx.dist.rank_visibility import visible_devices_per_rank
from phalanx.dist.visibility import VARIABLE, InvalidVisibleDevices, VisibleDevices, visible_devices

__all__ = [
    "VARIABLE",
    "Gpu",
    "InvalidVisibleDevices",
    "VisibleDevices",
    "nvml_inventory",
    "select_devices",
    "visible_devices",
    "visible_devices_per_rank",
    "why_busy",
]

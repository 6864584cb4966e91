"""The devices that the CUDA driver itself shows, asked in a process of its own: it may hang or crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 20.0

_CODE = """
import ctypes, json, uuid
cuda = ctypes.CDLL("libcuda.so.1")
if cuda.cuInit(0):
    raise SystemExit(1)
count = ctypes.c_int()
cuda.cuDeviceGetCount(ctypes.byref(count))
found = []
for number in range(count.value):
    device, size, raw = ctypes.c_int(), ctypes.c_size_t(), (ctypes.c_ubyte * 16)()
    if cuda.cuDeviceGet(ctypes.byref(device), number):
        continue
    # The second version knows MIG instances; the first gives their GPU's.
    is_new = hasattr(cuda, "cuDeviceGetUuid_v2")
    ask = cuda.cuDeviceGetUuid_v2 if is_new else cuda.cuDeviceGetUuid
    known = not ask(raw, device)
    told = not cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    found.append({"uuid": str(uuid.UUID(bytes=bytes(raw))) if known else "", "bytes": size.value if told else None})
print(json.dumps(found))
"""


def cuda_devices(environ: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """UUID (without its prefix) and size of each device, in CUDA's order; empty where the driver does not answer."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE],
            env=None if environ is None else dict(environ),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        found = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    return found if isinstance(found, list) else []


def visible_memory() -> dict[str, int]:
    """Bytes of each MIG instance that CUDA shows here, by its full UUID."""
    return {
        f"MIG-{device['uuid']}": int(device["bytes"])
        for device in cuda_devices()
        if device.get("uuid") and device.get("bytes")
    }

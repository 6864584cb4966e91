"""Whether CUDA has started in this process, and so has read CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import ctypes
import os
import sys

_LIBRARY = "libcuda.so.1"


def cuda_device_count_if_started() -> int | None:
    """How many GPUs CUDA shows this process; None while it has not started, -1 where it has but does not say.

    The driver itself is asked, so that it does not matter which library started it. torch.cuda.is_initialized()
    alone would miss torch.cuda.is_available(), which starts the driver (and so fixes the visible GPUs) too.
    """
    try:
        # RTLD_NOLOAD: a driver that nobody has loaded was started by nobody, and stays out.
        driver = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        count = ctypes.c_int(-1)
        # Unlike cuInit it changes nothing: before cuInit it answers CUDA_ERROR_NOT_INITIALIZED.
        if driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    except (OSError, AttributeError):
        pass
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return -1
    return None

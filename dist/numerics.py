"""What the bits of a run depend on besides its settings: threads, hardware, flags, versions."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

# Variables by which kernels are chosen.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
)


class NumericsWarning(UserWarning):
    """A run goes on, or its ranks run, under conditions that give other last bits."""


def numerics_record(device: torch.device, **settings: Any) -> dict[str, Any]:
    """What decides the last bits of a computation on ``device``, as plain values.

    >>> record = numerics_record(torch.device("cpu"), virtual_ranks=8)
    >>> record["virtual_ranks"], record["torch"] == str(torch.__version__)
    (8, True)

    Args:
        device: Where the model computes.
        settings: To be recorded with it.
    """
    from phalanx import __version__

    backends: Any = torch.backends
    record: dict[str, Any] = {
        **settings,
        "num_threads": torch.get_num_threads(),
        "cpu": _cpu_name(),
        "cpu_capability": backends.cpu.get_cpu_capability(),
        "mkldnn": bool(backends.mkldnn.is_available() and backends.mkldnn.enabled),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "device": device.type,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "phalanx": __version__,
    }
    if device.type == "cuda":
        record |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": backends.cudnn.version(),
            "cudnn.benchmark": backends.cudnn.benchmark,
            "cudnn.deterministic": backends.cudnn.deterministic,
            "cudnn.allow_tf32": backends.cudnn.allow_tf32,
        }
    return record | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each entry that differs, in words.

    >>> differences({"num_threads": 1, "torch": "2.6.0"}, {"num_threads": 4, "torch": "2.6.0"})
    ['num_threads 1 -> 4']
    """
    names = [*then, *(name for name in now if name not in then)]
    return [
        f"{name} {then.get(name)!r} -> {now.get(name)!r}" for name in names if then.get(name) != now.get(name)
    ]


def warn_of_other_bits(
    then: Mapping[str, Any] | None, now: Mapping[str, Any] | None, *, started: bool = True
) -> None:
    """Warn when a run that was saved under ``then`` goes on under ``now`` with other last bits.

    Args:
        then: The record in the saved state; None when it was saved without virtual ranks.
        now: This run's; None without virtual ranks.
        started: Whether any step was done before.
    """
    if not started or (then is None and now is None):
        return
    if then is None or now is None:
        changed = f"virtual_ranks {(then or {}).get('virtual_ranks')} -> {(now or {}).get('virtual_ranks')}"
    else:
        changed = ", ".join(differences(then, now))
    if changed:
        warnings.warn(
            NumericsWarning(
                f"not bit-equal: this run goes on under other conditions than it was saved under ({changed}). Its weights "
                "will differ in the last bits from those of a run that was never stopped"
            ),
            stacklevel=3,
        )


@lru_cache(maxsize=1)
def _cpu_name() -> str:
    """The processor's model: libraries choose kernels and block sizes by it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

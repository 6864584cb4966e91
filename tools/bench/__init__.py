"""phalanx.tools.bench: how fast this machine's ranks talk to each other, and how fast a loader is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.tools.bench.bandwidth import Bandwidth as Bandwidth
    from phalanx.tools.bench.bandwidth import bandwidth as bandwidth
    from phalanx.tools.bench.settings import BenchSettings as BenchSettings

_HOME = {"Bandwidth": "bandwidth", "BenchSettings": "settings", "bandwidth": "bandwidth"}

__all__ = ["Bandwidth", "BenchSettings", "bandwidth"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

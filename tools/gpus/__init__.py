"""phalanx.tools.gpus: the GPUs of one node or many, who is on them, and what they can do. No torch needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.tools.gpus.node_reading import read_node as read_node
    from phalanx.tools.gpus.readings import NodeReading as NodeReading
    from phalanx.tools.gpus.screen import screen as screen

_HOME = {"NodeReading": "readings", "read_node": "node_reading", "screen": "screen"}

__all__ = ["NodeReading", "read_node", "screen"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

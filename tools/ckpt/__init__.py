"""phalanx.tools.ckpt: look into checkpoints, compare, mend, convert and verify them; no pickled code ever runs.

Names load on first use; torch is never imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.tools.ckpt.contents import Contents as Contents
    from phalanx.tools.ckpt.contents import Entry as Entry
    from phalanx.tools.ckpt.errors import BadCheckpoint as BadCheckpoint
    from phalanx.tools.ckpt.opening import open_checkpoint as open_checkpoint

_HOME = {
    "BadCheckpoint": "errors",
    "Contents": "contents",
    "Entry": "contents",
    "open_checkpoint": "opening",
}

__all__ = ["BadCheckpoint", "Contents", "Entry", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

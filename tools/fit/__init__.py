"""phalanx.tools.fit: the memory that a training step needs, per strategy and world size, without a GPU.

Names load on first use; torch is imported in a child process alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.tools.fit.asking import BadTarget as BadTarget
    from phalanx.tools.fit.estimates import Estimate as Estimate
    from phalanx.tools.fit.fitting import Fit as Fit
    from phalanx.tools.fit.fitting import Question as Question
    from phalanx.tools.fit.fitting import fit as fit
    from phalanx.tools.fit.gpu_memory import find_gpu as find_gpu

_HOME = {
    "BadTarget": "asking",
    "Estimate": "estimates",
    "Fit": "fitting",
    "Question": "fitting",
    "find_gpu": "gpu_memory",
    "fit": "fitting",
}

__all__ = ["BadTarget", "Estimate", "Fit", "Question", "find_gpu", "fit"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

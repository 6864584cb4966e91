"""phalanx.tools.explain: the root cause in a failed run's logs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.tools.explain.explaining import explain_paths, explain_sources, explain_text
    from phalanx.tools.explain.explanation import Diagnosis, Explanation, FirstFailure
    from phalanx.tools.explain.rendering import render
    from phalanx.tools.explain.sources import Source, find_sources

_HOME = {
    "Diagnosis": "explanation",
    "Explanation": "explanation",
    "FirstFailure": "explanation",
    "Source": "sources",
    "explain_paths": "explaining",
    "explain_sources": "explaining",
    "explain_text": "explaining",
    "find_sources": "sources",
    "render": "rendering",
}

__all__ = [
    "Diagnosis",
    "Explanation",
    "FirstFailure",
    "Source",
    "explain_paths",
    "explain_sources",
    "explain_text",
    "find_sources",
    "render",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

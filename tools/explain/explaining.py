"""The one call: sources in, an explanation out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from phalanx.tools.explain.explanation import Explanation
from phalanx.tools.explain.scanning import scan_sources
from phalanx.tools.explain.sources import Source, find_sources
from phalanx.tools.explain.verdict import explain_scan


def explain_sources(sources: Iterable[Source]) -> Explanation:
    """Read sources once and name the cause."""
    return explain_scan(scan_sources(sources))


def explain_text(text: str | bytes, *, name: str = "") -> Explanation:
    r"""Explain a log that is at hand.

    >>> explain_text("RuntimeError: Ninja is required to load C++ extensions\n").diagnoses[0].id
    'ninja-missing'
    """
    data = text.encode(errors="replace") if isinstance(text, str) else text
    return explain_sources([Source(name=name, data=data)])


def explain_paths(paths: Sequence[str | Path]) -> Explanation:
    """Explain files and folders; raises `UsageMistake` for what cannot be read."""
    return explain_sources(find_sources([str(path) for path in paths]))

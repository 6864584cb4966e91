"""phalanx.tools.doctor: facts of a machine, and what in them breaks a multi-GPU job."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.tools.doctor.checks import CHECKS as CHECKS
    from phalanx.tools.doctor.checks import diagnose as diagnose
    from phalanx.tools.doctor.facts import Facts as Facts
    from phalanx.tools.doctor.findings import Finding as Finding
    from phalanx.tools.doctor.findings import Report as Report
    from phalanx.tools.doctor.render import render_markdown as render_markdown
    from phalanx.tools.doctor.render import render_text as render_text
    from phalanx.tools.doctor.report_text import ReadReport as ReadReport
    from phalanx.tools.doctor.report_text import facts_from_text as facts_from_text

_HOME = {
    "CHECKS": "checks",
    "Facts": "facts",
    "Finding": "findings",
    "ReadReport": "report_text",
    "Report": "findings",
    "diagnose": "checks",
    "facts_from_text": "report_text",
    "render_markdown": "render",
    "render_text": "render",
}

__all__ = [
    "CHECKS",
    "Facts",
    "Finding",
    "ReadReport",
    "Report",
    "diagnose",
    "facts_from_text",
    "render_markdown",
    "render_text",
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

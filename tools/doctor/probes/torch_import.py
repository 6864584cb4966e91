"""What `import torch` finds, from the process that tries it: a torch that crashes, hangs or is missing is an answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from phalanx.tools.doctor.probes.isolation import Child, Partial, start_program
from phalanx.tools.doctor.probes.scene import Scene

_CHILD = Path(__file__).with_name("torch_child.py")
# What Python says itself of an import that went wrong, when the process could not.
_KEPT_ERRORS = (
    "error",
    "undefined symbol",
    "no such file",
    "cannot open",
    "abort",
    "terminate called",
    "fatal",
)


def start(scene: Scene, timeout_s: float, python: str = sys.executable) -> Child:
    """Start the process that imports torch; as ``python -c``, so that a folder named torch here counts."""
    return start_program("torch", [python, "-c", _CHILD.read_text()], timeout_s, scene.environ)


def answer(child: Child) -> Partial:
    """The facts about torch and what stands beside it, when the process has ended in whatever way."""
    found: Partial = {"torch": {}, "messages": []}
    for part in child.answers():
        found["messages"] += part.pop("messages", [])
        for name, value in part.items():
            if isinstance(value, dict):
                found.setdefault(name, {}).update(value)
            else:
                found[name] = value
    torch: dict[str, Any] = found["torch"]
    if child.timed_out:
        torch["timed_out"] = True
        torch.setdefault("installed", True)
    elif child.signal:
        torch["signal"] = child.signal
        torch.setdefault("installed", True)
    elif child.exit_code and not torch:
        torch.update(installed=True, error=_last_error(child.error_text()))
    found["messages"] += _errors(child.error_text())
    return found


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:1000] if lines else "the importing process failed without a word"


def _errors(text: str) -> list[str]:
    """Lines of stderr that tell of something; the numpy warning of an old torch is among them."""
    kept = []
    for line in text.splitlines():
        lower = line.lower()
        if any(word in lower for word in (*_KEPT_ERRORS, "warning", "numpy")):
            kept.append(line.strip()[:500])
    return kept[-20:]

"""Facts under loose names in JSON: {"torch_version": "1.6.0", "gpu_names": ["Tesla V100"], "env": {..}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phalanx.tools.doctor.draft import Draft
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.facts_json import from_json
from phalanx.tools.doctor.report_labels import LABELS, key_of, loose_label, read_value
from phalanx.tools.doctor.report_prose import read_prose
from phalanx.tools.doctor.report_values import package

_VERDICTS = (
    "cause",
    "fix",
    "diagnosis",
    "id",
    "schema",
    "verdict",
    "findings",
)  # somebody's conclusion is no fact
_OWN = ("torch", "driver", "platform", "limits", "python", "network", "compilers", "container")
_GPUS_FIRST = ("gpunames", "gpus", "gpu")  # what applies to every GPU is read once they are known
DEEPEST = 12


def parse_object(text: str) -> Mapping[str, Any] | None:
    """The JSON object that a report is, or None."""
    start = text.lstrip("\ufeff \t\r\n")
    if not start.startswith(("{", "[")):
        return None
    try:
        data = json.loads(start)
    except (ValueError, RecursionError):
        return None
    if isinstance(data, list) and len(data) == 1:
        data = data[0]
    return data if isinstance(data, Mapping) else None


def is_own(data: Mapping[str, Any]) -> bool:
    """Whether an object is what `phalanx doctor --json` printed, or its facts alone."""
    facts = data.get("facts", data)
    return isinstance(facts, Mapping) and any(isinstance(facts.get(name), Mapping) for name in _OWN)


def own_facts(data: Mapping[str, Any]) -> Facts:
    """Facts that doctor itself printed."""
    return from_json(data.get("facts", data))


def read_object(draft: Draft, data: Mapping[str, Any], depth: int = 0) -> None:
    """Read loosely named facts; what has no label is kept as words, which symptoms are looked for in."""
    inner = data.get("facts")
    if isinstance(inner, Mapping) and depth < DEEPEST:
        read_object(draft, inner, depth + 1)
    known = [item for item in data.items() if str(item[0]) not in (*_VERDICTS, "facts")]
    known.sort(key=lambda item: key_of(loose_label(str(item[0]))) not in _GPUS_FIRST)
    for name, value in known:
        _read(draft, str(name), value, depth)


def _read(draft: Draft, name: str, value: Any, depth: int) -> None:
    label = loose_label(name)
    if isinstance(value, Mapping) and key_of(label) not in LABELS:
        if depth < DEEPEST:
            read_object(draft, value, depth + 1)
        return
    labelled = read_value(draft, label, value)
    words = _words(value)
    if words and not labelled and _is_version(words) and not isinstance(value, (bool, dict)):
        package(draft, name, words)
    spoken = name if name.isupper() else name.replace("_", " ")
    for line in words.split("\n") if words else ():
        draft.messages.append(f"{spoken}: {line}")
        read_prose(draft, draft.messages[-1])


def _is_version(words: str) -> bool:
    return words[0].isdigit() and "." in words and len(words) < 40 and " " not in words


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{name}={text}" for name, text in value.items())[:20_000]
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)[:20_000]
    return str(value)[:200_000] if value is not None else ""

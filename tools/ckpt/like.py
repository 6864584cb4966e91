"""The keys that a state dict shall have: those of another checkpoint, of a list in a file, or as typed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.dist.key_rewrites import Shape
from phalanx.tools.ckpt.errors import BadCheckpoint, shown
from phalanx.tools.ckpt.opening import open_checkpoint
from phalanx.tools.ckpt.torch_values import MAX_DIMS, MAX_SIDE
from phalanx.tools.ckpt.weights import pick
from phalanx.tools.usage import UsageMistake

_MAX_LIST = 16 << 20
_CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".index.json")


@dataclass(frozen=True)
class Like:
    """What is aimed at.

    Attributes:
        shapes: Per key its shape, None where it is not known.
        twins: Names of one tensor: each name to the others.
        container: The entry the weights are in there; None where there is no such thing.
    """

    shapes: Mapping[str, Shape | None]
    twins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    container: str | None = None


def read_like(text: str) -> Like:
    """What ``--like`` names: a checkpoint, a list of keys (one a line, or JSON), or keys separated by commas.

    Raises:
        UsageMistake: It is none of these.
        BadCheckpoint: It is a damaged checkpoint.
    """
    path = Path(text)
    try:
        there = os.path.lexists(path)
    except (OSError, ValueError):  # a long list of keys is no name of a file
        there = False
    if not there:
        if not text.strip() or text.endswith(_CHECKPOINT_SUFFIXES) or "/" in text:
            raise UsageMistake(
                f"--like {shown(text)}: no such file.", fix="--like FILE, or --like KEY,KEY,.."
            )
        keys = [key.strip() for key in text.replace("\n", ",").split(",") if key.strip()]
        return Like(dict.fromkeys(keys))
    listed = _list_of_keys(path) if path.is_file() else None
    if listed is not None:
        return Like(listed)
    weights = pick(open_checkpoint(path))
    groups: dict[str, list[str]] = {}
    first = {entry.key: key for key, entry in weights.entries.items()}
    for key, entry in weights.entries.items():
        groups.setdefault(first.get(entry.shared_with or entry.key, key), []).append(key)
    twins = {
        key: tuple(k for k in names if k != key) for names in groups.values() if names[1:] for key in names
    }
    return Like(weights.shapes, twins, weights.container)


def _list_of_keys(path: Path) -> dict[str, Shape | None] | None:
    """Keys in a text or JSON file; None for any other kind of file."""
    if path.name.endswith(_CHECKPOINT_SUFFIXES) or path.stat().st_size > _MAX_LIST:
        return None
    try:
        text = path.read_text("utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    if not text.strip() or "\x00" in text:
        return None
    if text.lstrip()[:1] in "[{":
        try:
            return _json_keys(path, json.loads(text))
        except (ValueError, RecursionError):
            raise BadCheckpoint(path, "no JSON: neither a list of keys nor a table of shapes.") from None
    lines = [line.strip() for line in text.splitlines()]
    return dict.fromkeys(line for line in lines if line and not line.startswith("#"))


def _json_keys(path: Path, value: Any) -> dict[str, Shape | None]:
    """A list of keys, a table of shapes, or what `phalanx ckpt inspect --json` prints."""
    if isinstance(value, dict) and isinstance(value.get("tensors"), list):
        value = {entry["key"]: entry.get("shape") for entry in value["tensors"] if _has_key(entry)}
    if isinstance(value, list) and all(isinstance(key, str) for key in value):
        return dict.fromkeys(value)
    if isinstance(value, dict):
        return {key: _shape(shape) for key, shape in value.items()}
    raise BadCheckpoint(path, "neither a list of keys nor a table of shapes.")


def _has_key(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("key"), str)


def _shape(value: Any) -> Shape | None:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        return None
    return tuple(value) if all(type(side) is int and 0 <= side < MAX_SIDE for side in value) else None

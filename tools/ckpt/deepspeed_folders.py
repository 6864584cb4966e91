"""Folders that DeepSpeed wrote: one file of the model's states per rank or stage, and one of each rank's optimizer."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from phalanx.tools.ckpt.contents import Contents, Entry
from phalanx.tools.ckpt.errors import CUT_FIX, BadCheckpoint, shown
from phalanx.tools.ckpt.file_names import beside
from phalanx.tools.ckpt.folders import joined
from phalanx.tools.ckpt.torch_files import TorchFile, entries_of, read_pickled, read_zip
from phalanx.tools.ckpt.torch_values import mapping_of, sizes_of
from phalanx.tools.ckpt.tree import short_form
from phalanx.tools.ckpt.zip_reading import FileReader

LATEST = "latest"
_MODEL = re.compile(
    r"(zero_pp_rank_\d+_)?mp_rank_\d+(_\d+)?_model_states\.pt|layer_\d+-model_\d+-model_states\.pt"
)
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+(_\d+)?_optim_states\.pt")
_MODULE_ENTRY = "module."


def state_files(folder: Path) -> list[str]:
    """The names of DeepSpeed's state files in a folder."""
    try:
        return sorted(
            name for name in os.listdir(folder) if _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        )
    except (NotADirectoryError, FileNotFoundError):
        return []


def latest_in(folder: Path) -> Path | None:
    """The step folder that ``latest`` names; None where there is no such file."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    with FileReader(pointer) as reader:
        if reader.size > 4096:
            return None
        name = reader.read(0, reader.size).decode("utf-8", "replace").strip()
    found = beside(pointer, folder, name)
    if not found.is_dir():
        raise BadCheckpoint(
            pointer,
            f"names {shown(name)!r}, and there is no such folder.",
            fix="put it back, or name another step's folder",
        )
    return found


def read_deepspeed(folder: Path) -> Contents:
    """A ``global_step<N>`` folder: weights under their own names, each rank's optimizer under its file's name.

    Raises:
        BadCheckpoint: A file of it is damaged.
    """
    names = state_files(folder)
    models = [name for name in names if _MODEL.fullmatch(name)]
    parts: list[tuple[str, Contents]] = []
    facts: dict[str, Any] = {}
    for number, name in enumerate(models):
        file = _read(folder / name)
        found = dict(_texts(file.root))
        if number == 0:
            facts = _facts(found)
        part = _model_part(file, found)
        # Other ranks' files repeat the first one's names: only with their own name in front.
        parts.append(("" if number == 0 or name.startswith("layer_") else name, part))
    for name in names:
        if _OPTIMIZER.fullmatch(name):
            file = _read(folder / name)
            facts = {**_optimizer_facts(file.root), **facts}
            parts.append((name, _plain_part(file)))
    ranks = len([name for name in names if _OPTIMIZER.fullmatch(name)])
    world = facts.pop("world_size", None) or ranks or len(models)
    if ranks and ranks < world:
        facts["missing_optimizer_files"] = world - ranks
    contents = joined(folder, "deepspeed", parts, world_size=world, **facts)
    if "missing_optimizer_files" in facts:
        problem = f"{ranks} of {world} ranks' optimizer files are here"
        return Contents(**{**vars(contents), "problems": (*contents.problems, problem)})
    return contents


def _read(path: Path) -> TorchFile:
    with FileReader(path) as reader:
        start = reader.read(0, min(4, reader.size))
    if not start:
        raise BadCheckpoint(path, "the file is empty.", fix=CUT_FIX)
    return read_zip(path) if start.startswith(b"PK") else read_pickled(path)


def _texts(root: Any) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in mapping_of(root) or [] if isinstance(key, str)]


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    worlds = [found.get(name) for name in ("dp_world_size", "mp_world_size")]
    world = (
        worlds[0] * (worlds[1] if isinstance(worlds[1], int) else 1) if isinstance(worlds[0], int) else None
    )
    facts = {"world_size": world, "step": found.get("global_steps"), "deepspeed": found.get("ds_version")}
    return {name: value for name, value in facts.items() if isinstance(value, int | str)}


def _optimizer_facts(root: Any) -> dict[str, Any]:
    inner = dict(_texts(dict(_texts(root)).get("optimizer_state_dict")))
    stage = inner.get("zero_stage")
    return {"zero_stage": stage} if isinstance(stage, int) else {}


def _plain_part(file: TorchFile) -> Contents:
    return Contents(
        path=file.path,
        format=file.format,
        entries=entries_of(file),
        other=short_form(file.root),
        code=file.code,
    )


def _model_part(file: TorchFile, found: dict[str, Any]) -> Contents:
    part = _plain_part(file)
    shapes = _parameter_shapes(found.get("param_shapes"))
    entries = []
    for entry in part.entries:
        key = entry.key.removeprefix(_MODULE_ENTRY)
        shared = entry.shared_with and entry.shared_with.removeprefix(_MODULE_ENTRY)
        if (
            key in shapes and entry.count == 0 and shapes[key] != entry.shape
        ):  # ZeRO-3 leaves an empty one in its place
            note = "ZeRO-3: its values are in parts in the optimizer files of all ranks"
            entry = Entry(key, entry.dtype, shapes[key], note=note)
        else:
            entry = Entry(**{**vars(entry), "key": key, "shared_with": shared})
        entries.append(entry)
    other = part.other
    if isinstance(other, dict):
        other = {name: value for name, value in other.items() if name not in ("param_shapes", "buffer_names")}
    return Contents(**{**vars(part), "entries": entries, "other": other})


def _parameter_shapes(table: Any) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for group in table if isinstance(table, list) else []:
        for key, value in mapping_of(group) or []:
            shape = sizes_of(value)
            if isinstance(key, str) and shape is not None:
                shapes[key] = shape
    return shapes

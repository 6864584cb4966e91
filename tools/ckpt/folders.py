"""Folders of several files: phalanx's own, Hugging Face's, accelerate's and DeepSpeed's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.dist.checkpoint_files import (
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    SHARDS_FILE,
    STATE_FILE,
)
from phalanx.tools.ckpt.contents import Contents, Entry, Piece
from phalanx.tools.ckpt.dtypes import FROM_SAFETENSORS
from phalanx.tools.ckpt.errors import CUT_FIX, BadCheckpoint, shown
from phalanx.tools.ckpt.file_names import beside
from phalanx.tools.ckpt.safetensors_files import json_table, read_safetensors
from phalanx.tools.ckpt.torch_values import MAX_SIDE
from phalanx.tools.ckpt.zip_reading import FileReader

MAX_JSON = 32 << 20
INDEXES = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
)
_PARTS = ("model", "optimizer")


def read_json(path: Path) -> Any:
    """A JSON file of a bounded size.

    Raises:
        BadCheckpoint: It is larger, or no JSON.
    """
    with FileReader(path) as reader:
        if reader.size > MAX_JSON:
            raise BadCheckpoint(path, f"has {reader.size:,} bytes; at most {MAX_JSON:,} of JSON are read.")
        text = reader.read(0, reader.size)
    try:
        return json.loads(str(text, "utf-8"), parse_constant=str)  # NaN is no JSON
    except (ValueError, RecursionError):
        raise BadCheckpoint(path, "no JSON: cut short or damaged.", fix=CUT_FIX) from None


def joined(path: Path, kind: str, parts: Iterable[tuple[str, Contents]], **facts: Any) -> Contents:
    """Several files as one checkpoint: keys and other values with their part's label in front ("" for none)."""
    entries: list[Entry] = []
    other: dict[str, Any] = {}
    code: set[str] = set()
    problems: list[str] = []
    files: list[Path] = []
    for label, part in parts:
        prefix = f"{label}/" if label else ""
        for entry in part.entries:
            shared = None if entry.shared_with is None else prefix + entry.shared_with
            entries.append(Entry(**{**vars(entry), "key": prefix + entry.key, "shared_with": shared}))
        if part.other:
            other[label or part.path.name] = part.other
        code.update(part.code)
        problems += [f"{label or part.path.name}: {problem}" for problem in part.problems]
        files += part.files or (part.path,)
    return Contents(
        path=path,
        format=kind,
        entries=entries,
        other=other,
        facts={name: value for name, value in facts.items() if value is not None},
        code=tuple(sorted(code)),
        problems=tuple(problems),
        files=tuple(files),
    )


def read_split(index: Path, open_file: Any) -> Contents:
    """Weights in several files, listed by key in an index as Hugging Face's libraries write it.

    Raises:
        BadCheckpoint: The index makes no sense, or names files that are outside or missing.
    """
    table = read_json(index)
    table = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise BadCheckpoint(index, "no index of weight files: it has no weight_map.", fix=CUT_FIX)
    names = sorted(set(table.values()))
    paths = {name: beside(index, index.parent, name) for name in names}
    absent = [name for name in names if not paths[name].is_file()]
    if absent:
        listed = ", ".join(shown(name) for name in absent[:5])
        raise BadCheckpoint(
            index,
            f"{len(absent)} of its {len(names)} files are missing: {listed}.",
            fix="copy them beside it",
        )
    parts = [("", open_file(paths[name])) for name in names]
    found = joined(index, "huggingface-sharded", parts, files=len(names))
    present = {entry.key for entry in found.entries}
    lacking = [key for key in table if key not in present]
    problems = list(found.problems)
    if lacking:
        problems.append(f"{len(lacking)} keys of the index are in no file: {shown(', '.join(lacking[:5]))}")
    return Contents(**{**vars(found), "problems": tuple(problems)})


def read_ours(folder: Path) -> Contents:
    """A ``step-<N>`` folder of `CheckpointManager`.

    Raises:
        BadCheckpoint: A file of it is missing or damaged.
    """
    state = read_json(folder / STATE_FILE) if (folder / STATE_FILE).is_file() else {}
    state = state if isinstance(state, dict) else {}
    parts = _our_shards(folder) if (folder / SHARDS_FILE).is_file() else _our_files(folder)
    given = state.get("versions")
    versions: dict[str, Any] = given if isinstance(given, dict) else {}
    found = joined(
        folder, "phalanx", parts, world_size=state.get("world_size"), torch=versions.get("torch"),
        step=(state.get("progress") or {}).get("step") if isinstance(state.get("progress"), dict) else None,
    )  # fmt: skip
    problems = list(found.problems)
    if not (folder / MANIFEST_FILE).is_file():
        problems.append(f"{MANIFEST_FILE} is missing: the save never ended")
    other = {key: value for key, value in state.items() if key not in ("optimizer", "format")}
    optimizer = state.get("optimizer")
    if isinstance(optimizer, dict):
        other["optimizer"] = {"class": optimizer.get("class"), "groups": _group_options(optimizer)}
    return Contents(**{**vars(found), "other": other, "problems": tuple(problems)})


def _group_options(optimizer: Mapping[str, Any]) -> list[Any]:
    groups = optimizer.get("groups")
    return (
        [group.get("options") for group in groups if isinstance(group, dict)]
        if isinstance(groups, list)
        else []
    )


def _our_files(folder: Path) -> list[tuple[str, Contents]]:
    parts = []
    for label, name in (("", MODEL_FILE), ("optimizer", OPTIMIZER_FILE)):
        if (folder / name).is_file():
            file = read_safetensors(folder / name)
            parts.append(
                (
                    label,
                    Contents(
                        path=file.path, format="safetensors", entries=file.entries, problems=file.problems
                    ),
                )
            )
    if not parts or parts[0][0]:
        raise BadCheckpoint(folder, f"a checkpoint folder without its {MODEL_FILE}.", fix=CUT_FIX)
    return parts


def _our_shards(folder: Path) -> list[tuple[str, Contents]]:
    index = folder / SHARDS_FILE
    table = read_json(index)
    headers: dict[str, dict[str, Entry]] = {}
    parts = []
    try:
        for part in _PARTS:
            described = table["parts"][part]
            entries = [_sharded(folder, headers, name, entry) for name, entry in described["tensors"].items()]
            by_key = {entry.key: entry for entry in entries}
            for alias, key in json_table(described["metadata"].get("aliases")).items():
                if key in by_key and alias not in by_key:
                    entries.append(Entry(**{**vars(by_key[key]), "key": alias, "shared_with": key}))
            files = tuple(folder / name for name in headers)
            parts.append(
                (
                    "" if part == "model" else part,
                    Contents(path=index, format="phalanx", entries=entries, files=files),
                )
            )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(index, "no index of shards: damaged.", fix=CUT_FIX) from None
    return parts


def _sharded(folder: Path, headers: dict[str, dict[str, Entry]], key: str, entry: Any) -> Entry:
    dtype, shape = FROM_SAFETENSORS[entry["dtype"]], tuple(entry["shape"])
    if not all(type(side) is int and 0 <= side < MAX_SIDE for side in shape):
        raise ValueError(shape)
    pieces, problem, covered = [], "", 0
    for chunk in entry["chunks"]:
        name = chunk["file"]
        if name not in headers:
            path = beside(folder / SHARDS_FILE, folder, name)
            if not path.is_file():
                raise BadCheckpoint(folder, f"{shown(name)} is missing.", fix=CUT_FIX)
            headers[name] = {found.key: found for found in read_safetensors(path).entries}
        part = headers[name].get(chunk["key"])
        offsets = tuple(int(number) for number in chunk["offsets"])
        if (
            part is None
            or part.shape != tuple(chunk["sizes"])
            or part.dtype != dtype
            or len(offsets) != len(shape)
        ):
            problem = f"its part in {shown(name)} is not what the index says"
            continue
        problem = problem or part.problem
        covered += part.count
        pieces.append(Piece(offsets, part.pieces[0].view))
    described = Entry(key, dtype, shape, tuple(pieces), problem=problem)
    if covered != described.count and not problem:
        problem = f"its parts hold {covered} of its {described.count} elements"
    return Entry(key, dtype, shape, tuple(pieces), problem=problem)


_ACCELERATE = re.compile(
    r"(optimizer(_\d+)?\.bin|scheduler(_\d+)?\.bin|random_states_\d+\.pkl|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin"
    r"|scaler\.pt|custom_checkpoint_\d+\.pkl)"
)
_TRAINER = re.compile(
    r"(optimizer\.pt|scheduler\.pt|rng_state(_\d+)?\.pth|training_args\.bin|trainer_state\.json)"
)
_WEIGHTS = re.compile(r"((pytorch_)?model|diffusion_pytorch_model|adapter_model)(_\d+)?\.(safetensors|bin)")


def is_accelerate(names: Iterable[str]) -> bool:
    """Whether `accelerator.save_state` wrote a folder with these names."""
    return any(
        re.fullmatch(r"random_states_\d+\.pkl|optimizer(_\d+)?\.bin|custom_checkpoint_\d+\.pkl", name)
        for name in names
    )


def read_several(folder: Path, open_path: Any) -> Contents | None:
    """accelerate's and transformers' folders, and bare weights in a folder; None for a folder without any."""
    names = sorted(os.listdir(folder))
    index = [name for name in INDEXES if name in names]
    accelerate = is_accelerate(names)
    extra = [name for name in names if (_ACCELERATE if accelerate else _TRAINER).fullmatch(name)]
    weights = [name for name in names if _WEIGHTS.fullmatch(name)]
    nested = [
        name
        for name in names
        if accelerate and re.fullmatch(r"(pytorch_model|optimizer)(_fsdp)?(_\d+)?", name)
    ]
    parts: list[tuple[str, Contents]] = []
    if index:
        parts.append(("", open_path(folder / index[0])))
    elif weights:
        kinds = [name for name in weights if name.endswith(".safetensors")] or weights
        parts += [
            ("" if number == 0 else name, open_path(folder / name)) for number, name in enumerate(kinds)
        ]
    parts += [(name if name.startswith("optimizer") else "", open_path(folder / name)) for name in nested]
    if not parts and not accelerate:
        return None
    for name in extra:
        if name.endswith(".json"):
            other = read_json(folder / name)
            parts.append(
                (name, Contents(path=folder / name, format="json", entries=[], other=_without_history(other)))
            )
        else:
            parts.append((name, open_path(folder / name)))
    kind = (
        "accelerate"
        if accelerate
        else "huggingface"
        if extra or (folder / "config.json").is_file()
        else "folder"
    )
    ranks = len([name for name in names if re.fullmatch(r"(random_states|rng_state)_\d+\.(pkl|pth)", name)])
    return joined(folder, kind, parts, world_size=ranks or None)


def _without_history(value: Any) -> Any:
    return (
        {key: entry for key, entry in value.items() if key != "log_history"}
        if isinstance(value, dict)
        else value
    )

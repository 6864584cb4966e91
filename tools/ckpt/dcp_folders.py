"""Folders that torch.distributed.checkpoint wrote: a pickled index, and files of small torch files one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.tools.ckpt.contents import Contents, Entry, Piece
from phalanx.tools.ckpt.errors import CUT_FIX, BadCheckpoint, shown
from phalanx.tools.ckpt.file_names import beside
from phalanx.tools.ckpt.pickle_values import Call
from phalanx.tools.ckpt.torch_files import entry_of, read_pickled, read_zip
from phalanx.tools.ckpt.torch_values import (
    MAX_SIDE,
    attributes_of,
    dtype_of,
    mapping_of,
    sizes_of,
    tensor_of,
)
from phalanx.tools.ckpt.tree import short_form

INDEX = ".metadata"


@dataclass(frozen=True)
class _Place:
    """Where one item's own torch file lies."""

    file: str
    offset: int
    length: int


def read_dcp(folder: Path, values: bool = False) -> Contents:
    """The folder's tensors.

    Args:
        folder: Holds ``.metadata`` and the files it names.
        values: Also find where each tensor's bytes are, which opens every item.

    Raises:
        BadCheckpoint: The index is damaged, or names files outside the folder.
    """
    index = read_pickled(folder / INDEX)
    attributes = _attributes(index.root)
    described = mapping_of(attributes.get("state_dict_metadata"))
    if described is None:
        raise BadCheckpoint(folder / INDEX, "no index of torch.distributed.checkpoint.", fix=CUT_FIX)
    places = _places(folder, attributes.get("storage_data"))
    entries, objects, problems = [], [], []
    for key, item in described:
        if not isinstance(key, str):
            continue
        kind = item.name.rpartition(".")[2] if isinstance(item, Call) else ""
        if kind == "BytesStorageMetadata":
            objects.append(key)
            continue
        entry = _entry(folder, key, item, places, values)
        entries.append(entry)
        problems += [f"{shown(entry.key)}: {entry.problem}"] if entry.problem else []
    files = sorted({place.file for place in places.values()})
    problems += [f"{shown(name)} is missing" for name in files if not (folder / name).is_file()]
    other = {key: _value(folder, places.get((key, ()))) for key in objects[:500]}
    return Contents(
        path=folder,
        format="dcp",
        entries=entries,
        other=other,
        facts={"files": len(files)},
        problems=tuple(problems),
        files=tuple(folder / name for name in files),
    )


def part_places(folder: Path) -> list[tuple[str, int, int]]:
    """File, first byte and length of every part that the index names."""
    attributes = _attributes(read_pickled(folder / INDEX).root)
    places = _places(folder, attributes.get("storage_data"))
    return sorted((place.file, place.offset, place.length) for place in places.values())


def _attributes(value: Any) -> dict[str, Any]:
    if not isinstance(value, Call):
        return {}
    return {name: entry for name, entry in attributes_of(value) if isinstance(name, str)}


def _places(folder: Path, table: Any) -> dict[tuple[str, tuple[int, ...]], _Place]:
    places = {}
    for index, info in mapping_of(table) or []:
        where, found = _attributes(index), _attributes(info)
        key, offset = where.get("fqn"), sizes_of(where.get("offset")) or ()
        file, start, length = (found.get(name) for name in ("relative_path", "offset", "length"))
        numbers = all(type(number) is int and 0 <= number < MAX_SIDE for number in (start, length))
        if not isinstance(key, str) or not isinstance(file, str) or not numbers:
            raise BadCheckpoint(folder / INDEX, "an entry of its table of files makes no sense.", fix=CUT_FIX)
        beside(folder / INDEX, folder, file)
        assert isinstance(start, int)
        assert isinstance(length, int)
        places[key, offset] = _Place(file, start, length)
    return places


def _entry(
    folder: Path, key: str, item: Any, places: dict[tuple[str, tuple[int, ...]], _Place], values: bool
) -> Entry:
    attributes = _attributes(item)
    shape, chunks = sizes_of(attributes.get("size")), attributes.get("chunks")
    dtype = _dtype(attributes.get("properties"))
    if shape is None or dtype is None or not isinstance(chunks, list):
        raise BadCheckpoint(
            folder / INDEX, f"{shown(key)!r} is described in a way that makes no sense.", fix=CUT_FIX
        )
    pieces, problem, covered = [], "", 0
    for chunk in chunks:
        box = _attributes(chunk)
        offsets, sizes = sizes_of(box.get("offsets")), sizes_of(box.get("sizes"))
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
            raise BadCheckpoint(folder / INDEX, f"a part of {shown(key)!r} makes no sense.", fix=CUT_FIX)
        if any(start + side > whole for start, side, whole in zip(offsets, sizes, shape, strict=True)):
            problem = "one of its parts reaches out of it"
        count = 1
        for side in sizes:
            count *= side
        covered += count
        place = places.get((key, offsets))
        if place is None and count:
            problem = "a part of it is in no file"
        if values and place is not None and count and not problem:
            piece, problem = _piece(folder, place, offsets, sizes, dtype)
            pieces += [piece] if piece is not None else []
    entry = Entry(key, dtype, shape, tuple(pieces), problem=problem)
    if covered != entry.count and not problem:
        problem = f"its parts hold {covered} of its {entry.count} elements"
    return Entry(key, dtype, shape, tuple(pieces), problem=problem)


def _dtype(properties: Any) -> str | None:
    """``TensorProperties`` is pickled as a tuple whose first entry is the dtype; as attributes before torch 2.2."""
    if not isinstance(properties, Call):
        return None
    for state in properties.states:
        if isinstance(state, tuple) and state and dtype_of(state[0]):
            return dtype_of(state[0])
    return dtype_of(_attributes(properties).get("dtype"))


def _piece(
    folder: Path, place: _Place, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: str
) -> tuple[Piece | None, str]:
    path = folder / place.file
    try:
        item = read_zip(path, place.offset, place.offset + place.length)
    except FileNotFoundError:
        return None, f"its file {shown(place.file)} is missing"
    except BadCheckpoint as error:
        return None, f"its part in {shown(place.file)} at byte {place.offset}: {error.problem}"
    tensor = tensor_of(item.root)
    if tensor is None:
        return None, f"its part in {shown(place.file)} is no tensor"
    if tensor.shape != sizes or tensor.dtype != dtype:
        return None, f"its part in {shown(place.file)} is {list(tensor.shape)} of {tensor.dtype}"
    entry = entry_of(item, "", tensor)
    if entry.problem or not entry.pieces:
        return None, entry.problem or "a part of it has no values"
    return Piece(offsets, entry.pieces[0].view), ""


def _value(folder: Path, place: _Place | None) -> Any:
    """A value that is no tensor, in short."""
    if place is None:
        return "in no file"
    try:
        item = read_zip(folder / place.file, place.offset, place.offset + place.length)
    except (OSError, BadCheckpoint):
        return "cannot be read"
    return short_form(item.root)

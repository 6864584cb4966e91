"""Files that `torch.save` wrote: the zip format, the one before it, and plain pickles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.tools.ckpt.contents import Entry, Extent, Piece, View
from phalanx.tools.ckpt.dtypes import item_bytes
from phalanx.tools.ckpt.errors import CUT_FIX, BadCheckpoint, shown
from phalanx.tools.ckpt.pickle_machine import Cut, PickleMachine, PickleProblem
from phalanx.tools.ckpt.torch_values import StorageRef, TensorValue, is_plain_name
from phalanx.tools.ckpt.tree import tensors_in
from phalanx.tools.ckpt.zip_reading import STORED, FileReader, Record, read_directory

MAX_PICKLE = 256 << 20
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_FIRST_WINDOW = 1 << 20


@dataclass(frozen=True)
class TorchFile:
    """A torch file, described: its pickle, and where each storage's bytes are."""

    path: Path
    format: str
    root: Any
    storages: Mapping[str, Extent]
    code: tuple[str, ...]
    facts: Mapping[str, Any]


def read_zip(path: Path, start: int = 0, end: int | None = None) -> TorchFile:
    """The zip format (torch 1.6 and later), alone or within a larger file.

    Raises:
        BadCheckpoint: It is cut, damaged, or no file of torch's.
    """
    with FileReader(path) as reader:
        records = read_directory(reader, start, end)
        name = next((name for name in records if name.endswith("/data.pkl")), None)
        if name is None:
            listed = ", ".join(repr(shown(name, 60)) for name in list(records)[:5])
            raise BadCheckpoint(
                path, f"a zip archive, but without torch's data.pkl (it holds {listed or 'nothing'})."
            )
        folder = name.removesuffix("data.pkl")
        machine = PickleMachine(_small_record(reader, records[name], MAX_PICKLE))
        root = _run(path, machine)
        prefix = f"{folder}data/"
        storages = {
            name.removeprefix(prefix): record.extent(path)
            for name, record in records.items()
            if name.startswith(prefix)
        }
        facts = _zip_facts(reader, records, folder)
    kind = "torchscript" if f"{folder}constants.pkl" in records else "torch-zip"
    return TorchFile(path, kind, root, storages, _code(machine), facts)


def _zip_facts(reader: FileReader, records: Mapping[str, Record], folder: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"folder": folder.rstrip("/")}
    order = records.get(f"{folder}byteorder")
    if order is not None and _small_record(reader, order, 16) == b"big":
        facts["byteorder"] = "big"
    if any(record.method != STORED for record in records.values()):
        facts["compressed"] = True
    return facts


def _small_record(reader: FileReader, record: Record, limit: int) -> bytes:
    if record.size > limit:
        raise BadCheckpoint(
            reader.path, f"its {shown(record.name)!r} has {record.size:,} bytes; at most {limit:,} are read."
        )
    if record.encrypted or record.method not in (0, 8):
        raise BadCheckpoint(
            reader.path, f"{shown(record.name)!r} is encrypted or packed in a way torch never uses."
        )
    return b"".join(reader.pieces(record.extent(reader.path)))


def _run(path: Path, machine: PickleMachine) -> Any:
    try:
        return machine.run()
    except PickleProblem as error:
        raise BadCheckpoint(path, f"its pickle {error}. Nothing of it was run.", fix=CUT_FIX) from None


def _code(*machines: PickleMachine) -> tuple[str, ...]:
    names = {name for machine in machines for name in machine.globals}
    return tuple(sorted(name for name in names if not is_plain_name(name)))


class _Windows:
    """Pickles one after the other in a file, each read with as much of the file as it takes."""

    def __init__(self, reader: FileReader) -> None:
        self.reader, self.position = reader, 0
        self.machines: list[PickleMachine] = []

    def next(self) -> Any:
        window = _FIRST_WINDOW
        while True:
            length = min(window, self.reader.size - self.position)
            machine = PickleMachine(self.reader.read(self.position, length))
            try:
                value = machine.run()
            except Cut as error:
                if length == self.reader.size - self.position or window >= MAX_PICKLE:
                    raise BadCheckpoint(
                        self.reader.path, f"its pickle {error}: cut short or damaged.", fix=CUT_FIX
                    ) from None
                window *= 8
                continue
            except PickleProblem as error:
                raise BadCheckpoint(
                    self.reader.path, f"its pickle {error}. Nothing of it was run.", fix=CUT_FIX
                ) from None
            self.machines.append(machine)
            self.position += machine.position
            return value


def read_pickled(path: Path) -> TorchFile:
    """torch's format before 1.6, or a pickle of any other make.

    Raises:
        BadCheckpoint: It is cut or damaged.
    """
    with FileReader(path) as reader:
        pickles = _Windows(reader)
        first = pickles.next()
        if first != LEGACY_MAGIC or isinstance(first, bool | float):
            return TorchFile(path, "pickle", first, {}, _code(*pickles.machines), {})
        version = pickles.next()
        if version != 1001:
            raise BadCheckpoint(path, "of torch's legacy format, in a version that never was.", fix=CUT_FIX)
        system, root, keys = pickles.next(), pickles.next(), pickles.next()
        refs = _storage_refs(path, root)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise BadCheckpoint(path, "its list of storages makes no sense.", fix=CUT_FIX)
        storages = _legacy_storages(reader, pickles.position, keys, refs)
    little = [value for key, value in getattr(system, "pairs", []) if key == "little_endian"]
    facts = {"byteorder": "big"} if little == [False] else {}
    return TorchFile(path, "torch-legacy", root, storages, _code(*pickles.machines), facts)


def _storage_refs(path: Path, root: Any) -> dict[str, StorageRef]:
    refs: dict[str, StorageRef] = {}
    for _, tensor, _ in _tensors(path, root):
        if tensor.storage is not None:
            refs.setdefault(tensor.storage.key, tensor.storage)
    return refs


def _tensors(path: Path, root: Any) -> list[tuple[str, TensorValue, Any]]:
    try:
        return list(tensors_in(root))
    except PickleProblem as error:
        raise BadCheckpoint(path, f"its pickle {error}. Nothing of it was run.", fix="delete it") from None


def _legacy_storages(
    reader: FileReader, position: int, keys: list[str], refs: Mapping[str, StorageRef]
) -> dict[str, Extent]:
    """Each storage is its number of elements, then its bytes."""
    storages = {}
    for key in keys:
        count = int.from_bytes(reader.read(position, 8), "little", signed=True)
        position += 8
        if (
            key not in refs
        ):  # of an object that is no tensor: its width is not known, and so what follows is not
            break
        length = count * item_bytes(refs[key].dtype)
        if length < 0 or position + length > reader.size:
            raise BadCheckpoint(
                reader.path,
                f"storage {shown(key)!r} would end at byte {position + max(length, 0)}, the file has {reader.size}: "
                "cut short.",
                fix=CUT_FIX,
            )
        storages[key] = Extent(reader.path, position, length)
        position += length
    return storages


def entries_of(
    file: TorchFile, prefix: str = "", root: Any = None, wanted: Callable[[str], bool] | None = None
) -> list[Entry]:
    """The file's tensors; two names of one tensor know of each other."""
    entries: list[Entry] = []
    first: dict[tuple[Any, ...], str] = {}
    for key, tensor, _ in _tensors(file.path, file.root if root is None else root):
        if wanted is not None and not wanted(key):
            continue
        entry = entry_of(file, prefix + key, tensor)
        if tensor.storage is not None and tensor.note == "" and entry.count:
            place = (
                tensor.storage.key,
                tensor.storage.start,
                tensor.offset,
                tensor.shape,
                tensor.stride,
                tensor.dtype,
            )
            if place in first:
                entry = Entry(**{**vars(entry), "shared_with": first[place]})
            else:
                first[place] = entry.key
        entries.append(entry)
    return entries


def entry_of(file: TorchFile, key: str, tensor: TensorValue) -> Entry:
    """One tensor, and whether its values are all in the file."""
    if tensor.storage is None:
        return Entry(key, tensor.dtype, tensor.shape, note=tensor.note)
    ref = tensor.storage
    extent = file.storages.get(ref.key)
    mark = f"{file.path.name}:{ref.key}"
    if extent is None:
        problem = f"its storage {shown(ref.key, 40)!r} is not in the file"
        return Entry(key, tensor.dtype, tensor.shape, storage=mark, problem=problem, note=tensor.note)
    problem = _reach_problem(tensor, ref, extent)
    if file.facts.get("byteorder") == "big" and not problem:
        problem = "its values are in big-endian order"
    if tensor.note == "quantized" and not problem:
        problem = "it is quantized: its numbers mean nothing without its scale"
    view = View(extent, ref.start + tensor.offset, tensor.stride, tensor.shape)
    pieces = (Piece((0,) * len(tensor.shape), view),)
    return Entry(key, tensor.dtype, tensor.shape, pieces, storage=mark, problem=problem, note=tensor.note)


def _reach_problem(tensor: TensorValue, ref: StorageRef, extent: Extent) -> str:
    """A storage shorter than the pickle says, or a tensor that reaches out of it."""
    width = item_bytes(ref.dtype)
    if (ref.start + ref.count) * width > extent.length:
        return f"its storage has {extent.length} bytes, and {(ref.start + ref.count) * width} are described"
    if 0 in tensor.shape:
        return ""
    last = tensor.offset + sum(
        (side - 1) * step for side, step in zip(tensor.shape, tensor.stride, strict=True)
    )
    if (last + 1) * width > ref.count * width:
        return "it reaches beyond its storage"
    return ""

"""`phalanx ckpt verify`: whether every byte is there, and is what was written as far as the format can tell."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from phalanx.dist.checkpoint_files import MANIFEST_FILE, find_problems, read_manifest
from phalanx.tools.ckpt.contents import Contents
from phalanx.tools.ckpt.errors import BadCheckpoint, shown
from phalanx.tools.ckpt.file_names import beside
from phalanx.tools.ckpt.opening import open_checkpoint
from phalanx.tools.ckpt.safetensors_files import read_safetensors
from phalanx.tools.ckpt.zip_reading import FileReader, read_directory


@dataclass(frozen=True)
class Verified:
    """What was looked at, how well, and what is wrong.

    Attributes:
        format: As `Contents.format`.
        checked: In words, what the format allows to check.
        bytes: How many were read or accounted for.
        problems: What is wrong; none when the checkpoint is whole.
    """

    format: str
    checked: str
    bytes: int
    problems: list[str]


def verify(path: Path) -> Verified:
    """Read all of a checkpoint and check it: hashes, checksums, sizes, places.

    Raises:
        BadCheckpoint: So much is wrong that it cannot even be described.
    """
    contents = open_checkpoint(path, values=True)
    problems = list(contents.problems)
    if contents.format == "phalanx":
        return _ours(contents)
    files = [file for file in contents.files or (contents.path,) if file.is_file()]
    words, total = set(), 0
    for file in files:
        checked, found = _file(file, in_dcp=contents.format == "dcp")
        words.add(checked)
        total += file.stat().st_size
        problems += [problem if len(files) == 1 else f"{shown(file.name)}: {problem}" for problem in found]
    problems += [
        f"{shown(entry.key)}: {entry.problem}"
        for entry in contents.entries
        if entry.problem and not contents.problems
    ]
    return Verified(contents.format, "; ".join(sorted(words)), total, list(dict.fromkeys(problems)))


def _ours(contents: Contents) -> Verified:
    folder = contents.path
    total = 0
    try:
        names = read_manifest(folder)["files"]
        for name in names:
            beside(folder / MANIFEST_FILE, folder, name)
            total += (folder / name).stat().st_size if (folder / name).is_file() else 0
        problems = find_problems(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        problems = [str(error)]
    problems += [
        problem for problem in contents.problems if problem not in problems and MANIFEST_FILE not in problem
    ]
    return Verified("phalanx", "the manifest's hash of every file and tensor", total, problems)


def _file(path: Path, in_dcp: bool) -> tuple[str, list[str]]:
    with FileReader(path) as reader:
        start = reader.read(0, min(16, reader.size))
    if in_dcp and path.suffix != ".safetensors":
        return "every part's place, size and checksum", _dcp_file(path)
    if start.startswith(b"PK"):
        with FileReader(path) as reader:
            return "the checksum of every record, the reach of every tensor", _records(reader, 0, reader.size)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return "header, sizes and places (the format has no checksums)", list(read_safetensors(path).problems)
    return "sizes (the format has no checksums)", []


def _records(reader: FileReader, start: int, end: int) -> list[str]:
    """Records whose bytes do not have the checksum that was written beside them."""
    problems = []
    for name, record in read_directory(reader, start, end).items():
        if record.encrypted or record.method not in (0, 8):
            problems.append(f"{shown(name)} is packed in a way torch never uses")
            continue
        try:
            crc = 0
            for piece in reader.pieces(record.extent(reader.path)):
                crc = zlib.crc32(piece, crc)
        except BadCheckpoint as error:
            problems.append(f"{shown(name)}: {error.problem}")
            continue
        if crc != record.crc:
            problems.append(f"{shown(name)} does not have its checksum: its bytes were changed")
    return problems


def _dcp_file(path: Path) -> list[str]:
    """A file of parts: each is an archive of its own, found by its end record."""
    problems: list[str] = []
    for start, end in _parts_of(path):
        with FileReader(path) as reader:
            try:
                problems += [f"{problem} (part at byte {start})" for problem in _records(reader, start, end)]
            except BadCheckpoint as error:
                problems.append(f"part at byte {start}: {error.problem}")
    return problems


def _parts_of(path: Path) -> list[tuple[int, int]]:
    from phalanx.tools.ckpt.dcp_folders import part_places

    folder = path.parent
    while not (folder / ".metadata").is_file() and folder != folder.parent:
        folder = folder.parent
    return [(start, start + length) for file, start, length in part_places(folder) if folder / file == path]

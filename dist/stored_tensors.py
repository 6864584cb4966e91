"""A checkpoint's tensors, read one by one straight to where they belong and checked on the way.

Nothing is mapped into memory and no second copy is made: bytes go from the file into the parameter
itself, or through a small buffer where it is on another device or of another dtype. A tensor may be
stored in several boxes (one per rank that held a part of it); which ones a reader needs is
torch.distributed.checkpoint's plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.dist import checkpoint_files as files
from phalanx.dist.checkpoint_sources import MEMORY_FORMATS, DamagedFileError, json_table
from phalanx.dist.flat_parts import Box, whole_box
from phalanx.dist.shards import cut, is_sharded, local_pieces

_PIECE_BYTES = 8 << 20
_TORCH_DTYPES = {short: getattr(torch, name) for name, short in files.DTYPES.items() if hasattr(torch, name)}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the tensor of a safetensors file that holds it."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies on disk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileHeader:
    """What a safetensors file says of itself: per key dtype, shape and where its bytes are."""

    entries: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    metadata: dict[str, str] = field(default_factory=dict)


def read_header(path: Path) -> FileHeader:
    """The header of a safetensors file.

    Raises:
        DamagedFileError: It is none, or cut.
    """
    try:
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if start > size:
                raise ValueError("its header is cut")
            header = json.loads(file.read(start - 8))
        entries = {}
        for key, entry in header.items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                if start + end > size:
                    raise ValueError(f"{key!r} is cut off")
                entries[key] = (
                    _TORCH_DTYPES[entry["dtype"]],
                    tuple(entry["shape"]),
                    start + begin,
                    start + end,
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{path}: no whole safetensors file: {error}") from error
    return FileHeader(entries, header.get("__metadata__", {}))


class StoredTensors(Mapping[str, Tensor]):
    """The tensors in a checkpoint folder's model or optimizer part, by name.

    ``stored[name]`` reads one, whole, into memory of its own; `fill` reads into tensors that exist.
    Every tensor that is read as a whole is compared with its hash in the manifest, unless `hashed` says that
    this process has just done so.

    Raises:
        DamagedFileError: A file is cut, or does not hold what was written.
    """

    def __init__(self, folder: Path, part: str, hashed: bool = False) -> None:
        self.folder, self.part = folder, part
        self._headers: dict[str, FileHeader] = {}
        try:
            self._hashes: Mapping[str, Mapping[str, str]] = (
                {} if hashed else files.read_manifest(folder)["tensors"]
            )
        except (OSError, ValueError, KeyError):
            self._hashes = {}  # a folder of somebody else's making
        metadata: Mapping[str, Any]
        index = folder / files.SHARDS_FILE
        if index.is_file():
            parts = json.loads(index.read_bytes())["parts"][part]
            self.stored = {name: _stored_in_shards(entry) for name, entry in parts["tensors"].items()}
            metadata = parts["metadata"]
        else:
            name = f"{part}.safetensors"
            header = self._header(name)
            self.stored = {
                key: Stored(dtype, shape, (Chunk(name, key, whole_box(shape)),))
                for key, (dtype, shape, _, _) in header.entries.items()
            }
            metadata = header.metadata
        self.memory_formats = json_table(metadata.get("memory_formats"))
        self.aliases = {
            alias: key for alias, key in json_table(metadata.get("aliases")).items() if key in self.stored
        }

    def __iter__(self) -> Iterator[str]:
        yield from self.stored
        yield from self.aliases

    def __len__(self) -> int:
        return len(self.stored) + len(self.aliases)

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored[self.aliases.get(name, name)]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            self._read(chunk, cut(whole, chunk.box))
        memory_format = MEMORY_FORMATS.get(self.memory_formats.get(self.aliases.get(name, name), ""))
        return whole if memory_format is None else whole.contiguous(memory_format=memory_format)

    def on_meta(self) -> dict[str, Tensor]:
        """Tensors without content, of the right shapes and dtypes; an alias is the same tensor again."""
        empty = {
            name: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            for name, stored in self.stored.items()
        }
        return {**empty, **{alias: empty[name] for alias, name in self.aliases.items()}}

    @torch.no_grad()
    def fill(self, name: str, target: Tensor) -> None:
        """Read a tensor, or this rank's part of it, into `target` of the same (whole) shape.

        Raises:
            DamagedFileError: What is read is not what was written.
        """
        stored = self.stored[self.aliases.get(name, name)]
        everything = whole_box(stored.shape)
        if not is_sharded(target) and len(stored.chunks) == 1 and stored.chunks[0].box == everything:
            self._read(stored.chunks[0], target.detach())
            return
        for box, piece in local_pieces(target):
            self._fill_piece(stored, box, piece)

    def _fill_piece(self, stored: Stored, box: Box, piece: Tensor) -> None:
        for chunk, inside, here in _reads(stored, box):
            place = cut(piece, here)
            if inside == ((0,) * len(stored.shape), chunk.box[1]):
                self._read(chunk, place)
            else:
                # Only the rows that are wanted are read: their bytes are in one piece, but not their hash.
                place.copy_(self._rows(chunk, inside))

    def _header(self, name: str) -> FileHeader:
        if name not in self._headers:
            self._headers[name] = read_header(self.folder / name)
        return self._headers[name]

    def _rows(self, chunk: Chunk, inside: Box) -> Tensor:
        dtype, shape, begin, end = self._header(chunk.file).entries[chunk.key]
        row_bytes = (end - begin) // max(1, shape[0])
        rows = torch.empty((inside[1][0], *shape[1:]), dtype=dtype)
        with _opened(self.folder / chunk.file) as handle:
            _read_exactly(
                handle, files.raw_bytes(rows), begin + inside[0][0] * row_bytes, self.folder / chunk.file
            )
        return cut(rows, ((0, *inside[0][1:]), inside[1]))

    def _read(self, chunk: Chunk, target: Tensor) -> None:
        """Read a chunk into `target`, any tensor of its shape, and compare its hash."""
        dtype, shape, begin, end = self._header(chunk.file).entries[chunk.key]
        wanted = self._hashes.get(chunk.file, {}).get(chunk.key)
        path, digest, done = self.folder / chunk.file, hashlib.blake2b(digest_size=16), 0
        direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
        if target.is_contiguous():
            flat = target.reshape(-1)
        else:
            flat = torch.empty(shape, dtype=dtype).reshape(-1)
            direct = True
        into = files.raw_bytes(flat) if direct else memoryview(bytearray(min(_PIECE_BYTES, end - begin)))
        with _opened(path) as handle:
            while begin + done < end:
                length = min(_PIECE_BYTES, end - begin - done)
                piece = into[done : done + length] if direct else into[:length]
                _read_exactly(handle, piece, begin + done, path)
                if wanted is not None:
                    digest.update(piece)
                if not direct:
                    values = torch.frombuffer(piece, dtype=dtype)
                    flat[done // dtype.itemsize : (done + length) // dtype.itemsize].copy_(values)
                done += length
        if wanted is not None and digest.hexdigest() != wanted:
            raise DamagedFileError(
                f"{path}: {chunk.key!r} does not have the hash that was written: its bytes were changed, or this node's "
                "file system shows others.\nFix: use an earlier checkpoint"
            )
        if not target.is_contiguous():
            target.copy_(flat.view(shape))


def _stored_in_shards(entry: Mapping[str, Any]) -> Stored:
    chunks = tuple(
        Chunk(chunk["file"], chunk["key"], (tuple(chunk["offsets"]), tuple(chunk["sizes"])))
        for chunk in entry["chunks"]
    )
    return Stored(_TORCH_DTYPES[entry["dtype"]], tuple(entry["shape"]), chunks)


def _reads(stored: Stored, wanted: Box) -> Iterator[tuple[Chunk, Box, Box]]:
    """What to read: from which chunk, which box of the chunk, into which box of the one that is wanted."""
    if 0 in wanted[1]:
        return
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def described(box: Box) -> dcp.ChunkStorageMetadata:
        return dcp.ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))

    by_offset = {torch.Size(chunk.box[0]): chunk for chunk in stored.chunks}
    saved = dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype=stored.dtype),
        torch.Size(stored.shape),
        [described(chunk.box) for chunk in stored.chunks],
    )
    for item in create_read_items_for_chunk_list("", saved, [described(wanted)]):
        assert item.storage_index.offset is not None
        chunk, sizes = by_offset[item.storage_index.offset], tuple(item.lengths)
        yield chunk, (tuple(item.storage_offsets), sizes), (tuple(item.dest_offsets), sizes)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _read_exactly(handle: int, into: memoryview, start: int, path: Path) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(handle, [into[done:]], start + done)
        if not count:
            raise DamagedFileError(f"{path}: cut short at byte {start + done}")
        done += count

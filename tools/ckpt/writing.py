"""New files from entries of other files: bytes go from file to file, through the kernel where they can."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from phalanx.dist.checkpoint_files import FileRecord, hash_together, sync_folder
from phalanx.tools.ckpt.contents import Entry, Extent
from phalanx.tools.ckpt.dtypes import STORAGE_OF, TO_SAFETENSORS, item_bytes
from phalanx.tools.ckpt.errors import BadCheckpoint, shown
from phalanx.tools.ckpt.pickle_values import Call, Global, Pairs, Persistent
from phalanx.tools.ckpt.pickle_writing import PickleWriter
from phalanx.tools.ckpt.reading import ValueReader
from phalanx.tools.ckpt.safetensors_files import contiguous
from phalanx.tools.ckpt.zip_writing import ZipWriter
from phalanx.tools.usage import CannotFinish, UsageMistake

_KERNEL_BYTES = 64 << 20  # per call: small enough that Ctrl-C is heard


@contextlib.contextmanager
def new_file(path: Path, force: bool) -> Iterator[IO[bytes]]:
    """A file that gets its name when it is complete and on the disk; on an error nothing is left.

    Raises:
        UsageMistake: It exists and `force` is not given, or cannot be written.
        CannotFinish: The disk is full.
    """
    if os.path.lexists(path) and not force:
        raise UsageMistake(
            f"{str(path)!r} exists already; it would be lost.", fix="another --output, or --force"
        )
    if path.is_dir():
        raise UsageMistake(f"{str(path)!r} is a folder.", fix="--output FILE")
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise not_written(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def not_written(path: Path, error: OSError) -> Exception:
    """What to tell when the operating system refuses."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CannotFinish(
            f"{str(path)!r}: {error.strerror}; nothing was left behind.",
            fix="free space, or another --output",
        )
    return UsageMistake(
        f"{str(path)!r} cannot be written: {error.strerror or error}.", fix="another --output"
    )


@dataclass(frozen=True)
class _Storage:
    """One storage of the file to be written: a whole extent as it is, or one entry's values without gaps."""

    key: str
    extent: Extent | None
    entry: Entry
    bytes: int


class TorchWriter:
    """Writes a torch file of the zip format, with entries' values streamed from where they are."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.storages: dict[Any, _Storage] = {}
        self._shared = _shared_extents(entries)

    def tensor(self, entry: Entry) -> Call:
        """The description of a tensor with this entry's values; its storage will be in the file."""
        view = entry.pieces[0].view if len(entry.pieces) == 1 else None
        whole = view is not None and (
            view.extent in self._shared or view.extent.length <= 2 * max(entry.bytes, 1)
        )
        if view is None or not whole or view.extent.length % item_bytes(entry.dtype):
            storage = self._storage(("entry", entry.pieces), None, entry, entry.bytes)
            return _rebuild(storage, entry.dtype, entry.shape, 0, contiguous(entry.shape))
        storage = self._storage(("extent", view.extent), view.extent, entry, view.extent.length)
        return _rebuild(storage, entry.dtype, entry.shape, view.offset, view.stride)

    def _storage(self, mark: Any, extent: Extent | None, entry: Entry, size: int) -> _Storage:
        if mark not in self.storages:
            self.storages[mark] = _Storage(str(len(self.storages)), extent, entry, size)
        return self.storages[mark]

    def write(self, out: IO[bytes], root: Any) -> None:
        """The whole file."""
        archive = ZipWriter(out)
        archive.add("archive/data.pkl", PickleWriter().dump(root))
        archive.add("archive/.format_version", b"1")
        archive.add("archive/.storage_alignment", b"64")
        archive.add("archive/byteorder", b"little")
        with ValueReader() as reader:
            for storage in self.storages.values():
                add_storage(archive, f"archive/data/{storage.key}", storage.extent, storage.entry, reader)
        archive.add("archive/version", b"3\n")
        archive.finish()


def add_storage(
    archive: ZipWriter, name: str, extent: Extent | None, entry: Entry | None, reader: ValueReader
) -> None:
    """One storage's record: copied by the kernel with its checksum where both are at hand, else read and summed."""
    if extent is None:
        assert entry is not None
        archive.add_pieces(name, entry.bytes, reader.pieces(entry))
        return
    file = reader.reader(extent.path)
    if extent.deflated or extent.crc is None:
        archive.add_pieces(name, extent.length, file.pieces(extent))
        return
    start = file.data_start(extent)
    file.read(start + extent.length, 0)  # fails here, before anything is copied, when the file is cut
    archive.add_known(
        name, extent.length, extent.crc, lambda out: kernel_copy(file.handle, start, extent.length, out)
    )


def kernel_copy(source: int, start: int, length: int, out: IO[bytes]) -> None:
    """Copy bytes between files without bringing them into this process, where the file systems can."""
    out.flush()
    target, place = out.fileno(), out.tell()
    done = 0
    while done < length:
        count = _copied(source, target, start + done, place + done, min(_KERNEL_BYTES, length - done))
        if not count:
            raise BadCheckpoint(
                "the source file", "became shorter while it was read.", fix="wait for its writer"
            )
        done += count
    out.seek(place + done)


def _copied(source: int, target: int, start: int, place: int, length: int) -> int:
    try:
        return os.copy_file_range(source, target, length, start, place)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            raise
    data = os.pread(source, min(length, 8 << 20), start)
    return os.pwrite(target, data, place) if data else 0


def _shared_extents(entries: Mapping[str, Entry]) -> set[Extent]:
    """Storages that several of the entries are views of."""
    seen: dict[Extent, int] = {}
    for entry in entries.values():
        if len(entry.pieces) == 1:
            extent = entry.pieces[0].view.extent
            seen[extent] = seen.get(extent, 0) + 1
    return {extent for extent, count in seen.items() if count > 1}


def _rebuild(
    storage: _Storage, dtype: str, shape: tuple[int, ...], offset: int, stride: tuple[int, ...]
) -> Call:
    hooks = Call(Global("collections", "OrderedDict"), ())
    if dtype in STORAGE_OF:
        pid = (
            "storage",
            Global("torch", STORAGE_OF[dtype]),
            storage.key,
            "cpu",
            storage.bytes // item_bytes(dtype),
        )
        args: tuple[Any, ...] = (Persistent(pid), offset, shape, stride, False, hooks)
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
    # Types without a storage class of their own: the storage counts bytes.
    pid = ("storage", Global("torch.storage", "UntypedStorage"), storage.key, "cpu", storage.bytes)
    args = (Persistent(pid), offset, shape, stride, False, hooks, Global("torch", dtype))
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), args)


def ordered(pairs: list[tuple[Any, Any]]) -> Call:
    """An OrderedDict."""
    made = Call(Global("collections", "OrderedDict"), ())
    made.pairs = pairs
    return made


def state_dict_root(writer: TorchWriter, entries: Mapping[str, Entry], metadata: Any = None) -> Call:
    """The description of a state dict; names of one tensor stay names of one."""
    tensors: dict[Any, Call] = {}
    pairs = []
    for key, entry in entries.items():
        mark = (entry.pieces, entry.shape)
        if mark not in tensors or not entry.pieces:
            tensors[mark] = writer.tensor(entry)
        pairs.append((key, tensors[mark]))
    root = ordered(pairs)
    if metadata is not None:
        root.states.append(Pairs([("_metadata", metadata)]))
    return root


def write_safetensors(
    out: IO[bytes], entries: Mapping[str, Entry], metadata: Mapping[str, str], hashed: bool = False
) -> FileRecord:
    """A safetensors file, streamed; its record for a manifest if `hashed`.

    Raises:
        BadCheckpoint: A tensor is of a type that safetensors has no name for.
    """
    unknown = [key for key, entry in entries.items() if entry.dtype not in TO_SAFETENSORS]
    if unknown:
        kind = entries[unknown[0]].dtype
        raise BadCheckpoint(
            shown(unknown[0]), f"is of {kind}, which safetensors has no name for.", fix="convert to .pt"
        )
    # Wide types first, so that every tensor is aligned to its own size.
    order = sorted(entries, key=lambda key: (-item_bytes(entries[key].dtype), key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for key in order:
        entry = entries[key]
        start, end = end, end + entry.bytes
        header[key] = {
            "dtype": TO_SAFETENSORS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    out.write(head)
    hashes: dict[str, str] = {}
    with ValueReader() as reader:
        for key in order:
            run = None if hashed else _kernel_run(reader, entries[key])
            if run is not None:
                kernel_copy(*run, out)
                continue
            digest = hashlib.blake2b(digest_size=16)
            for piece in reader.pieces(entries[key]):
                if hashed:
                    digest.update(piece)
                out.write(piece)
            hashes[key] = digest.hexdigest()
    return FileRecord(len(head) + end, hash_together(head, hashes.values()) if hashed else "", hashes)


def _kernel_run(reader: ValueReader, entry: Entry) -> tuple[int, int, int] | None:
    """Where an entry's bytes lie in one run, as a file handle, start and length; None where they do not."""
    if not entry.readable or len(entry.pieces) != 1 or not entry.count:
        return None
    view = entry.pieces[0].view
    if view.extent.deflated or view.stride != contiguous(entry.shape) or view.shape != entry.shape:
        return None
    start = view.offset * item_bytes(entry.dtype)
    if start + entry.bytes > view.extent.length:
        return None
    file = reader.reader(view.extent.path)
    begin = file.data_start(view.extent) + start
    file.read(begin + entry.bytes, 0)
    return file.handle, begin, entry.bytes

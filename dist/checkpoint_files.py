"""The files of one checkpoint: written, synced and hashed in one pass, and checked in one pass.

A tensor's hash is blake2b over its bytes; a safetensors file's is blake2b over its header and its
tensors' hashes in file order, so that nothing is hashed twice. The manifest, written last, has them
all and a hash of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, MANIFEST_FILE = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)
SHARDS_FILE = "shards.json"  # beside one safetensors file per rank, where ranks held parts of tensors
FORMAT = 1
_PIECE_BYTES = 8 << 20
_HEADER_LIMIT_BYTES = 100 << 20  # safetensors' own limit

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file."""

    bytes: int
    hash: str
    tensors: dict[str, str] = field(default_factory=dict)


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def hash_together(header: bytes, tensor_hashes: Iterable[str]) -> str:
    """A safetensors file's hash, from its header and its tensors' hashes in file order."""
    whole = _hasher()
    whole.update(header)
    for digest in tensor_hashes:
        whole.update(bytes.fromhex(digest))
    return whole.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in logical order, copied only when it is not on the CPU and contiguous already."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if plain.is_complex():
        plain = torch.view_as_real(plain).reshape(-1)
    if not plain.numel():
        return memoryview(b"")
    content: memoryview = plain.view(torch.uint8).numpy().data
    return content


def tensor_hash(tensor: Tensor) -> str:
    """The hash that the manifest keeps for this tensor."""
    digest = _hasher()
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    content_of: Callable[[str], Tensor] | None = None,
) -> FileRecord:
    """Write a safetensors file and sync it to disk; what must be copied first is copied some MB at a time.

    Args:
        path: Must not exist.
        tensors: By name; only their dtypes and shapes matter when `content_of` brings the content.
        metadata: Put into the header.
        content_of: Called with a name when it is that tensor's turn.

    Raises:
        ValueError: A tensor is of a kind that safetensors has no name for; the message names it.
    """
    # Wide types first, so that every tensor is aligned to its own size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _dtype_name(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    hashes, contents = {}, _Contents()
    with path.open("xb") as file:
        file.write(head)
        for name in order:
            hashes[name] = _write_tensor(
                file, contents.of(tensors[name] if content_of is None else content_of(name))
            )
        _sync(file)
    return FileRecord(len(head) + end, hash_together(head, hashes.values()), hashes)


class _Contents:
    """Tensors' bytes in logical order, a few MB at a time where they must be copied first.

    All copies go through one buffer: freed and taken anew, they would leave the heap full of holes.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def of(self, tensor: Tensor) -> Iterator[memoryview]:
        """The content; each piece is valid until the next one is asked for."""
        if (
            (tensor.device.type == "cpu" and tensor.is_contiguous())
            or tensor.dim() == 0
            or not tensor.numel()
        ):
            content = raw_bytes(tensor)
            for start in range(0, len(content), _PIECE_BYTES):
                yield content[start : start + _PIECE_BYTES]
            return
        rows = max(1, _PIECE_BYTES * tensor.shape[0] // (tensor.numel() * tensor.element_size()))
        for start in range(0, tensor.shape[0], rows):
            yield raw_bytes(self._copy(tensor.detach().narrow(0, start, min(rows, tensor.shape[0] - start))))

    def _copy(self, part: Tensor) -> Tensor:
        import torch

        size = part.numel() * part.element_size()
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(max(size, _PIECE_BYTES), dtype=torch.uint8)
        return self._buffer[:size].view(part.dtype).view(part.shape).copy_(part)


def _write_tensor(file: IO[bytes], pieces: Iterable[memoryview]) -> str:
    """Write and hash one tensor."""
    digest = _hasher()
    for piece in pieces:
        digest.update(piece)
        file.write(piece)
    return digest.hexdigest()


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise what `write_tensors` would, before anything is written."""
    for name, tensor in tensors.items():
        _dtype_name(name, tensor)


def _dtype_name(name: str, tensor: Tensor) -> str:
    import torch

    from phalanx.dist.shards import is_sharded

    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or tensor.layout != torch.strided or is_sharded(tensor):
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
        raise ValueError(
            f"{name!r} is a {kind}; this version's checkpoints hold plain dense tensors.\n"
            "Fix: register it with persistent=False if it need not be saved"
        )
    return dtype


def write_json(path: Path, value: Any) -> FileRecord:
    """Write JSON and sync it to disk."""
    content = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    with path.open("xb") as file:
        file.write(content)
        _sync(file)
    digest = _hasher()
    digest.update(content)
    return FileRecord(len(content), digest.hexdigest())


def write_manifest(folder: Path, step: int, files: Mapping[str, FileRecord]) -> None:
    """Write the manifest, last of all, and sync the folder: from here on the checkpoint is whole."""
    body = {
        "format": FORMAT,
        "step": step,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "files": {name: {"bytes": record.bytes, "hash": record.hash} for name, record in files.items()},
        "tensors": {name: record.tensors for name, record in files.items() if record.tensors},
    }
    with (folder / MANIFEST_FILE).open("xb") as file:
        file.write(_manifest_text(body))
        _sync(file)
    sync_folder(folder)


def _manifest_text(body: Mapping[str, Any]) -> bytes:
    digest = _hasher()
    digest.update(json.dumps(body, sort_keys=True).encode())
    return (json.dumps({**body, "hash": digest.hexdigest()}, indent=1, sort_keys=True) + "\n").encode()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last: a synced file without a synced name is lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest's content.

    Raises:
        ValueError: It is missing, cut or changed; the message says which.
    """
    try:
        content = (folder / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST_FILE} is missing: the save never ended") from None
    try:
        body = json.loads(content)
        del body["hash"]
        whole = _manifest_text(body) == content
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{MANIFEST_FILE} is cut or was changed")
    if body["format"] != FORMAT:
        raise ValueError(f"{MANIFEST_FILE} has format {body['format']}, this version reads format {FORMAT}")
    assert isinstance(body, dict)
    return body


def quick_problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint as far as names and sizes tell; None for nothing."""
    try:
        manifest = read_manifest(folder)
        for name, record in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != record["bytes"]:
                return f"{name} has {size} bytes, {record['bytes']} were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return str(error)
    if folder.name != f"step-{manifest['step']}":
        return f"{MANIFEST_FILE} is that of step {manifest['step']}"
    return None


def find_problems(folder: Path) -> list[str]:
    """Everything that is wrong with a checkpoint: all of it is read and hashed, in pieces."""
    problem = quick_problem(folder)
    if problem is not None:
        return [problem]
    manifest = read_manifest(folder)
    problems: list[str] = []
    for name, record in manifest["files"].items():
        try:
            if name.endswith(".safetensors"):
                problems += _tensor_problems(folder / name, record["hash"], manifest["tensors"].get(name, {}))
            elif _hash_of(folder / name) != record["hash"]:
                problems.append(f"{name} does not have its hash: its content was changed")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror or error}")
    return problems


def _hash_of(path: Path) -> str:
    digest = _hasher()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _tensor_problems(path: Path, wanted: str, wanted_tensors: Mapping[str, str]) -> list[str]:
    buffer = bytearray(_PIECE_BYTES)
    with path.open("rb") as file:
        length = file.read(8)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > min(_HEADER_LIMIT_BYTES, path.stat().st_size):
            return [f"{path.name} does not have its hash: its header was changed"]
        head = length + file.read(header_bytes)
        try:
            entries = {name: entry for name, entry in json.loads(head[8:]).items() if name != "__metadata__"}
            sizes = {
                name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return [f"{path.name} does not have its hash: its header was changed"]
        hashes = {name: _hash_piecewise(file, size, buffer) for name, size in sizes.items()}
    changed = [name for name, digest in hashes.items() if wanted_tensors.get(name) != digest]
    if changed and set(hashes) == set(wanted_tensors):
        names = ", ".join(map(repr, changed[:5])) + (f" and {len(changed) - 5} more" if changed[5:] else "")
        return [
            f"{path.name}: {names} do{'es' if len(changed) == 1 else ''} not have the hash that was written"
        ]
    if hash_together(head, hashes.values()) != wanted:
        return [f"{path.name} does not have its hash: its header was changed"]
    return []


def _hash_piecewise(file: IO[bytes], length: int, buffer: bytearray) -> str:
    digest, view = _hasher(), memoryview(buffer)
    while length > 0:
        count = file.readinto(view[: min(length, len(buffer))])  # type: ignore[attr-defined]
        if not count:
            break
        digest.update(view[:count])
        length -= count
    return digest.hexdigest()

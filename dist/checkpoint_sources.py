"""Reading weights from a file or a container dict, without ever running code that a file brings."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.dist.checkpoint_files import SHARDS_FILE
from phalanx.dist.key_rewrites import (
    AVERAGED_ENTRIES,
    LIVE_ENTRIES,
    AmbiguousKeysError,
    Shape,
    StateDictError,
    pair_keys,
    sample_names,
)

Source = Mapping[str, Any] | str | os.PathLike[str]

# Strides that change which kernels run, and so the last bits: noted beside a tensor in a file's metadata.
MEMORY_FORMATS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}


_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class CheckpointFileError(StateDictError):
    """A file that cannot be read as a checkpoint."""


class MissingCheckpointError(CheckpointFileError, FileNotFoundError):
    """There is no such file."""


class DamagedFileError(CheckpointFileError):
    """The file is empty, cut short or otherwise not whole."""


class PickledCodeError(CheckpointFileError):
    """The file would have run code or built unknown types; nothing of it was run."""


def read_source(source: Source) -> tuple[Mapping[str, Any], str]:
    """The mapping in `source`, all tensors on the CPU, and what to call it in a message."""
    if isinstance(source, Mapping):
        return source, "the state dict"
    if isinstance(source, nn.Module):
        raise StateDictError(f"source is a {type(source).__name__}, a module.\nFix: pass its state_dict()")
    if not isinstance(source, str | os.PathLike) or not isinstance(os.fspath(source), str):
        raise StateDictError(
            f"source={_short(source)}: neither a state dict nor a file.\n"
            "Fix: a mapping of names to tensors, or the path of a checkpoint"
        )
    text = os.fspath(source)
    if not text or "\0" in text:
        raise MissingCheckpointError(f"source={text!r} names no file.\nFix: pass the path of a checkpoint")
    if "://" in text:
        raise MissingCheckpointError(
            f"{text}: an address, not a file on this machine.\nFix: download it first, on one rank of each node "
            "(rank_zero_first), and pass the path"
        )
    path = Path(text)
    return read_file(path), str(path)


def _short(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 80 else words[:77] + "..."


def read_file(path: Path) -> Mapping[str, Any]:
    """Everything in a checkpoint file, recognised by content and not by its name.

    Reads torch's zip and legacy formats (``weights_only``, memory-mapped where possible),
    safetensors (also in several files with an ``.index.json``), and a checkpoint folder of ours, sharded or not.

    Raises:
        MissingCheckpointError: No such file, or a folder without ``model.safetensors``.
        DamagedFileError: Empty, cut short or damaged.
        PickledCodeError: Holds pickled code or types that are not plain; none of it was run.
    """
    if path.is_dir():
        if (path / SHARDS_FILE).is_file():
            from phalanx.dist.stored_tensors import StoredTensors

            stored = StoredTensors(path, "model")
            tensors = {name: stored[name] for name in stored.stored}
            return {**tensors, **{alias: tensors[name] for alias, name in stored.aliases.items()}}
        return read_file(_file_in_folder(path))
    if path.name.endswith(".index.json"):
        return _read_split(path)
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except FileNotFoundError:
        raise MissingCheckpointError(
            f"{path}: no such file.\nFix: see that the path is right on this host ({Path.cwd()} is the current folder)"
        ) from None
    if not start:
        raise DamagedFileError(f"{path}: the file is empty; the program that wrote it was probably cut off")
    if start[8:9] == b"{" and path.suffix not in {".pt", ".pth"}:
        return read_safetensors(path)
    if start.startswith(b"PK"):
        if not zipfile.is_zipfile(path):
            raise _cut(path, "its table of contents, which comes last, is missing")
        _refuse_other_archives(path)
        return _load_torch(path, mmap=True)
    if start[8:9] == b"{":
        return read_safetensors(path)
    if start[:1] == b"\x80":
        return _load_torch(path, mmap=False)
    stranger = next((words for magic, words in _STRANGERS.items() if start.lower().startswith(magic)), "")
    raise DamagedFileError(
        f"{path}: neither a torch nor a safetensors file, it starts with {start[:8]!r}{stranger}"
    )


# What is often found under a checkpoint's name.
_STRANGERS = {
    b"<": ": a web page, such as a download's error message.\nFix: download the file itself",
    b"version https": ": the note that Git LFS leaves of a file which was not fetched.\nFix: git lfs pull",
    b"\x1f\x8b": ": it is compressed.\nFix: gunzip it first",
    b"\x93numpy": ": an array of numpy's.\nFix: save the tensors with torch.save or safetensors",
}


def _refuse_other_archives(path: Path) -> None:
    """Zip archives that torch.load would take for damaged, or ask to run.

    Raises:
        CheckpointFileError: It is one of TorchScript's, or numpy's.
    """
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise CheckpointFileError(
            f"{path}: a TorchScript archive, which is a program with its weights. Nothing of it was run.\n"
            "Fix: torch.save(torch.jit.load(path).state_dict(), ...), if you know where it is from"
        )
    if names and all(name.endswith(".npy") for name in names):
        raise CheckpointFileError(
            f"{path}: numpy's archive of arrays.\n"
            "Fix: pass {name: torch.from_numpy(array) for name, array in numpy.load(path).items()}"
        )


def _file_in_folder(folder: Path) -> Path:
    for name in _WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    if (folder / ".metadata").is_file():
        raise CheckpointFileError(
            f"{folder}: a sharded torch.distributed.checkpoint folder, which is not a state dict.\nFix: convert it "
            f"with python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pt"
        )
    steps = [
        int(name[5:]) for name in os.listdir(folder) if name.startswith("step-") and name[5:].isdecimal()
    ]
    fix = f"\nFix: name one of its checkpoints, e.g. {folder / f'step-{max(steps)}'}" if steps else ""
    raise MissingCheckpointError(f"{folder}: a folder without model.safetensors{fix}")


def _read_split(index: Path) -> Mapping[str, Any]:
    """Weights in several files, listed by key in an index as Hugging Face's libraries write it."""
    try:
        table = json.loads(index.read_bytes())["weight_map"]
        parts = sorted(set(table.values()))
        strangers = [name for name in parts if Path(name).name != name]
    except FileNotFoundError:
        raise MissingCheckpointError(f"{index}: no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _cut(index, f"not an index of weight files: {error!r}") from error
    if strangers:
        raise CheckpointFileError(f"{index}: names {strangers[0]!r}, which is not a file beside it")
    absent = [name for name in parts if not (index.parent / name).is_file()]
    if absent:
        raise MissingCheckpointError(
            f"{index}: {len(absent)} of its {len(parts)} files are missing: {sample_names(absent)}.\n"
            "Fix: copy them beside it"
        )
    tensors: dict[str, Any] = {}
    for name in parts:
        found = read_file(index.parent / name)
        lacking = [key for key, file in table.items() if file == name and key not in found]
        if lacking:
            raise _cut(index.parent / name, f"{sample_names(lacking)} should be in it and are not")
        tensors.update(found)
    return tensors


def _cut(path: Path, reason: str) -> DamagedFileError:
    return DamagedFileError(
        f"{path}: cut short or damaged ({path.stat().st_size} bytes): {reason}.\nNothing was loaded. "
        "Fix: use an earlier checkpoint, or copy the file again"
    )


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name; names that the file's metadata lists as aliases share one tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _cut(path, str(error)) from error
    formats = json_table(metadata.get("memory_formats"))
    for key, name in formats.items():
        if key in tensors and name in MEMORY_FORMATS:
            tensors[key] = tensors[key].contiguous(memory_format=MEMORY_FORMATS[name])
    for alias, key in json_table(metadata.get("aliases")).items():
        if key in tensors:
            tensors[alias] = tensors[key]
    return tensors


def json_table(text: str | None) -> dict[str, str]:
    """A table kept in a safetensors file's metadata, where every value is text; {} for none."""
    try:
        table = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    return table if isinstance(table, dict) else {}


def _load_torch(path: Path, mmap: bool) -> Mapping[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, AttributeError, TypeError) as error:
        blocked = blocked_types(path)
        if blocked:
            raise PickledCodeError(
                f"{path}: holds pickled objects other than tensors and plain values: {', '.join(blocked)}.\n"
                "Loading them would run code from the file. Nothing of it was run and nothing was loaded.\n"
                "Fix: save only tensors and plain values (torch.save(model.state_dict(), ...)). If you know where "
                "the file is from, allow just these types: torch.serialization.add_safe_globals([...])"
            ) from error
        raise _cut(path, str(error).splitlines()[0]) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, AssertionError, struct.error) as error:
        raise _cut(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointFileError(f"{path}: holds a {type(loaded).__name__}, not a dict of tensors")
    return loaded


def blocked_types(path: Path) -> list[str]:
    """Names of the types and functions in a torch file that ``weights_only`` refuses.

    Read from the pickle's opcodes: nothing is imported and nothing is run.
    """
    names = set()
    for stream in _pickles(path):
        names.update(_globals_in(stream))
    allowed = _allowed_names()
    return sorted(name for name in names if name not in allowed and not _is_plain_torch(name))


def _pickles(path: Path) -> Iterator[io.BufferedIOBase | Any]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    with archive.open(name) as stream:
                        yield stream
    else:
        with path.open("rb") as stream:
            yield stream


def _globals_in(stream: Any) -> set[str]:
    names: set[str] = set()
    while True:  # torch's legacy format is several pickles, one after the other
        strings: list[str] = []
        memo: dict[int, str] = {}
        try:
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in {"GLOBAL", "INST"}:
                    names.add(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL" and len(strings) >= 2:
                    names.add(f"{strings[-2]}.{strings[-1]}")
                elif isinstance(argument, str):
                    strings.append(argument)
                elif opcode.name == "MEMOIZE" and strings:
                    memo[len(memo)] = strings[-1]
                elif (
                    opcode.name in {"BINGET", "LONG_BINGET"}
                    and isinstance(argument, int)
                    and argument in memo
                ):
                    strings.append(memo[argument])
        except (ValueError, EOFError, UnicodeDecodeError, IndexError, KeyError):
            return names  # the end of the pickles: raw storages follow


def _allowed_names() -> set[str]:
    allowed = {
        "collections.OrderedDict",
        "collections.Counter",
        "builtins.set",
        "builtins.bytearray",
        "_codecs.encode",
    }
    for entry in torch.serialization.get_safe_globals():
        kind = entry[0] if isinstance(entry, tuple) else entry
        allowed.add(f"{kind.__module__}.{kind.__qualname__}")
    return allowed


def _is_plain_torch(name: str) -> bool:
    module, _, last = name.rpartition(".")
    if name == "torch.storage._load_from_bytes":  # tensors in a plain pickle: each is one more pickle
        return False
    if module == "torch._utils":
        return last.startswith("_rebuild_")
    plain = {"Size", "Tensor", "Generator", "device", "dtype"}
    if module == "torch":
        return (
            last in plain or last.endswith("Storage") or isinstance(getattr(torch, last, None), torch.dtype)
        )
    return name in {"torch.nn.parameter.Parameter", "torch._tensor._rebuild_from_type_v2"} or (
        module in {"torch.storage", "torch.serialization"}
    )


def _tensors_in(value: Any, named: bool) -> Mapping[str, Any] | None:
    """`value` as a state dict, if it is one: a module, or a mapping that holds tensors or has an entry's name."""
    if isinstance(value, nn.Module):
        return value.state_dict()
    if not isinstance(value, Mapping) or "param_groups" in value:
        return None
    if not value or not all(isinstance(key, str) for key in value):
        return None
    if any(isinstance(entry, Tensor) for entry in value.values()):
        return value
    if named and not any(isinstance(entry, Mapping | nn.Module) for entry in value.values()):
        return value
    return None


def _containers(
    source: Mapping[Any, Any], path: str = "", depth: int = 4
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in source.items():
        if not isinstance(name, str):
            continue
        inner = _tensors_in(value, named=name in LIVE_ENTRIES or name in AVERAGED_ENTRIES)
        if inner is not None:
            yield path + name, inner
        elif isinstance(value, Mapping) and "param_groups" not in value and depth > 1:
            yield from _containers(value, f"{path}{name}/", depth - 1)


def shape_of(value: Any) -> Shape | None:
    """A tensor's shape; None where it is not known yet (lazy modules) or the value is no tensor."""
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)


def _score(weights: Mapping[str, Any], target: Mapping[str, Shape | None]) -> int:
    try:
        return len(pair_keys({key: shape_of(value) for key, value in weights.items()}, target).pairs)
    except StateDictError:
        return 0


def pick_weights(
    source: Mapping[str, Any], target: Mapping[str, Shape | None]
) -> tuple[Mapping[str, Any], str | None, list[str]]:
    """The weights in `source`, the entry they were found under (None: at the top), and other entries that hold tensors.

    Raises:
        AmbiguousKeysError: Two entries of the same kind fit the target equally well.
    """
    found = dict(_containers(source))
    if not found:
        return source, None, []
    top = {key: value for key, value in source.items() if isinstance(value, Tensor)}
    if top and _score(top, target) >= max(_score(weights, target) for weights in found.values()):
        return source, None, sorted(found)

    def kind(entry: str) -> int:
        last = entry.rpartition("/")[2]
        return 0 if last in LIVE_ENTRIES else 2 if last in AVERAGED_ENTRIES else 1

    scores = {entry: _score(weights, target) for entry, weights in found.items()}
    for wanted in (0, 1, 2):
        entries = [entry for entry in found if kind(entry) == wanted and scores[entry]]
        best = [entry for entry in entries if scores[entry] == max(scores[e] for e in entries)]
        if len(best) > 1 and not _same_values(found[best[0]], [found[entry] for entry in best[1:]]):
            raise AmbiguousKeysError(
                f"the entries {sample_names(best)} fit the model equally well; taking one would be a guess.\n"
                f"Fix: pass the one that is meant, e.g. source[{best[0]!r}]"
            )
        if best:
            return found[best[0]], best[0], sorted(entry for entry in found if entry != best[0])
    entry = min(found, key=kind)  # nothing fits: the likeliest entry's names make the best message
    return found[entry], entry, sorted(other for other in found if other != entry)


def _same_values(first: Mapping[str, Any], others: list[Mapping[str, Any]]) -> bool:
    return all(
        other.keys() == first.keys() and all(_same(other[key], value) for key, value in first.items())
        for other in others
    )


def _same(first: Any, second: Any) -> bool:
    """Whether it is one tensor: ``model.state_dict()`` taken twice gives two objects for it."""
    if first is second or not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return first is second
    if first.is_meta or second.is_meta or shape_of(first) is None or first.shape != second.shape:
        return False
    return first.data_ptr() == second.data_ptr() and first.stride() == second.stride()

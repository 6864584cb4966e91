"""What a path is, told from its content, and read without running anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from phalanx.dist.checkpoint_files import MANIFEST_FILE, MODEL_FILE, SHARDS_FILE, STATE_FILE
from phalanx.dist.checkpoint_folders import steps_in
from phalanx.tools.ckpt.contents import Contents
from phalanx.tools.ckpt.dcp_folders import INDEX, read_dcp
from phalanx.tools.ckpt.deepspeed_folders import latest_in, read_deepspeed, state_files
from phalanx.tools.ckpt.errors import CUT_FIX, BadCheckpoint, shown
from phalanx.tools.ckpt.folders import read_ours, read_several, read_split
from phalanx.tools.ckpt.pickle_machine import PickleProblem
from phalanx.tools.ckpt.safetensors_files import read_safetensors
from phalanx.tools.ckpt.torch_files import TorchFile, entries_of, read_pickled, read_zip
from phalanx.tools.ckpt.torch_values import mapping_of
from phalanx.tools.ckpt.tree import short_form
from phalanx.tools.ckpt.zip_reading import FileReader
from phalanx.tools.usage import UsageMistake, nearest

_MAX_NESTING = 4
_KINDS_FIX = "a .pt, .pth, .bin, .ckpt or .safetensors file, or the folder that a training run saved"


def open_checkpoint(path: str | os.PathLike[str], *, values: bool = False) -> Contents:
    """Describe a checkpoint, file or folder; torch is neither needed nor imported, and no pickled code runs.

    Args:
        path: A file, or a folder.
        values: Also find out where every tensor's bytes are, which takes longer for some folders.

    Raises:
        BadCheckpoint: It is damaged, hostile, or no checkpoint.
        UsageMistake: There is nothing at `path`, or it cannot be opened.
    """
    found = Path(path)
    if not str(path) or not os.path.lexists(found):
        raise UsageMistake(f"{shown(str(path))!r}: no such file or folder.", fix=_nearest_file(found))
    try:
        return _open(found, values, 0)
    except OSError as error:
        raise UsageMistake(
            f"{shown(str(path))!r} cannot be read: {error.strerror or error}.", fix="a file that you can read"
        ) from None


def _nearest_file(path: Path) -> str:
    try:
        names = os.listdir(path.parent)[:2000]
    except OSError:
        names = []
    near = nearest(path.name, names, count=1) if path.name else []
    return f"{path.parent / near[0]}" if near else "the path of a checkpoint: a file or a folder"


def _open(path: Path, values: bool, depth: int) -> Contents:
    if depth > _MAX_NESTING:
        raise BadCheckpoint(path, "folders within folders: none of them holds a checkpoint's files.")
    if path.is_dir():
        return _open_folder(path, values, depth)
    if not path.is_file():
        raise UsageMistake(
            f"{shown(str(path))!r} is neither a file nor a folder.", fix="the path of a checkpoint"
        )
    if path.name.endswith(".index.json"):
        return read_split(path, lambda part: _open_file(part))
    return _open_file(path)


def _open_file(path: Path) -> Contents:
    with FileReader(path) as reader:
        start = reader.read(0, min(512, reader.size))
        size = reader.size
    if not size:
        raise BadCheckpoint(
            path, "the file is empty; the program that wrote it was probably cut off.", fix=CUT_FIX
        )
    if start.startswith(b"version https://git-lfs"):
        raise BadCheckpoint(path, "a Git LFS pointer: the file itself was never fetched.", fix="git lfs pull")
    if start.startswith(b"PK\x03\x04"):
        return _described(read_zip(path))
    if (start[8:9] == b"{" and start[:1] != b"\x80") or path.suffix == ".safetensors":
        file = read_safetensors(path)
        other = {key: value for key, value in file.metadata.items() if key not in ("aliases",)}
        return Contents(
            path=path, format="safetensors", entries=file.entries, other=other, problems=file.problems
        )
    if start[:1] == b"\x80":
        return _described(read_pickled(path))
    if start[257:262] == b"ustar":
        raise BadCheckpoint(
            path,
            "a tar archive, torch's format before 0.2 or a packed folder.",
            fix="unpack it, or save it again with a newer torch",
        )
    if start.startswith(b"\x89HDF"):
        raise BadCheckpoint(path, "an HDF5 file, as Keras writes it: no checkpoint of torch's.")
    if start.startswith(b"GGUF"):
        raise BadCheckpoint(path, "a GGUF file, as llama.cpp reads it: no checkpoint of torch's.")
    if start.lstrip()[:1] == b"<":
        raise BadCheckpoint(path, "a web page: the download brought an error page.", fix="download it again")
    raise BadCheckpoint(
        path, f"neither a torch nor a safetensors file (it starts with {start[:8]!r}).", fix=_KINDS_FIX
    )


def _described(file: TorchFile) -> Contents:
    try:
        entries = entries_of(file)
        other = short_form(file.root)
    except PickleProblem as error:
        raise BadCheckpoint(file.path, f"its pickle {error}.") from None
    problems = [f"{shown(entry.key)}: {entry.problem}" for entry in entries if entry.problem]
    names = {key for key, _ in mapping_of(file.root) or [] if isinstance(key, str)}
    kind = "lightning" if "pytorch-lightning_version" in names and file.format != "pickle" else file.format
    return Contents(
        path=file.path,
        format=kind,
        entries=entries,
        other=other,
        facts={**file.facts, **({"container": file.format} if kind != file.format else {})},
        code=file.code,
        root=file.root,
        storages=file.storages,
        problems=tuple(problems),
    )


def _open_folder(folder: Path, values: bool, depth: int) -> Contents:
    names = set(os.listdir(folder))
    if MANIFEST_FILE in names or SHARDS_FILE in names or {MODEL_FILE, STATE_FILE} <= names:
        return read_ours(folder)
    if INDEX in names:
        return _with_meta(folder, read_dcp(folder, values), names)
    if state_files(folder):
        return read_deepspeed(folder)
    step = latest_in(folder)
    if step is not None:
        return _open(step, values, depth + 1)
    several = read_several(folder, lambda part: _open(part, values, depth + 1))
    if several is not None:
        return several
    steps = steps_in(folder)
    if steps:
        return _open(steps[-1][1], values, depth + 1)
    for inner in (
        "checkpoint",
        "checkpoints",
    ):  # Lightning's DeepSpeed strategy, and ours beside a run's logs
        if (folder / inner).is_dir():
            return _open(folder / inner, values, depth + 1)
    listed = ", ".join(shown(name, 60) for name in sorted(names)[:5])
    problem = f"a folder without a checkpoint's files (it holds {listed or 'nothing'})."
    raise BadCheckpoint(folder, problem, fix=_KINDS_FIX)


def _with_meta(folder: Path, contents: Contents, names: set[str]) -> Contents:
    """Lightning's FSDP strategy keeps everything but tensors in ``meta.pt`` beside the index."""
    if "meta.pt" not in names:
        return contents
    meta: Any = _open_file(folder / "meta.pt")
    other = {**(contents.other or {}), "meta.pt": meta.other}
    kind = (
        "lightning" if isinstance(meta.other, dict) and "pytorch-lightning_version" in meta.other else "dcp"
    )
    return Contents(**{**vars(contents), "other": other, "format": kind, "code": meta.code})

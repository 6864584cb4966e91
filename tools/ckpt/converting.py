"""`phalanx ckpt convert`: a model's weights from one format into another."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.dist.checkpoint_files import (
    FORMAT,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    sync_folder,
    write_json,
    write_manifest,
)
from phalanx.tools.ckpt.contents import Contents, Entry
from phalanx.tools.ckpt.errors import BadCheckpoint
from phalanx.tools.ckpt.fixing import bare_root
from phalanx.tools.ckpt.weights import pick
from phalanx.tools.ckpt.writing import TorchWriter, new_file, not_written, write_safetensors
from phalanx.tools.usage import UsageMistake

KINDS = ("pt", "safetensors", "phalanx")
_ENDINGS = {".pt": "pt", ".pth": "pt", ".bin": "pt", ".ckpt": "pt", ".safetensors": "safetensors"}


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        output: The file or folder.
        kind: One of `KINDS`.
        tensors: How many.
        container: The entry of the source that they were in.
        left_out: Other entries of the source, which the result does not hold.
        ties: Second names of tensors, which safetensors files hold as a note or twice.
    """

    output: Path
    kind: str
    tensors: int
    container: str = ""
    left_out: list[str] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)


def kind_of(output: str, to: str | None) -> str:
    """What to write, from ``--to`` or from the name.

    Raises:
        UsageMistake: The name does not tell.
    """
    if to is not None:
        return to
    path = Path(output)
    kind = _ENDINGS.get(path.suffix)
    if kind is None and (output.endswith("/") or path.name.startswith("step-")):
        return "phalanx"
    if kind is None:
        raise UsageMistake(
            f"{output!r}: the name does not tell the format: none of {', '.join(_ENDINGS)}, and no folder step-<N>.",
            fix="--to pt, --to safetensors or --to phalanx",
        )
    return kind


def convert(
    contents: Contents, output: Path, kind: str, *, entry: str | None = None, force: bool = False
) -> Converted:
    """Write the weights in `contents` in another format, streamed.

    Args:
        contents: From `open_checkpoint` with ``values=True``.
        output: A file, or for ``phalanx`` a folder named ``step-<N>``.
        kind: One of `KINDS`.
        entry: The entry that holds the weights, where there are several.
        force: Replace `output`.

    Raises:
        BadCheckpoint: The source has no weights, or some cannot be read.
        UsageMistake: `output` exists, or cannot be written.
    """
    weights = pick(contents, None, entry)
    entries = dict(weights.entries)
    for key, found in entries.items():
        if found.count and not found.readable:
            raise BadCheckpoint(
                contents.path,
                f"{key!r} cannot be converted: {found.problem or found.note or 'it has no values'}.",
            )
    names = {found.key: key for key, found in entries.items()}
    ties = {key: names[found.shared_with] for key, found in entries.items() if found.shared_with in names}
    assert all(isinstance(name, str) for name in ties.values())
    if kind == "phalanx":
        _write_folder(output, entries, ties, force)
    else:
        with new_file(output, force) as out:
            if kind == "safetensors":
                write_safetensors(out, entries, {})
            else:
                writer = TorchWriter(entries)
                writer.write(out, bare_root(writer, entries, weights))
    left_out = [*weights.others, *_rest(contents, weights.container)]
    return Converted(
        output,
        kind,
        len(entries),
        weights.container,
        [name for name in dict.fromkeys(left_out) if name[:1] not in "($"],
        ties,
    )


def _rest(contents: Contents, container: str) -> list[str]:
    parts = [
        entry.key.partition("/")[0]
        for entry in contents.entries
        if "/" in entry.key and contents.root is None
    ]
    if not isinstance(contents.other, dict) or contents.format in ("safetensors", "huggingface-sharded"):
        return parts
    return [*(name for name in contents.other if name != container), *parts]


def _write_folder(folder: Path, entries: Mapping[str, Entry], ties: Mapping[str, str], force: bool) -> None:
    """A checkpoint folder with the weights alone: to load, or for `restore(else_from=...)`."""
    number = folder.name.removeprefix("step-")
    if not (folder.name.startswith("step-") and number.isdecimal() and str(int(number)) == number):
        raise UsageMistake(
            f"{str(folder)!r}: a checkpoint folder of phalanx is named step-<N>.",
            fix=f"{folder.parent / 'step-0'}",
        )
    if os.path.lexists(folder) and not force:
        raise UsageMistake(
            f"{str(folder)!r} exists already; it would be lost.", fix="another name, or --force"
        )
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    single = {key: entry for key, entry in entries.items() if key not in ties}
    try:
        temporary.mkdir(parents=True)
        records = {}
        tables = {"aliases": json.dumps(dict(ties))} if ties else {}
        for name, part, metadata in ((MODEL_FILE, single, tables), (OPTIMIZER_FILE, {}, {})):
            with new_file(temporary / name, force=False) as out:
                records[name] = write_safetensors(out, part, metadata, hashed=True)
        records[STATE_FILE] = write_json(temporary / STATE_FILE, _state(int(number)))
        write_manifest(temporary, int(number), records)
        if os.path.lexists(folder):
            _remove(folder)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise not_written(folder, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Replace only what looks like a checkpoint: --force is no licence to delete any folder."""
    if folder.is_dir() and not folder.is_symlink():
        if not (folder / MODEL_FILE).is_file() and any(folder.iterdir()):
            raise UsageMistake(f"{str(folder)!r} is a folder, and holds no checkpoint.", fix="another name")
        shutil.rmtree(folder)
    else:
        folder.unlink()


def _state(step: int) -> dict[str, object]:
    from phalanx import __version__

    return {
        "format": FORMAT,
        "progress": {"epoch": 0, "step_in_epoch": 0, "step": step, "skipped": 0},
        "loader": None,
        "scheduler": None,
        "optimizer": {"class": None, "groups": [], "state": {}, "shared": {}},
        "scaler": None,
        "model_extra": {},
        "values": {},
        "world_size": 1,
        "versions": {"phalanx": __version__},
    }

"""Names of files as a checkpoint's index gives them: never believed before they are looked at."""

from __future__ import annotations

from pathlib import Path

from phalanx.tools.ckpt.errors import BadCheckpoint, shown


def beside(index: Path, folder: Path, name: object) -> Path:
    """The file `name` in `folder`.

    Raises:
        BadCheckpoint: The name leads elsewhere, by itself or through a link.
    """
    if not isinstance(name, str) or not name or "\x00" in name or len(name) > 4096:
        raise BadCheckpoint(index, "a name of a file in it makes no sense.")
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts:
        raise BadCheckpoint(
            index, f"names {shown(name)!r}, which is outside the folder. Nothing of it was read."
        )
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()) and not _linked_store(path, folder):
        raise BadCheckpoint(
            index, f"names {shown(name)!r}, a link to outside the folder. Nothing of it was read."
        )
    return path


def _linked_store(path: Path, folder: Path) -> bool:
    """Hugging Face's cache keeps ``snapshots/<revision>/file`` as a link to ``blobs/<hash>`` beside `snapshots`."""
    blobs = folder.resolve().parent.parent / "blobs"
    return folder.resolve().parent.name == "snapshots" and path.resolve().parent == blobs

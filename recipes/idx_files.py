"""The IDX files of MNIST and its relatives: where they lie and what they hold. No torch."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.recipes.settings import SettingsError

Bytes = npt.NDArray[np.uint8]

#: The four files of a data set, as torchvision and Debian name them.
FILE_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_UNSIGNED_BYTE = 0x08


@dataclass(frozen=True)
class IdxSet:
    """Images ``[items, rows, columns]`` and labels ``[items]`` of both halves, and the folder they came from."""

    folder: Path
    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes


def emnist_file_names(split: str) -> tuple[str, ...]:
    """The four files of one of EMNIST's splits, in the order of `FILE_NAMES`.

    >>> emnist_file_names("letters")[2]
    'emnist-letters-test-images-idx3-ubyte'
    """
    return tuple(f"emnist-{split}-{name.replace('t10k', 'test')}" for name in FILE_NAMES)


def find_idx_files(
    folders: Sequence[Path], name: str, file_names: Sequence[str] = FILE_NAMES
) -> dict[str, Path] | None:
    """The four files, packed or not, in the first folder that holds any of them.

    Args:
        folders: Folders to look in, in order.
        name: The data set, for the message.
        file_names: What this data set calls them, in the order of `FILE_NAMES`.

    Returns:
        Paths by the names in `FILE_NAMES`, or None when no folder holds a single one.

    Raises:
        SettingsError: The folder that was found lacks some of the four.
    """
    for folder in folders:
        found = {
            role: path
            for role, file_name in zip(FILE_NAMES, file_names, strict=True)
            if (path := _find(folder, file_name)) is not None
        }
        if len(found) == len(FILE_NAMES):
            return found
        if found:
            missing = [
                file_name for role, file_name in zip(FILE_NAMES, file_names, strict=True) if role not in found
            ]
            raise SettingsError(
                f"The folder {folder} holds {_listed(path.name for path in found.values())}, "
                f"but lacks {_listed(missing)} (as it is, or packed as .gz).\n"
                f"Without {'it' if len(missing) == 1 else 'them'} there is no {name} to train and test on.\n"
                f"Fix: put the missing files there, or let --download fetch all of them"
            )
    return None


def _find(folder: Path, file_name: str) -> Path | None:
    """``train-images-idx3-ubyte``, ``train-images.idx3-ubyte`` (as some archives unpack), either as .gz."""
    for spelling in (file_name, file_name.replace("-idx", ".idx")):
        for suffix in ("", ".gz"):
            path = folder / (spelling + suffix)
            if path.is_file():
                return path
    return None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def load_idx_set(files: dict[str, Path]) -> IdxSet:
    """Read and check the four files that `find_idx_files` found.

    Raises:
        SettingsError: A file is damaged, or images and labels do not belong together.
    """
    train_images, train_labels, test_images, test_labels = (read_idx(files[name]) for name in FILE_NAMES)
    for images, labels, images_name, labels_name in (
        (train_images, train_labels, FILE_NAMES[0], FILE_NAMES[1]),
        (test_images, test_labels, FILE_NAMES[2], FILE_NAMES[3]),
    ):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or len(images) == 0:
            raise SettingsError(
                f"{files[images_name]} has shape {images.shape} and {files[labels_name]} {labels.shape}: "
                "images [n, rows, columns] and labels [n] with one n above 0 are needed.\n"
                "Training would pair images with labels of others.\nFix: fetch both files anew (--download)"
            )
    if train_images.shape[1:] != test_images.shape[1:]:
        raise SettingsError(
            f"{files[FILE_NAMES[0]]} holds images of {train_images.shape[1:]}, {files[FILE_NAMES[2]]} of "
            f"{test_images.shape[1:]}: no network takes both.\nFix: fetch the four files anew (--download)"
        )
    return IdxSet(files[FILE_NAMES[0]].parent, train_images, train_labels, test_images, test_labels)


def read_idx(path: Path) -> Bytes:
    """The array of an IDX file of unsigned bytes, packed (``.gz``) or not.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions, their sizes as
    big-endian 32-bit integers, then the values, the last dimension changing fastest.

    Raises:
        SettingsError: The file cannot be read, is no such file, or is cut short or too long.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        raise _damaged(path, f"cannot be read: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE or not 1 <= content[3] <= 4:
        raise _damaged(
            path, f"starts with {content[:4].hex(' ') or 'nothing'}, not with 00 00 08 and a dimension count"
        )
    start = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    expected = start + math.prod(shape)
    if len(content) != expected:
        what = "is cut short" if len(content) < expected else "is too long"
        raise _damaged(path, f"{what}: {len(content)} bytes where its header {shape} asks for {expected}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _damaged(path: Path, what: str) -> SettingsError:
    return SettingsError(f"The data file {path} {what}.\nFix: remove it and fetch it anew (--download)")


def write_idx(path: Path, array: npt.NDArray[Any]) -> None:
    """Write unsigned bytes as `read_idx` reads them; packed when the name ends in ``.gz``."""
    values = np.ascontiguousarray(array, dtype=np.uint8)
    header = bytes((0, 0, _UNSIGNED_BYTE, values.ndim)) + b"".join(
        size.to_bytes(4, "big") for size in values.shape
    )
    content = header + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)

"""CIFAR-10 and CIFAR-100 as torchvision lays them out: pickled batches, read without running what a pickle may bring."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from phalanx.recipes.datasets import locked, torchvision_for
from phalanx.recipes.settings import SettingsError

SIDE = 32


@dataclass(frozen=True)
class Layout:
    """Where one of the two sets keeps what."""

    torchvision_name: str
    folder: str
    train: tuple[str, ...]
    test: str
    labels: str  # entry of a batch
    names_file: str
    names: str  # entry of that file
    classes: int


LAYOUTS = {
    "cifar10": Layout(
        "CIFAR10", "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "labels",
        "batches.meta", "label_names", 10,
    ),
    "cifar100": Layout(
        "CIFAR100", "cifar-100-python", ("train",), "test", "fine_labels", "meta", "fine_label_names", 100
    ),
}  # fmt: skip

# All that the batches' pickles name, under numpy's old and new places.
_KNOWN = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR file does")
        return super().find_class(
            module.replace("numpy.core.", "numpy._core.") if _NEW_NUMPY else module, name
        )


_NEW_NUMPY = int(np.__version__.split(".")[0]) >= 2


@dataclass(frozen=True)
class CifarFiles:
    """What the files hold: images uint8 [n, 3, 32, 32], labels int64 [n], and the classes' names."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    class_names: tuple[str, ...]
    folder: Path


def find(name: str, data_dir: Path) -> Path | None:
    """The folder of that set under ``data_dir``, or ``data_dir`` itself when the batches lie there."""
    layout = LAYOUTS[name]
    for folder in (data_dir / layout.folder, data_dir):
        if all((folder / file).is_file() for file in (*layout.train, layout.test)):
            return folder
    return None


def read(name: str, data_dir: Path) -> CifarFiles:
    """All of a set.

    Raises:
        SettingsError: Files are missing, or hold something else.
    """
    layout, folder = LAYOUTS[name], find(name, data_dir)
    if folder is None:
        raise SettingsError(
            f"--data {name}: the files {', '.join((*layout.train, layout.test))} are neither in "
            f"{data_dir / layout.folder} nor in {data_dir}.\nThere is nothing to train on.\n"
            "Fix: --download, or --data-dir FOLDER where they lie, or --data fake, which needs no files"
        )
    parts = [_batch(folder / file, layout) for file in layout.train]
    test_images, test_labels = _batch(folder / layout.test, layout)
    return CifarFiles(
        torch.cat([images for images, _ in parts]),
        torch.cat([labels for _, labels in parts]),
        test_images,
        test_labels,
        _names(folder / layout.names_file, layout),
        folder,
    )


def _batch(path: Path, layout: Layout) -> tuple[Tensor, Tensor]:
    content = _unpickled(path)
    try:
        images = np.asarray(content["data"])
        labels = np.asarray(content[layout.labels], dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"it has no data and {layout.labels} as CIFAR's batches do ({error})") from None
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3 * SIDE * SIDE or labels.ndim != 1:
        raise _damaged(path, f"its data are {images.dtype} {images.shape}; bytes, 3072 a row, are needed")
    if len(images) != len(labels) or len(images) == 0:
        raise _damaged(path, f"it has {len(images)} images and {len(labels)} labels")
    if labels.min() < 0 or labels.max() >= layout.classes:
        raise _damaged(
            path, f"it has labels from {labels.min()} to {labels.max()}; 0 to {layout.classes - 1} are known"
        )
    return torch.from_numpy(images.reshape(-1, 3, SIDE, SIDE).copy()), torch.from_numpy(labels)


def _names(path: Path, layout: Layout) -> tuple[str, ...]:
    """The classes' names; their numbers where that file did not come along."""
    names = _unpickled(path).get(layout.names, ()) if path.is_file() else ()
    if len(names) != layout.classes:
        return tuple(str(number) for number in range(layout.classes))
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def _unpickled(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _load(file)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # an unpickler meets a damaged file with nearly every exception there is
        raise _damaged(path, str(error) or type(error).__name__) from error
    if not isinstance(content, dict):
        raise _damaged(path, f"it holds a {type(content).__name__}")
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}


def _load(file: IO[bytes]) -> Any:
    return _PlainUnpickler(file, encoding="latin1").load()  # written by Python 2


def _damaged(path: Path, problem: str) -> SettingsError:
    return SettingsError(
        f"{path} is no batch of CIFAR, or damaged: {problem}.\nFix: delete it and fetch the set again (--download)"
    )


def fetch(name: str, data_dir: Path, download: Callable[[str, Path], None] | None = None) -> None:
    """Fetch a set into torchvision's layout under ``data_dir``, unless it is there: whole or absent.

    Safe to call from several processes, hosts and jobs at once: a file lock lets one of them fetch.

    Args:
        name: cifar10 or cifar100.
        data_dir: Where to put the folder of the batches.
        download: Puts that folder under another one; torchvision's by default, which checks the files' hashes.
    """
    target = data_dir / LAYOUTS[name].folder
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with locked(data_dir / ".download.lock"):
            if find(name, data_dir) is not None:
                return
            with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as folder:
                (download or _torchvision_download)(name, Path(folder))
                if target.exists():  # a part of it, from somebody else's download
                    shutil.rmtree(target)
                os.replace(Path(folder) / LAYOUTS[name].folder, target)
    except OSError as error:  # also what urllib raises without a network
        raise SettingsError(
            f"--download: {LAYOUTS[name].torchvision_name} could not be fetched into {data_dir}: {error}\n"
            f"Fix: fetch and unpack its archive on a machine that reaches it, put {LAYOUTS[name].folder} into "
            f"{data_dir}, and leave out --download"
        ) from error


def _torchvision_download(name: str, folder: Path) -> None:
    try:
        from torchvision import datasets
    except ImportError:
        raise SettingsError(
            "--download: torchvision, which knows where the files are, is not installed.\n"
            f"Fix: pip install {torchvision_for(torch.__version__)}, or --data fake, which needs no download"
        ) from None
    try:
        getattr(datasets, LAYOUTS[name].torchvision_name)(folder, download=True)
    except RuntimeError as error:  # torchvision's word for "no mirror answered", or a wrong checksum
        raise OSError(str(error)) from error

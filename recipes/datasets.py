"""The image sets of the recipes: digits that come along, IDX files on disk, downloads, and made-up ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import string
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.dist import gather_objects, rank_zero_first
from phalanx.dist.world import RankZeroFailed
from phalanx.recipes.augmentations import RandomAffine, RandomShift
from phalanx.recipes.idx_files import FILE_NAMES, emnist_file_names, find_idx_files, load_idx_set
from phalanx.recipes.settings import SettingsError

DIGITS_FILE = Path(__file__).parent / "data" / "digits.npz"
DIGITS_TEST_ITEMS = 360  # the last rows: a writer's digits stand together, a random split would mix them

T = TypeVar("T")

#: EMNIST's files are of many splits; ours are named ``emnist-<split>``.
EMNIST = "emnist-"
#: In 47 classes a letter whose two forms look alike has one class, named by the capital.
_MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
_EMNIST_CLASSES = {
    "letters": string.ascii_lowercase,  # both cases in one
    "balanced": _MERGED,
    "bymerge": _MERGED,
    "byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
    "digits": string.digits,
    "mnist": string.digits,
}
#: The names of each set's classes, in the order of the labels.
CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "mnist": tuple(string.digits),
    "fashion": tuple(string.digits),
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    **{EMNIST + split: tuple(names) for split, names in _EMNIST_CLASSES.items()},
}
#: torchvision's class and folder for each set of IDX files.
TORCHVISION_NAMES = {
    "mnist": "MNIST",
    "fashion": "FashionMNIST",
    "kmnist": "KMNIST",
    **{EMNIST + split: "EMNIST" for split in _EMNIST_CLASSES},
}
#: Where distributions put them: Debian's package dataset-fashion-mnist.
WELL_KNOWN_FOLDERS = {"fashion": (Path("/usr/share/datasets/fashion-mnist"),)}


class ImageTensors(Dataset[Any]):
    """Images held as bytes, handed out as normalised floats; a whole batch is gathered at once.

    Made for ``collate_fn=whole_batch``: ``dataset.__getitems__([3, 1])`` is ``(images [2, 1, rows,
    columns], labels [2])`` already.
    """

    def __init__(self, images: Tensor, labels: Tensor, mean: float, std: float) -> None:
        self.images, self.labels = images, labels  # uint8 [n, 1, rows, columns], int64 [n]
        self.mean, self.std = mean, std  # of values in 0..1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._normalised(self.images[index]), self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices)
        return self._normalised(self.images[rows]), self.labels[rows]

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().sub_(255 * self.mean).div_(255 * self.std)


def whole_batch(batch: Any) -> Any:
    """The ``collate_fn`` for a dataset that fetches whole batches: they are complete."""
    return batch


class AugmentedImages(Dataset[Any]):
    """`ImageTensors` with a random change per sample; the loader reseeds the generators for each of them."""

    def __init__(self, images: ImageTensors, augment: Callable[[Tensor], Tensor]) -> None:
        self.images, self.augment = images, augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        return self.augment(image), label


def augmented(images: ImageTensors, augment: str) -> tuple[Dataset[Any], Callable[[Any], Any] | None]:
    """The training set and its ``collate_fn``: whole batches as they are, or samples changed one by one.

    Args:
        images: The training images.
        augment: none, shift (a pixel, or two from 28 on) or affine.
    """
    if augment == "none":
        return images, whole_batch
    small = images.images.shape[-1] <= 8
    change = RandomShift(1 if small else 2) if augment == "shift" else RandomAffine()
    return AugmentedImages(images, change), None


@dataclass(frozen=True)
class ImageSets:
    """The three parts of a data set, split by a seed that all ranks share."""

    train: ImageTensors
    validation: ImageTensors
    test: ImageTensors
    classes: int
    side: int  # rows and columns of an image
    source: str  # where it came from, for the user
    names: tuple[str, ...]  # of the classes

    def described(self) -> str:
        """One line for the user."""
        held_out = f", {len(self.validation)} held out" if len(self.validation) else ""
        return f"{self.source}: {len(self.train)} images to train on{held_out}, {len(self.test)} to test"


def locate(data: str, data_dir: str, download: bool = False) -> str:
    """What ``--data`` stands for here: ``auto`` is MNIST where it is on disk or about to be, else the digits.

    Collective: hosts that would train on different data are an error on every rank.
    """
    if data != "auto":
        return data
    if download:
        return "mnist"
    here = everywhere(lambda: find_idx_files(_folders("mnist", data_dir), "MNIST") is not None)
    answers = gather_objects((socket.gethostname(), here))
    having, lacking = (
        {host for host, found in answers if found},
        {host for host, found in answers if not found},
    )
    if having and lacking:
        raise SettingsError(
            f"--data auto: {_listed(having)} has MNIST under {data_dir}, {_listed(lacking)} has not: "
            "ranks would train on different data.\nFix: --data digits, or --data mnist --download"
        )
    return "mnist" if having else "digits"


def load(name: str, data_dir: str, download: bool, validation_fraction: float, seed: int) -> ImageSets:
    """The data set of that name, split, with the training part's mean and deviation for all three.

    Collective: ranks of one node wait while one of them downloads, and a rank that finds no data is
    an error on all of them that names its host.

    Args:
        name: digits, fake, or one of `TORCHVISION_NAMES`.
        data_dir: Folder to look in, and to download to.
        download: Fetch what is missing.
        validation_fraction: Share of the training images that is held out, at least 0, below 1.
        seed: Of the choice of those.

    Raises:
        SettingsError: Files are missing or damaged.
    """
    if name == "digits":
        arrays, source = _digits(), "the UCI handwritten digits that come with phalanx"
    elif name == "fake":
        arrays, source = _fake(), "made-up images"
    else:
        arrays, source = everywhere(lambda: from_files(name, data_dir, download))
    train_images, train_labels, test_images, test_labels = arrays
    shuffled = torch.randperm(len(train_images), generator=torch.Generator().manual_seed(seed))
    held_out = round(validation_fraction * len(train_images))
    validation_rows, train_rows = shuffled[:held_out].sort().values, shuffled[held_out:].sort().values
    if len(train_rows) == 0:
        raise SettingsError(
            f"--validation-fraction {validation_fraction} leaves nothing to train on.\nFix: a smaller one"
        )
    mean, std = _mean_and_std(train_images[train_rows])
    names = CLASS_NAMES.get(name, tuple(string.digits))

    def part(images: Tensor, labels: Tensor) -> ImageTensors:
        return ImageTensors(images[:, None], labels, mean, std)

    return ImageSets(
        train=part(train_images[train_rows], train_labels[train_rows]),
        validation=part(train_images[validation_rows], train_labels[validation_rows]),
        test=part(test_images, test_labels),
        classes=len(names),
        side=train_images.shape[-1],
        source=source,
        names=names,
    )


Arrays = tuple[Tensor, Tensor, Tensor, Tensor]  # training images and labels, test images and labels


def _mean_and_std(images: Tensor) -> tuple[float, float]:
    """Of bytes as values in 0..1; from exact sums, so that every rank has the same bits."""
    counts = torch.bincount(images.flatten(), minlength=256).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = float((counts * values).sum() / counts.sum())
    variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
    return mean, max(variance**0.5, 1e-6)


def _digits() -> Arrays:
    """1,797 images of 8 x 8, values 0 to 16."""
    with np.load(DIGITS_FILE) as file:
        images = torch.from_numpy((file["images"].astype(np.uint16) * 255 // 16).astype(np.uint8))
        labels = torch.from_numpy(file["labels"].astype(np.int64))
    cut = len(images) - DIGITS_TEST_ITEMS
    return images[:cut], labels[:cut], images[cut:], labels[cut:]


def _fake(train_items: int = 2048, test_items: int = 512, side: int = 28, classes: int = 10) -> Arrays:
    """Ten fixed patterns under noise: quick to learn, the same on every machine, of no other use."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 156, (classes, side, side), generator=generator)
    labels = torch.randint(0, classes, (train_items + test_items,), generator=generator)
    noise = torch.randint(0, 100, (train_items + test_items, side, side), generator=generator)
    images = (patterns[labels] + noise).to(torch.uint8)
    return images[:train_items], labels[:train_items], images[train_items:], labels[train_items:]


def _folders(name: str, data_dir: str) -> list[Path]:
    """Where the files of a set may lie: flat, or as torchvision lays them out."""
    root, inner = Path(data_dir), TORCHVISION_NAMES[name]
    # A folder that holds another set's files in torchvision's layout is none of this one.
    folders = [root / inner / "raw", root / inner, root / "raw", root]
    if inner == "EMNIST":
        folders.append(root / "gzip")  # as its archive unpacks
    return [*folders, *WELL_KNOWN_FOLDERS.get(name, ())]


def _file_names(name: str) -> tuple[str, ...]:
    return emnist_file_names(name.removeprefix(EMNIST)) if name.startswith(EMNIST) else FILE_NAMES


def from_files(name: str, data_dir: str, download: bool) -> tuple[Arrays, str]:
    """Images [n, rows, columns] and labels of IDX files, and where they lie. Collective with ``download``.

    EMNIST's images lie on their side in its files, and the labels of its letters begin at 1: both are put right.
    """
    if download:
        with rank_zero_first(per="node"):
            fetch(name, Path(data_dir))
    shown = TORCHVISION_NAMES[name] + (f" {name.removeprefix(EMNIST)}" if name.startswith(EMNIST) else "")
    folders = _folders(name, data_dir)
    files = find_idx_files(folders, shown, _file_names(name))
    if files is None:
        raise SettingsError(
            f"--data {name}: the files of {shown}, {', '.join(_file_names(name))} (as they are, or packed as .gz) "
            f"are in none of {', '.join(map(str, folders))}.\n"
            f"There is nothing to train on.\n"
            f"Fix: --download, or --data-dir FOLDER where they lie, or --data digits, which needs no files"
        )
    found = load_idx_set(files)
    first = 1 if name == EMNIST + "letters" else 0
    last = first + len(CLASS_NAMES[name]) - 1
    for labels in (found.train_labels, found.test_labels):
        if labels.max() > last or labels.min() < first:
            wrong = labels.max() if labels.max() > last else labels.min()
            raise SettingsError(f"{found.folder} has a label {wrong}; {shown} has {first} to {last}.")

    def images(array: Any) -> Tensor:
        if name.startswith(EMNIST):
            array = array.transpose(0, 2, 1)
        return torch.from_numpy(array.copy())  # a file's bytes are read-only, which torch has no word for

    def classes(array: Any) -> Tensor:
        return torch.from_numpy(array.copy()).long() - first

    arrays = (
        images(found.train_images),
        classes(found.train_labels),
        images(found.test_images),
        classes(found.test_labels),
    )
    return arrays, f"{shown} in {found.folder}"


def everywhere(make: Callable[[], T]) -> T:
    """``make()`` on every rank; a SettingsError anywhere is one on every rank, naming the hosts."""
    value, problem, waited = None, "", False
    try:
        value = make()
    except SettingsError as error:
        problem = str(error)
    except RankZeroFailed as error:  # the rank that this one waited for has the better message
        problem, waited = str(error), True
    answers = gather_objects((socket.gethostname(), problem, waited))
    first_hand = {host: text for host, text, waited in answers if text and not waited}
    problems = first_hand or {host: text for host, text, _ in answers if text}
    if problems:
        text = next(iter(problems.values()))
        several = len({host for host, *_ in answers}) > 1
        raise SettingsError(f"On {_listed(problems)}: {text}" if several else text)
    made: T = value  # type: ignore[assignment]  # without a problem there is a value
    return made


def _listed(hosts: Iterable[str]) -> str:
    return ", ".join(sorted(hosts))


def fetch(name: str, data_dir: Path, download: Callable[[str, Path], None] | None = None) -> None:
    """Fetch a data set's files into torchvision's layout under ``data_dir``, unless they are there.

    Whole or absent: files arrive in a folder of their own and are renamed when all have come. Safe
    to call from several processes, hosts and jobs at once: a file lock lets one of them fetch.

    Args:
        name: One of `TORCHVISION_NAMES`. EMNIST comes with all of its splits.
        data_dir: Where to put ``MNIST/raw``, ``FashionMNIST/raw``, ...
        download: Puts torchvision's layout under a folder; torchvision's own by default.
    """
    target = data_dir / TORCHVISION_NAMES[name] / "raw"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with locked(data_dir / ".download.lock"):
            if all((target / file_name).is_file() for file_name in _file_names(name)):
                return
            with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as folder:
                (download or _torchvision_download)(name, Path(folder))
                came = Path(folder) / TORCHVISION_NAMES[name] / "raw"
                for file_name in _file_names(name):
                    (came / file_name).stat()  # all of them before the first is put in place
                target.mkdir(parents=True, exist_ok=True)
                for file in came.glob("*-ubyte"):
                    os.replace(file, target / file.name)
    except OSError as error:  # also what urllib raises without a network
        raise SettingsError(_download_failed(name, data_dir, error)) from error


def _download_failed(name: str, data_dir: Path, error: Exception) -> str:
    files = "archive gzip.zip" if name.startswith(EMNIST) else "four .gz files"
    put = "unpack it in" if name.startswith(EMNIST) else "put them into"
    return (
        f"--download: {TORCHVISION_NAMES[name]} could not be fetched into {data_dir}: {error}\n"
        f"Fix: fetch its {files} on a machine that reaches them, {put} {data_dir}, and leave out --download"
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold this file's lock: of all processes that want it, one at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def torchvision_for(torch_version: str) -> str:
    """What to ask pip for beside this torch: each torchvision pins one torch, and any other replaces it.

    torch 2.N goes with torchvision 0.(N + 15): https://github.com/pytorch/vision#installation
    """
    major, minor = torch_version.split(".")[:2]
    return f"'torchvision==0.{int(minor) + 15}.*'" if major == "2" else "'phalanx[torchvision]'"


def _torchvision_download(name: str, folder: Path) -> None:
    try:
        from torchvision import datasets
    except ImportError:
        raise SettingsError(
            "--download: torchvision, which knows where the files are, is not installed.\n"
            f"Fix: pip install {torchvision_for(torch.__version__)}, or --data digits, which needs no download"
        ) from None
    split = {"split": name.removeprefix(EMNIST)} if name.startswith(EMNIST) else {}
    try:
        getattr(datasets, TORCHVISION_NAMES[name])(folder, download=True, **split)
    except RuntimeError as error:  # torchvision's word for "no mirror answered", or a wrong checksum
        raise OSError(str(error)) from error

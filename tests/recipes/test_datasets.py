"""Data sets: whole, split alike on every rank, downloaded once, and what is missing is said on all ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # torchvision imports it, and that sets a variable in the environment

from phalanx.recipes import datasets
from phalanx.recipes.idx_files import FILE_NAMES, emnist_file_names, write_idx
from phalanx.recipes.settings import SettingsError
from tests.ranks import RankRunner


def write_images(folder: Path, items: int = 40, suffix: str = "") -> None:
    """A small set in MNIST's format."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for name in FILE_NAMES:
        count = items if name.startswith("train") else items // 4
        shape = (count,) if "labels" in name else (count, 28, 28)
        write_idx(folder / (name + suffix), random.integers(0, 10 if "labels" in name else 256, shape))


def write_emnist(folder: Path, split: str, labels: range, suffix: str = "") -> np.ndarray[Any, Any]:
    """A split in EMNIST's format: two images a class, each on its side; the training images as they should stand."""
    folder.mkdir(parents=True, exist_ok=True)
    upright = np.random.default_rng(0).integers(0, 256, (2 * len(labels), 28, 28), np.uint8)
    for name in emnist_file_names(split):
        values = np.tile(labels, 2) if "labels" in name else upright.transpose(0, 2, 1)
        write_idx(folder / (name + suffix), values)
    return upright


def test_digits_are_split_by_rows_and_seed() -> None:
    sets = datasets.load("digits", "nowhere", False, 0.1, seed=0)
    assert (len(sets.train), len(sets.validation), len(sets.test)) == (1293, 144, 360)
    assert (sets.classes, sets.side) == (10, 8)
    with np.load(datasets.DIGITS_FILE) as file:
        assert sets.test.labels.tolist() == file["labels"][-360:].tolist()
    held_out = datasets.load("digits", "nowhere", False, 0.1, seed=0).validation
    assert torch.equal(held_out.images, sets.validation.images)
    assert not torch.equal(
        datasets.load("digits", "nowhere", False, 0.1, seed=1).validation.images, held_out.images
    )
    whole = torch.cat([sets.train.images, sets.validation.images])
    assert len(torch.unique(whole, dim=0)) == len(
        torch.unique(datasets.load("digits", "", False, 0, 0).train.images, dim=0)
    )


def test_training_images_have_mean_0_and_deviation_1() -> None:
    train = datasets.load("digits", "nowhere", False, 0.1, seed=0).train
    images, _ = train.__getitems__(list(range(len(train))))
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std().item() == pytest.approx(1, abs=1e-3)


def test_a_whole_batch_is_its_samples() -> None:
    train = datasets.load("fake", "nowhere", False, 0.1, seed=0).train
    images, labels = datasets.whole_batch(train.__getitems__([5, 0, 5]))
    assert images.shape == (3, 1, 28, 28)
    for row, index in enumerate((5, 0, 5)):
        assert torch.equal(images[row], train[index][0])
        assert labels[row] == train[index][1]


@pytest.mark.parametrize("inner", ["", "raw", "MNIST/raw", "MNIST"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_are_found_in_every_layout(tmp_path: Path, inner: str, suffix: str) -> None:
    write_images(tmp_path / inner, suffix=suffix)
    assert datasets.locate("auto", str(tmp_path)) == "mnist"
    sets = datasets.load("mnist", str(tmp_path), False, 0.1, seed=0)
    assert (len(sets.train), len(sets.validation), len(sets.test), sets.side) == (36, 4, 10, 28)
    assert str(tmp_path / inner) in sets.source


def test_auto_means_digits_where_no_mnist_is(tmp_path: Path) -> None:
    write_images(tmp_path / "FashionMNIST" / "raw")
    assert datasets.locate("auto", str(tmp_path)) == "digits"
    assert datasets.locate("auto", str(tmp_path), download=True) == "mnist"
    assert datasets.locate("fashion", str(tmp_path)) == "fashion"
    assert "UCI" in datasets.load("digits", str(tmp_path), False, 0.1, 0).source


@pytest.mark.parametrize(
    ("split", "labels", "classes"),
    [
        ("letters", range(1, 27), "a b z"),
        ("balanced", range(47), "0 1 t"),
        ("bymerge", range(47), "0 1 t"),
        ("byclass", range(62), "0 1 z"),
        ("digits", range(10), "0 1 9"),
        ("mnist", range(10), "0 1 9"),
    ],
)
def test_emnist_stands_upright_and_its_labels_begin_at_0(
    tmp_path: Path, split: str, labels: range, classes: str
) -> None:
    upright = write_emnist(tmp_path / "EMNIST" / "raw", split, labels)
    sets = datasets.load(f"emnist-{split}", str(tmp_path), False, 0, seed=0)
    assert sets.classes == len(labels)
    assert [sets.names[0], sets.names[1], sets.names[-1]] == classes.split()
    assert torch.equal(sets.train.images[:, 0], torch.from_numpy(upright))
    assert sets.train.labels.tolist() == sets.test.labels.tolist() == [*range(len(labels))] * 2
    assert f"EMNIST {split} in {tmp_path}" in sets.source


def test_the_names_of_emnists_classes_are_torchvisions() -> None:
    known = pytest.importorskip("torchvision").datasets.EMNIST.classes_split_dict
    assert set(known) == {name.removeprefix("emnist-") for name in datasets.CLASS_NAMES if "emnist-" in name}
    for split, names in known.items():
        assert list(datasets.CLASS_NAMES[f"emnist-{split}"]) == [name for name in names if name != "N/A"]
    assert list(datasets.CLASS_NAMES["kmnist"]) == pytest.importorskip("torchvision").datasets.KMNIST.classes


@pytest.mark.parametrize("inner", ["", "raw", "EMNIST/raw", "gzip"])
def test_emnist_is_found_in_every_layout(tmp_path: Path, inner: str) -> None:
    write_emnist(tmp_path / inner, "digits", range(10), suffix=".gz")
    assert len(datasets.load("emnist-digits", str(tmp_path), False, 0.1, 0).train) == 18
    with pytest.raises(SettingsError, match=r"EMNIST letters[\s\S]*emnist-letters-train-images[\s\S]*Fix:"):
        datasets.load("emnist-letters", str(tmp_path), False, 0.1, 0)


@pytest.mark.parametrize(("first", "wrong"), [(0, "label 0"), (2, "label 27")])
def test_a_label_that_is_no_letter_is_refused(tmp_path: Path, first: int, wrong: str) -> None:
    write_emnist(tmp_path, "letters", range(first, first + 26))
    with pytest.raises(SettingsError, match=f"{wrong}; EMNIST letters has 1 to 26"):
        datasets.load("emnist-letters", str(tmp_path), False, 0.1, 0)


def test_kmnist_is_read_from_its_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "KMNIST" / "raw")
    sets = datasets.load("kmnist", str(tmp_path), False, 0.1, 0)
    assert (len(sets.train), sets.names[0], sets.names[-1]) == (36, "o", "wo")
    with pytest.raises(SettingsError, match="the files of MNIST, "):
        datasets.load("mnist", str(tmp_path), False, 0.1, 0)


def test_one_download_of_emnist_serves_every_split(tmp_path: Path) -> None:
    count = 0

    def download(name: str, folder: Path) -> None:
        nonlocal count
        count += 1
        for split, labels in (("letters", range(1, 27)), ("digits", range(10))):
            write_emnist(folder / "EMNIST" / "raw", split, labels)

    for split, classes in (("letters", 26), ("digits", 10)):
        datasets.fetch(f"emnist-{split}", tmp_path, download)
        assert datasets.load(f"emnist-{split}", str(tmp_path), False, 0.1, 0).classes == classes
    assert count == 1
    with pytest.raises(SettingsError, match=r"emnist-balanced-train[\s\S]*gzip.zip"):
        datasets.fetch("emnist-balanced", tmp_path, download)  # what came lacks it


def test_missing_files_say_where_and_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        datasets.load("mnist", str(tmp_path), False, 0.1, 0)
    text = str(caught.value)
    for word in ("train-images-idx3-ubyte", str(tmp_path / "MNIST" / "raw"), "--download", "--data-dir"):
        assert word in text


def test_nothing_left_to_train_on_is_refused() -> None:
    with pytest.raises(SettingsError, match="leaves nothing"):
        datasets.load("digits", "nowhere", False, 0.9999, 0)


def _slow_download(name: str, folder: Path) -> None:
    with (folder.parent / "downloads").open("a") as file:
        file.write(f"{os.getpid()}\n")
    raw = folder / datasets.TORCHVISION_NAMES[name] / "raw"
    write_images(raw)
    whole = (raw / FILE_NAMES[3]).read_bytes()
    (raw / FILE_NAMES[3]).write_bytes(whole[:9])  # half a file for a while
    time.sleep(0.5)
    (raw / FILE_NAMES[3]).write_bytes(whole)


def _download_on_each_rank(rank: int, world_size: int, folder: str, together: bool) -> tuple[int, int]:
    from phalanx.dist import init_world

    if together:
        init_world()
    datasets._torchvision_download = _slow_download
    if together:
        sets = datasets.load("mnist", folder, True, 0.1, 0)
        return len(sets.train), len(sets.test)
    datasets.fetch("mnist", Path(folder))  # as four jobs that know nothing of each other
    sets = datasets.load("mnist", folder, False, 0.1, 0)
    return len(sets.train), len(sets.test)


@pytest.mark.parametrize("together", [True, False])
def test_four_ranks_download_once_and_all_read_whole_files(
    run_ranks: RankRunner, tmp_path: Path, together: bool
) -> None:
    folder = tmp_path / "data"
    backend = "gloo" if together else None
    found = run_ranks(_download_on_each_rank, str(folder), together, world_size=4, backend=backend)
    assert found == [(36, 10)] * 4
    assert len((folder / "downloads").read_text().split()) == 1
    assert {path.name for path in folder.iterdir()} == {"MNIST", "downloads", ".download.lock"}


def test_a_download_that_breaks_leaves_no_half_file(tmp_path: Path) -> None:
    def broken(name: str, folder: Path) -> None:
        write_images(folder / "MNIST" / "raw")
        raise OSError("the network went away")

    with pytest.raises(SettingsError, match=r"the network went away[\s\S]*Fix:"):
        datasets.fetch("mnist", tmp_path, broken)
    assert {path.name for path in tmp_path.iterdir()} == {".download.lock"}
    with pytest.raises(SettingsError, match="in none of"):
        datasets.load("mnist", str(tmp_path), False, 0.1, 0)


def _load_where_one_host_lacks_data(rank: int, world_size: int, folder: str, data: str) -> str:
    import socket

    from phalanx.dist import init_world

    init_world()
    socket.gethostname = lambda: f"host{rank}"
    os.chdir(f"{folder}/{rank}")
    try:
        datasets.load(datasets.locate(data, "data"), "data", False, 0.1, 0)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("data", ["mnist", "auto"])
def test_every_rank_names_the_host_that_lacks_data(run_ranks: RankRunner, tmp_path: Path, data: str) -> None:
    write_images(tmp_path / "0" / "data")
    (tmp_path / "1").mkdir()
    messages = run_ranks(_load_where_one_host_lacks_data, str(tmp_path), data, world_size=2)
    assert len(set(messages)) == 1
    assert "host1" in messages[0]
    assert ("host0" in messages[0]) == (data == "auto")


def test_made_up_images_are_the_same_everywhere() -> None:
    first, second = (datasets.load("fake", "nowhere", False, 0.1, 0) for _ in range(2))
    assert torch.equal(first.train.images, second.train.images)
    assert first.train.labels[:8].tolist() == second.train.labels[:8].tolist()


@pytest.mark.parametrize(
    ("torch_version", "expected"),
    [("2.6.0", "0.21"), ("2.14.1+cu130", "0.29"), ("2.9.1a0+git", "0.24")],
)
def test_the_torchvision_that_belongs_to_this_torch_is_named(torch_version: str, expected: str) -> None:
    assert datasets.torchvision_for(torch_version) == f"'torchvision=={expected}.*'"

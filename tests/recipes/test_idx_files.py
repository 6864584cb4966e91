"""IDX files: found in every usual layout, read when whole, refused with a clear word otherwise."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from phalanx.recipes.idx_files import FILE_NAMES, find_idx_files, load_idx_set, read_idx, write_idx
from phalanx.recipes.settings import SettingsError

mnist = pytest.importorskip("torchvision.datasets.mnist")  # here: its import sets variables


def _write_set(folder: Path, suffix: str = "", side: int = 28) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.arange(6)
    for name, count in zip(FILE_NAMES, (4, 4, 2, 2), strict=True):
        values = (
            rows[:count]
            if "labels" in name
            else np.arange(count * side * side).reshape(count, side, side) % 251
        )
        write_idx(folder / (name + suffix), values)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str) -> None:
    values = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5)
    path = tmp_path / ("file" + suffix)
    write_idx(path, values)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (suffix == ".gz")
    assert np.array_equal(read_idx(path), values)


def test_torchvision_reads_the_same_file(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    write_idx(tmp_path / FILE_NAMES[0], values)
    assert np.array_equal(mnist.read_image_file(str(tmp_path / FILE_NAMES[0])).numpy(), values)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "nothing"),
        (b"\0\0\x08", "starts with"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "starts with"),  # floats
        (b"PK\x03\x04 and more", "starts with"),
        (b"\0\0\x08\x01\0\0\0\x05abc", "is cut short"),
        (b"\0\0\x08\x03\0\0\0\x05", "is cut short"),
        (b"\0\0\x08\x01\0\0\0\x02abc", "is too long"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x02ab")[:-9], "cannot be read"),
        (b"\x1f\x8b\x08 nonsense", "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=word) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert "Fix:" in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_first_folder_with_all_four_is_taken(tmp_path: Path, suffix: str) -> None:
    folders = [tmp_path / "MNIST" / "raw", tmp_path]
    assert find_idx_files(folders, "MNIST") is None
    _write_set(tmp_path, suffix)
    files = find_idx_files(folders, "MNIST")
    assert files is not None
    found = load_idx_set(files)
    assert found.folder == tmp_path
    assert found.train_images.shape == (4, 28, 28)
    assert found.test_labels.tolist() == [0, 1]
    _write_set(folders[0])
    files = find_idx_files(folders, "MNIST")
    assert files is not None
    assert load_idx_set(files).folder == folders[0]


def test_another_spelling_is_found(tmp_path: Path) -> None:
    _write_set(tmp_path)
    for name in FILE_NAMES:
        (tmp_path / name).rename(tmp_path / name.replace("-idx", ".idx"))
    assert find_idx_files([tmp_path], "MNIST") is not None


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    _write_set(tmp_path)
    (tmp_path / FILE_NAMES[1]).unlink()
    (tmp_path / FILE_NAMES[3]).unlink()
    with pytest.raises(SettingsError) as caught:
        find_idx_files([tmp_path / "raw", tmp_path], "MNIST")
    text = str(caught.value)
    assert f"lacks {FILE_NAMES[1]}, {FILE_NAMES[3]}" in text
    assert str(tmp_path) in text
    assert "--download" in text


def test_images_and_labels_must_belong_together(tmp_path: Path) -> None:
    _write_set(tmp_path)
    write_idx(tmp_path / FILE_NAMES[1], np.arange(3))
    files = find_idx_files([tmp_path], "MNIST")
    assert files is not None
    with pytest.raises(SettingsError, match=r"\(4, 28, 28\).*\(3,\)"):
        load_idx_set(files)


def test_both_halves_have_one_image_size(tmp_path: Path) -> None:
    _write_set(tmp_path)
    write_idx(tmp_path / FILE_NAMES[2], np.zeros((2, 8, 8)))
    files = find_idx_files([tmp_path], "MNIST")
    assert files is not None
    with pytest.raises(SettingsError, match="no network takes both"):
        load_idx_set(files)

"""CIFAR's files: what they hold, and that neither damage nor a pickle with code in it gets through."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.recipes import cifar_files
from phalanx.recipes.settings import SettingsError
from tests.recipes.test_cifar import write_cifar


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_torchvision_reads_is_read(tmp_path: Path, name: str, protocol: int) -> None:
    folder = write_cifar(tmp_path, name, items=3, protocol=protocol)
    layout = cifar_files.LAYOUTS[name]
    found = cifar_files.read(name, tmp_path)
    assert found.folder == folder
    assert found.train_images.shape == (3 * len(layout.train), 3, 32, 32)
    assert found.train_images.dtype == torch.uint8
    assert found.class_names[1] == "class 1"
    with (folder / layout.test).open("rb") as file:
        content = pickle.load(file)
    assert found.test_images.flatten(1).tolist() == content["data"].tolist()
    assert found.test_labels.tolist() == content[layout.labels]
    assert cifar_files.read(name, folder).test_labels.tolist() == content[layout.labels]


class _Command:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"labels": [0]}),
        pickle.dumps({"data": "text", "labels": [0]}),
        pickle.dumps({"data": _Command(), "labels": [0]}),
    ],
)
def test_damage_and_code_are_refused(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (write_cifar(tmp_path) / "data_batch_3").write_bytes(content)
    with pytest.raises(SettingsError, match="data_batch_3 is no batch of CIFAR, or damaged"):
        cifar_files.read("cifar10", tmp_path)
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_a_label_beyond_the_classes_is_refused(tmp_path: Path) -> None:
    path = write_cifar(tmp_path) / "test_batch"
    content = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(content | {"labels": [11] * 10}))
    with pytest.raises(SettingsError, match="labels from 11 to 11"):
        cifar_files.read("cifar10", tmp_path)


def test_a_download_is_whole_or_absent(tmp_path: Path) -> None:
    calls: list[str] = []

    def broken(name: str, folder: Path) -> None:
        calls.append(name)
        (write_cifar(folder) / "test_batch").unlink()
        raise OSError("no route to host")

    with pytest.raises(SettingsError, match="CIFAR10 could not be fetched"):
        cifar_files.fetch("cifar10", tmp_path, broken)
    assert cifar_files.find("cifar10", tmp_path) is None
    cifar_files.fetch("cifar10", tmp_path, lambda name, folder: void(write_cifar(folder)))
    assert cifar_files.find("cifar10", tmp_path) == tmp_path / "cifar-10-batches-py"
    cifar_files.fetch("cifar10", tmp_path, broken)  # it is there: nothing to do
    assert calls == ["cifar10"]


def void(_: object) -> None:
    """For a callback whose value nobody wants."""

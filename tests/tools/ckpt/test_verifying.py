"""A single changed bit is found wherever the format has something to find it by."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from phalanx.dist import CheckpointManager
from phalanx.tools.ckpt import BadCheckpoint
from phalanx.tools.ckpt.verifying import verify
from tests.tools.ckpt.samples import trained, tutorial, write_all


def problems(path: Path) -> list[str]:
    try:
        return verify(path).problems
    except BadCheckpoint as error:
        return [str(error)]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << random.Random(place).randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "bare.pt", "bare.safetensors", "module.pt"])
def test_whole_files(tmp_path: Path, name: str) -> None:
    assert problems(write_all(tmp_path)[name]) == []


def test_bits_in_a_zip_file(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "a.pt"
    torch.save({f"{n}": torch.randn(40) for n in range(5)}, path)
    for record in zipfile.ZipFile(path).infolist():
        with path.open("rb") as file:
            file.seek(record.header_offset + 26)
            lengths = file.read(4)
        start = record.header_offset + 30 + lengths[0] + 256 * lengths[1] + lengths[2] + 256 * lengths[3]
        for place in range(start, start + record.file_size, 7):
            flip(path, place)
            assert problems(path), f"{record.filename} at {place}"
            flip(path, place)
    assert problems(path) == []


def test_bits_in_our_folder(tmp_path: Path) -> None:
    model, optimizer = trained()
    with CheckpointManager(tmp_path / "run", model=model, optimizer=optimizer) as manager:
        folder = manager.save()
    assert problems(folder) == []
    for path in sorted(folder.iterdir()):
        for place in range(0, path.stat().st_size, 53):
            flip(path, place)
            assert problems(folder), f"{path.name} at {place}"
            flip(path, place)
    assert problems(folder) == []


def test_bits_and_cuts_in_a_dcp_folder(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained()
    folder = tmp_path / "dcp"
    dcp.save(tutorial(model, optimizer), checkpoint_id=folder, no_dist=True)
    assert problems(folder) == []
    (path,) = folder.glob("*.distcp")
    content = path.read_bytes()
    values = content.index(model.norm.bias.detach().numpy().tobytes())
    flip(path, values)
    assert problems(folder)
    path.write_bytes(content[:-40])
    assert problems(folder)


def test_gaps_in_a_safetensors_file(tmp_path: Path) -> None:
    path = write_all(tmp_path)["bare.safetensors"]
    path.write_bytes(path.read_bytes() + b"more")
    assert problems(path) == ["4 bytes follow the last tensor"]

"""Image folders: boxes within the image, decoding that is coarse only where nobody sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.recipes.image_folder import ImageFolder, class_names, decode, erased, random_box
from phalanx.recipes.settings import SettingsError


def test_boxes_lie_within_and_cover_8_to_100_per_cent() -> None:
    torch.manual_seed(0)
    for width, height in ((500, 375), (10, 300), (1, 1)):
        for _ in range(100):
            left, upper, right, lower = random_box(width, height)
            assert 0 <= left < right <= width
            assert 0 <= upper < lower <= height
    shares = [
        (right - left) * (lower - upper) / 160_000
        for left, upper, right, lower in (random_box(400, 400) for _ in range(300))
    ]
    assert 0.07 < min(shares) < 0.2
    assert 0.8 < max(shares) <= 1


def test_coarse_decoding_is_close_to_whole_decoding(tmp_path: Path) -> None:
    from PIL import Image

    rows, columns = np.mgrid[0:600, 0:800]
    pixels = np.stack([rows * 255 // 600, columns * 255 // 800, (rows + columns) % 256 // 2], -1).astype(
        np.uint8
    )
    Image.fromarray(pixels).save(tmp_path / "a.jpg", quality=95)
    box = (100, 50, 700, 550)
    found = np.array(decode(tmp_path / "a.jpg", 64, lambda width, height: box)).astype(int)
    with Image.open(tmp_path / "a.jpg") as file:
        expected = np.array(file.resize((64, 64), Image.Resampling.BILINEAR, box=box)).astype(int)
    assert np.abs(found - expected)[..., :2].mean() < 2


def test_a_damaged_file_is_named_and_classes_must_agree(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "a.jpg").write_bytes(b"no image")
    assert class_names(tmp_path) == ("cat",)
    with pytest.raises(OSError, match=r"a\.jpg cannot be read as an image"):
        ImageFolder(tmp_path / "train", ("cat",), 8)[0]
    with pytest.raises(SettingsError, match="val has no images"):
        ImageFolder(tmp_path / "val", ("cat",), 8)
    (tmp_path / "val" / "dog").mkdir()
    with pytest.raises(SettingsError, match="other classes, dog only one"):
        class_names(tmp_path)


def test_a_blank_rectangle_lies_within_the_image() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        image = erased(torch.zeros(3, 20, 30, dtype=torch.uint8))
        share = float((image[0] == 124).float().mean())
        assert 0.005 < share < 0.45

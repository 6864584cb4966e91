"""RandAugment and TrivialAugment: operations chosen at random for each image, carried out batch by batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from phalanx.dist import augment_ops
from phalanx.dist.arguments import require_int
from phalanx.dist.augment import Parameters, check_fill, check_number, rows_to
from phalanx.dist.augment_draws import Draws

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: In this order in every table. The geometric ones stand together: one `warp` carries out all of them.
OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
_FIRST_GEOMETRIC, _AFTER_GEOMETRIC = OPERATIONS.index("shear_x"), OPERATIONS.index("brightness")
_SIGNED = 10  # operations before this one go in both directions
_ENHANCE = {"brightness", "color", "contrast", "sharpness"}
_FUNCTIONS = {
    "brightness": augment_ops.brightness,
    "color": augment_ops.color,
    "contrast": augment_ops.contrast,
    "sharpness": augment_ops.sharpness,
    "posterize": augment_ops.posterize,
    "solarize": augment_ops.solarize,
}

_MOST = 1 << 16  # operations and strengths; more is a slip


def _matrix(name: str, magnitude: float, height: int, width: int) -> tuple[float, ...]:
    """The map from output to input of a geometric operation, as `augment_ops.warp` takes it."""
    if name == "shear_x":  # about the upper edge, as in the papers' code
        return 1.0, magnitude, magnitude * height / 2, 0.0, 1.0, 0.0
    if name == "shear_y":
        return 1.0, 0.0, 0.0, magnitude, 1.0, magnitude * width / 2
    if name == "translate_x":
        return 1.0, 0.0, -float(int(magnitude)), 0.0, 1.0, 0.0
    if name == "translate_y":
        return 1.0, 0.0, 0.0, 0.0, 1.0, -float(int(magnitude))
    assert name == "rotate", name
    cosine, sine = math.cos(math.radians(magnitude)), math.sin(math.radians(magnitude))
    return cosine, -sine, 0.0, sine, cosine, 0.0  # counter-clockwise


def _row(name: str, magnitude: float, height: int, width: int) -> tuple[float, ...]:
    """Six numbers for one operation: its matrix, or the one that its function takes and zeros."""
    if _FIRST_GEOMETRIC <= OPERATIONS.index(name) < _AFTER_GEOMETRIC:
        return _matrix(name, magnitude, height, width)
    return (1.0 + magnitude if name in _ENHANCE else magnitude, 0.0, 0.0, 0.0, 0.0, 0.0)


def operation(name: str, images: Tensor, magnitude: float, fill: float = 0.0) -> Tensor:
    """One operation with one signed magnitude on all images: what the policies do to a row.

    The magnitude's unit is that of the tables: a slope (shear), pixels (translate), degrees counter-clockwise
    (rotate), factor - 1 (brightness, color, contrast, sharpness), bits kept (posterize), threshold in 0..1 (solarize).

    >>> import torch
    >>> image = torch.tensor([[[[10, 200]]]], dtype=torch.uint8)
    >>> operation("solarize", image, 0.5).tolist()
    [[[[10, 55]]]]
    """
    if name not in OPERATIONS:
        raise ValueError(
            f"{name!r} is no operation: nothing could be done.\nFix: one of {', '.join(OPERATIONS)}"
        )
    _check(name, images, fill)
    table = np.array([_row(name, magnitude, *images.shape[-2:])], dtype=np.float32)
    return _carry_out(OPERATIONS.index(name), images, np.zeros(len(images), dtype=np.int64), table, fill)


def _carry_out(
    number: int, images: Tensor, codes: NDArray[np.int64], table: NDArray[np.float32], fill: float
) -> Tensor:
    """Operation ``number`` (any geometric one stands for all of them) on images, each with its row of ``table``."""
    name = OPERATIONS[number]
    if _FIRST_GEOMETRIC <= number < _AFTER_GEOMETRIC:
        distinct, which = np.unique(codes, return_inverse=True)  # a map is made once for all who share it
        places = augment_ops.warp_places(rows_to(table[distinct], images), *images.shape[-2:])
        return augment_ops.warp(images, places.index_select(0, rows_to(which.reshape(-1), images)), fill)
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](images, rows_to(table[codes, 0], images))
    if name == "autocontrast":
        return augment_ops.autocontrast(images)
    return augment_ops.equalize(images) if name == "equalize" else images


Table = tuple[tuple[float, ...], ...]  # one row of magnitudes, by bin, per operation


@lru_cache(maxsize=32)
def _rows(table: Table, height: int, width: int) -> NDArray[np.float32]:
    """Six numbers for every code, which is (operation * bins + bin) * 2, plus 1 for the other direction.

    Made on the host in double precision, so that a GPU's own sine has no say in the result.
    """
    return np.array(
        [
            _row(name, sign * magnitude, height, width)
            for number, (name, magnitudes) in enumerate(zip(OPERATIONS, table, strict=True))
            for magnitude in magnitudes
            for sign in ((1.0, -1.0) if number < _SIGNED else (1.0, 1.0))
        ],
        dtype=np.float32,
    )


def _steps(low: float, high: float, bins: int) -> tuple[float, ...]:
    """Evenly spaced magnitudes, both ends included."""
    return tuple(float(value) for value in np.linspace(low, high, bins))


def _posterize_bits(bins: int, removed: int) -> tuple[float, ...]:
    """From 8 bits down to 8 - removed."""
    return tuple(float(round(8 - index / ((bins - 1) / removed))) for index in range(bins))


@lru_cache(maxsize=32)
def _rand_augment_table(bins: int, height: int, width: int) -> Table:
    """The magnitudes of RandAugment as torchvision has them; translations are parts of the image (150 / 331)."""
    none, enhance, shear = (0.0,) * bins, _steps(0.0, 0.9, bins), _steps(0.0, 0.3, bins)
    across, down = _steps(0.0, 150 / 331 * width, bins), _steps(0.0, 150 / 331 * height, bins)
    return (
        none, shear, shear, across, down, _steps(0.0, 30.0, bins), enhance, enhance, enhance, enhance,
        _posterize_bits(bins, 4), _steps(1.0, 0.0, bins), none, none,
    )  # fmt: skip


@lru_cache(maxsize=32)
def _trivial_augment_table(bins: int) -> Table:
    """The wide magnitudes of TrivialAugment."""
    none, enhance, far = (0.0,) * bins, _steps(0.0, 0.99, bins), _steps(0.0, 32.0, bins)
    return (
        none, enhance, enhance, far, far, _steps(0.0, 135.0, bins), enhance, enhance, enhance, enhance,
        _posterize_bits(bins, 6), _steps(1.0, 0.0, bins), none, none,
    )  # fmt: skip


def _check(name: str, images: Tensor, fill: float) -> None:
    check_fill(fill, images)
    if images.shape[1] not in (1, 3):
        raise ValueError(
            f"{name} on images of {images.shape[1]} channels: grey levels are defined for 1 or 3.\n"
            f"Fix: {name} on the first three channels, or the transforms of phalanx.dist.augment, which take any number"
        )


def _apply_rounds(
    images: Tensor, codes: NDArray[np.int64], table: NDArray[np.float32], fill: float
) -> Tensor:
    """Round after round; in each, images are sorted by operation so that every operation works on one slice.

    Args:
        codes: (n, rounds), rows of ``table``.
    """
    numbers = codes // (len(table) // len(OPERATIONS))
    numbers[(numbers >= _FIRST_GEOMETRIC) & (numbers < _AFTER_GEOMETRIC)] = _FIRST_GEOMETRIC
    places = np.arange(len(images))  # which sample lies at each place of the sorted batch
    for turn in range(codes.shape[1]):
        order = np.argsort(numbers[places, turn], kind="stable")
        places = places[order]
        images = images.index_select(0, rows_to(order, images))
        counts = np.bincount(numbers[places, turn], minlength=len(OPERATIONS))
        start = 0
        for number, count in enumerate(counts.tolist()):
            part = slice(start, start + count)
            if count and OPERATIONS[number] != "identity":
                images[part] = _carry_out(number, images[part], codes[places[part], turn], table, fill)
            start += count
    back = np.empty_like(places)
    back[places] = np.arange(len(places))
    return images.index_select(0, rows_to(back, images))


@dataclass(frozen=True)
class RandAugment:
    """RandAugment (Cubuk, Zoph, Shlens and Le, 2019, arXiv:1909.13719): ``num_ops`` operations per image, drawn with
    replacement from 14, all at the same strength, each direction equally likely.

    Operations and magnitudes are those of ``torchvision.transforms.v2.RandAugment``; nearest pixels. Images are uint8,
    or floating point in 0..1, of 1 or 3 channels: it goes before `Normalize`.

    >>> RandAugment(num_ops=2, magnitude=9)
    RandAugment(num_ops=2, magnitude=9, num_magnitude_bins=31, fill=0.0)

    Args:
        num_ops: Operations one after the other, >= 0.
        magnitude: Index into the table of strengths, 0 <= magnitude < num_magnitude_bins.
        num_magnitude_bins: Steps from nothing to the strongest, >= 2.
        fill: What geometric operations bring in from outside.
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    fill: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("num_ops", 0), ("magnitude", 0), ("num_magnitude_bins", 2)):
            number = require_int(name, getattr(self, name), at_least=least, at_most=_MOST)
            object.__setattr__(self, name, number)
        check_number(self.fill)
        if self.magnitude >= self.num_magnitude_bins:
            raise ValueError(
                f"magnitude={self.magnitude}: the strength is looked up in a table of {self.num_magnitude_bins}, which "
                f"ends at {self.num_magnitude_bins - 1}.\nFix: a smaller magnitude, or a larger num_magnitude_bins"
            )

    def draw(self, draws: Draws, height: int, width: int) -> Parameters:
        """Rows of the table of operations, magnitudes and directions, shape (n, num_ops)."""
        codes = np.empty((len(draws), self.num_ops), dtype=np.int64)
        for turn in range(self.num_ops):
            numbers, signs = draws.integers(len(OPERATIONS)), draws.integers(2)
            codes[:, turn] = (numbers * self.num_magnitude_bins + self.magnitude) * 2 + signs
        return (codes,)

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        _check("RandAugment", images, self.fill)
        height, width = images.shape[-2:]
        table = _rows(_rand_augment_table(self.num_magnitude_bins, height, width), height, width)
        return _apply_rounds(images, parameters[0], table, self.fill)


@dataclass(frozen=True)
class TrivialAugment:
    """TrivialAugment (Mueller and Hutter, 2021, arXiv:2103.10158): one operation per image, one strength, both drawn
    evenly; nothing to tune.

    Operations and magnitudes are those of ``torchvision.transforms.v2.TrivialAugmentWide``; nearest pixels. Images as
    for `RandAugment`. Translations go up to 32 pixels, whatever the image's size.

    >>> TrivialAugment()
    TrivialAugment(num_magnitude_bins=31, fill=0.0)
    """

    num_magnitude_bins: int = 31
    fill: float = 0.0

    def __post_init__(self) -> None:
        bins = require_int("num_magnitude_bins", self.num_magnitude_bins, at_least=2, at_most=_MOST)
        object.__setattr__(self, "num_magnitude_bins", bins)
        check_number(self.fill)

    def draw(self, draws: Draws, height: int, width: int) -> Parameters:
        """Rows of the table of operations, magnitudes and directions, shape (n, 1)."""
        numbers, bins = draws.integers(len(OPERATIONS)), draws.integers(self.num_magnitude_bins)
        return (((numbers * self.num_magnitude_bins + bins) * 2 + draws.integers(2))[:, None],)

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        _check("TrivialAugment", images, self.fill)
        table = _rows(_trivial_augment_table(self.num_magnitude_bins), *images.shape[-2:])
        return _apply_rounds(images, parameters[0], table, self.fill)

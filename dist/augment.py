"""Augmentation of whole batches, each image by numbers that belong to its own position.

A transform is a small frozen object with two steps. ``draw`` turns random numbers (`Draws`: a hash of key and
position, no generator) into one row of parameters per sample; ``apply`` carries them out on a batch that lies on any
device. A class of your own with these two methods stands beside the ones here. `RandAugment` and `TrivialAugment`
are in `phalanx.dist.augment_policies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from phalanx.dist.arguments import require_int, require_real, short
from phalanx.dist.augment_draws import Draws
from phalanx.dist.keys import derive_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_PIXELS = 1 << 20  # a side beyond is a slip

Parameters = tuple["NDArray[Any]", ...]  # each with one row per sample


@runtime_checkable
class Transform(Protocol):
    """What `augment_batch` and `TensorLoader` call; images are (n, C, H, W)."""

    def draw(self, draws: Draws, height: int, width: int) -> Parameters:
        """Parameters for the samples of ``draws``, one row each, for images of this size."""

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """The transformed batch, as a new tensor; row i must depend on images[i] and row i alone."""


def augment_batch(
    images: Tensor, transforms: Sequence[Transform], *, key: int, positions: NDArray[np.int64]
) -> Tensor:
    """The batch after ``transforms`` in order; the input is not changed.

    A row depends on its image, ``key``, its position and the place of each transform in the sequence: not on the
    rest of the batch, on the device, or on how many ranks share the work. In a plain loop::

        >>> images = torch.arange(4 * 9, dtype=torch.uint8).view(4, 1, 3, 3)
        >>> transforms = [RandomCrop(padding=1), HorizontalFlip()]
        >>> whole = augment_batch(images, transforms, key=5, positions=np.arange(4))
        >>> second = augment_batch(images[2:], transforms, key=5, positions=np.array([2, 3]))
        >>> torch.equal(whole[2:], second)
        True

    Args:
        images: (n, C, H, W), uint8 or floating point.
        key: The same for all ranks and different for each epoch: ``derive_key(seed, epoch)``.
        positions: The samples' positions in the epoch, shape (n,).

    Raises:
        ValueError: ``images`` is of another shape, or ``positions`` has another length.
    """
    check_images(images)
    transforms = check_transforms(transforms, "transforms")
    key = require_int("key", key, at_least=-(1 << 63), at_most=None)
    positions = check_positions(positions)
    if len(positions) != len(images):
        raise ValueError(
            f"{len(images)} images but {len(positions)} positions: rows could not be told apart.\n"
            "Fix: pass one position per image"
        )
    for place, transform in enumerate(transforms):
        height, width = images.shape[-2:]
        draws = Draws(derive_key(key, "augment", place), positions)
        images = transform.apply(images, transform.draw(draws, height, width))
        if len(images) != len(positions):
            raise ValueError(
                f"{transform!r} made {len(images)} images of {len(positions)}: they would get other images' labels.\n"
                "Fix: an apply that returns one image for each it is given, in order"
            )
    return images


def check_positions(positions: Any) -> NDArray[np.int64]:
    """The positions as int64, or a ValueError about what is wrong with them."""
    try:
        array = np.asarray(positions.cpu() if hasattr(positions, "cpu") else positions)
    except (TypeError, ValueError):
        array = np.empty((), dtype=object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (array.size and array.min() < 0):
        raise ValueError(
            f"positions={short(positions)}: one integer of at least 0 for each image is needed.\n"
            "Fix: the samples' positions in the epoch, such as numpy.arange(len(images))"
        )
    return array.astype(np.int64, copy=False)


def check_transforms(transforms: Sequence[Any], name: str = "augment") -> tuple[Transform, ...]:
    """The transforms as a tuple, or a ValueError about the first that is none."""
    if not isinstance(transforms, Sequence) or isinstance(transforms, str | bytes):
        raise ValueError(
            f"{name}={short(transforms)} is no sequence: transforms are carried out in order.\n"
            f"Fix: {name}=[RandomCrop(4), HorizontalFlip()]"
        )
    for place, transform in enumerate(transforms):
        if isinstance(transform, type) or not isinstance(transform, Transform):
            hint = (
                f"{transform.__name__}()"
                if isinstance(transform, type)
                else "RandomCrop(4), HorizontalFlip()"
            )
            raise ValueError(
                f"{name}[{place}] is {short(transform)}: it has no draw(draws, height, width) and apply(images, "
                "parameters), so its random numbers could not be tied to positions.\n"
                f"Fix: pass transforms of phalanx.dist.augment, for example {hint}, or give it these two methods"
            )
    return tuple(transforms)


def check_images(images: Tensor) -> None:
    """ValueError unless ``images`` is (n, C, H, W), uint8 or floating point."""
    if not isinstance(images, Tensor):
        raise ValueError(
            f"images={short(images)}: a tensor (n, C, H, W) is needed.\nFix: torch.as_tensor(images)"
        )
    if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise ValueError(
            f"images of shape {tuple(images.shape)} and type {images.dtype}: transforms work on (n, C, H, W), uint8 or "
            "floating point, and would move other dims or overflow.\nFix: images.unsqueeze(1) adds the channel of grey "
            "images, images.permute(0, 3, 1, 2) moves a last one, images.to(torch.uint8) changes the type"
        )


def check_number(fill: float) -> None:
    """ValueError unless it is a number; whether images can hold it is seen when there are some."""
    require_real("fill", fill, fix="the value of the pixels that come in, in the images' own units")


def check_fill(fill: float, images: Tensor) -> None:
    """ValueError unless these images can hold the value."""
    check_number(fill)
    if images.dtype == torch.uint8 and not (0 <= fill <= 255 and fill == int(fill)):
        raise ValueError(
            f"fill={fill} for uint8 images: their pixels are whole numbers of 0 to 255, and this one would come out as "
            "another.\nFix: a whole number of 0 to 255, or put the transform after Normalize"
        )


def rows_to(parameters: NDArray[Any], images: Tensor) -> Tensor:
    """One parameter as a tensor beside the images."""
    return torch.from_numpy(np.ascontiguousarray(parameters)).to(images.device, non_blocking=True)


def _shifted(images: Tensor, padded: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """From each image of ``padded`` the window at (top, left) as large as ``images``.

    Every row of a window is one slice of memory, so the copy goes row by row and not pixel by pixel.
    """
    count, channels, height, width = images.shape
    if count == 0:
        return images.clone()
    padded_height, padded_width = padded.shape[-2:]
    plane, device = padded_height * padded_width, images.device
    corners = torch.arange(0, count * channels * plane, plane, device=device).view(count, channels)
    corners = corners + (top * padded_width + left).view(-1, 1)
    lines = torch.arange(0, height * padded_width, padded_width, device=device)
    starts = corners.unsqueeze(2) + lines
    slices = padded.view(-1).unfold(0, width, 1)
    return slices.index_select(0, starts.view(-1)).view(images.shape)


@dataclass(frozen=True)
class RandomCrop:
    """Pad every side, then cut a window of the original size at a random place (all places equally likely).

    >>> RandomCrop(padding=4, mode="reflect")
    RandomCrop(padding=4, mode='reflect', fill=0.0)

    Args:
        padding: Pixels added to each side, >= 0.
        mode: "constant" pads with ``fill``, "reflect" mirrors at the outermost pixel (padding < image side).
        fill: The value of padding, in the images' own units at this point of the sequence.
    """

    padding: int
    mode: Literal["constant", "reflect"] = "constant"
    fill: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "padding", require_int("padding", self.padding, at_least=0, at_most=MOST_PIXELS)
        )
        check_number(self.fill)
        if not isinstance(self.mode, str) or self.mode not in ("constant", "reflect"):
            raise ValueError(
                f"mode={short(self.mode)} is unknown: nothing says what to pad with.\nFix: 'constant' or 'reflect'"
            )

    def draw(self, draws: Draws, height: int, width: int) -> Parameters:
        """Top and left of the window in the padded image, 0 to 2 * padding."""
        places = 2 * self.padding + 1
        return draws.integers(places), draws.integers(places)

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        check_fill(self.fill, images)
        top, left = (rows_to(values, images) for values in parameters)
        sides = (self.padding,) * 4
        if self.mode == "constant":
            padded = functional.pad(images, sides, value=self.fill)
        elif self.padding >= min(images.shape[-2:]):
            raise ValueError(
                f"padding={self.padding} with mode='reflect' on images of {images.shape[-2]} x {images.shape[-1]} pixels: "
                "there are not enough pixels to mirror.\nFix: a padding below the image's side, or mode='constant'"
            )
        else:
            padded = _reflect(images, self.padding)
        return _shifted(images, padded.contiguous(), top, left)


def _reflect(images: Tensor, padding: int) -> Tensor:
    """Mirror padding by index, since torch's own has no uint8 everywhere."""
    height, width = images.shape[-2:]
    for dim, size in ((-2, height), (-1, width)):
        place = torch.arange(-padding, size + padding, device=images.device).abs_()
        place = (size - 1) - (place - (size - 1)).abs_()
        images = images.index_select(dim, place)
    return images


@dataclass(frozen=True)
class Shift:
    """Move each image by a random number of whole pixels; what comes in from outside is ``fill``.

    >>> Shift(vertical=0, horizontal=3)
    Shift(vertical=0, horizontal=3, fill=0.0)

    Args:
        vertical: Rows by which it may move up or down: uniform over -vertical..vertical.
        horizontal: Columns by which it may move left or right.
    """

    vertical: int
    horizontal: int
    fill: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vertical", "horizontal"):
            pixels = require_int(name, getattr(self, name), at_least=0, at_most=MOST_PIXELS)
            object.__setattr__(self, name, pixels)
        check_number(self.fill)

    def draw(self, draws: Draws, height: int, width: int) -> Parameters:
        """Rows moved down and columns moved right."""
        down = draws.integers(2 * self.vertical + 1) - self.vertical
        right = draws.integers(2 * self.horizontal + 1) - self.horizontal
        return down, right

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        check_fill(self.fill, images)
        down, right = (rows_to(values, images) for values in parameters)
        sides = (self.horizontal, self.horizontal, self.vertical, self.vertical)
        padded = functional.pad(images, sides, value=self.fill).contiguous()
        return _shifted(images, padded, self.vertical - down, self.horizontal - right)


@dataclass(frozen=True)
class HorizontalFlip:
    """Mirror left and right with probability ``p``.

    >>> HorizontalFlip(p=1.0).apply(torch.tensor([[[[1, 2, 3]]]]), (np.array([True]),)).tolist()
    [[[[3, 2, 1]]]]
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "p", require_real("p", self.p, at_least=0, at_most=1))
        except ValueError:
            raise ValueError(
                f"p={short(self.p)} is no probability: every draw would be on one side of it.\nFix: 0 <= p <= 1"
            ) from None

    def draw(self, draws: Draws, height: int, width: int) -> Parameters:
        """Whether to flip."""
        return (draws.uniform() < self.p,)

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        # Whole images are copied in one piece; a mask over pixels of one byte is several times slower.
        rows = np.flatnonzero(parameters[0])
        source = np.arange(len(images))
        source[rows] = len(images) + np.arange(len(rows))
        mirrored = images.index_select(0, rows_to(rows, images)).flip(-1)
        return torch.cat((images, mirrored)).index_select(0, rows_to(source, images))


@dataclass(frozen=True)
class Cutout:
    """Blank a square, its centre uniform over the image and cut off at the edges (DeVries and Taylor, 2017,
    arXiv:1708.04552).

    The paper blanks with zeros after normalisation, which is the mean colour: put it after `Normalize` for that.

    >>> Cutout(size=8)
    Cutout(size=8, fill=0.0)

    Args:
        size: Side of the square in pixels, >= 1.
    """

    size: int
    fill: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", require_int("size", self.size, at_least=1, at_most=MOST_PIXELS))
        check_number(self.fill)

    def draw(self, draws: Draws, height: int, width: int) -> Parameters:
        """Top and left of the square; it may begin outside."""
        half = self.size // 2
        return draws.integers(height) - half, draws.integers(width) - half

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        check_fill(self.fill, images)
        top, left = (rows_to(values, images).view(-1, 1) for values in parameters)
        count, channels, height, width = images.shape
        side = torch.arange(self.size, device=images.device)
        # The centre is inside, so a line beyond the edge may be named by the edge: that is blank as well.
        lines = (top + side).clamp_(0, height - 1).view(count, 1, self.size, 1)
        columns = (left + side).clamp_(0, width - 1).view(count, 1, 1, self.size)
        planes = torch.arange(count * channels, device=images.device).view(count, channels, 1, 1)
        places = (planes * height + lines) * width + columns
        result = images.clone(memory_format=torch.contiguous_format)
        result.view(-1).index_fill_(0, places.view(-1), self.fill)
        return result


@lru_cache(maxsize=64)
def _affine_of(
    mean: tuple[float, ...], std: tuple[float, ...], white: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Scale and offset per channel, made once: a copy to the device costs more than using it."""
    wide = torch.tensor([mean, std], dtype=torch.float64)
    scale = (1.0 / (wide[1] * white)).to(device, dtype).view(1, -1, 1, 1)
    offset = (-wide[0] / wide[1]).to(device, dtype).view(1, -1, 1, 1)
    return scale, offset


@dataclass(frozen=True, init=False)
class Normalize:
    """``(x - mean) / std`` per channel; uint8 images are brought to 0..1 first and become float32.

    >>> Normalize(mean=0.5, std=0.25).apply(torch.tensor([[[[255]]]], dtype=torch.uint8), ()).tolist()
    [[[[2.0]]]]

    Args:
        mean: One number, or one per channel, in units of 0..1.
        std: Likewise; not 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        for name, values in (("mean", mean), ("std", std)):
            several = isinstance(values, Sequence) or getattr(values, "ndim", 0) == 1
            if isinstance(values, str | bytes):
                several = False
            numbers = list(values) if several else [values]  # type: ignore[arg-type]
            checked = tuple(
                require_real(name, value, fix="one number, or one for each channel") for value in numbers
            )
            object.__setattr__(self, name, checked)
        if not self.std or not self.mean or any(not value > 0.0 for value in self.std):
            raise ValueError(
                f"Normalize(mean={self.mean}, std={self.std}): every channel is divided by its std, and this one gives "
                "infinite, mirrored or no images.\nFix: one std above 0 for all channels, or one for each"
            )

    def draw(self, draws: Draws, height: int, width: int) -> Parameters:
        """Nothing is drawn."""
        return ()

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        channels = images.shape[1]
        if {len(self.mean), len(self.std)} - {1, channels}:
            raise ValueError(
                f"Normalize has {len(self.mean)} means and {len(self.std)} stds for images of {channels} channels: they "
                f"cannot be paired.\nFix: one number for all, or {channels} of them"
            )
        is_float = images.is_floating_point()
        dtype = images.dtype if is_float else torch.float32
        mean, std = (values * channels if len(values) == 1 else values for values in (self.mean, self.std))
        scale, offset = _affine_of(mean, std, 1.0 if is_float else 255.0, dtype, images.device)
        # Product and sum are rounded one by one: where a device fuses them, the bits are others.
        copied = images.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return copied.mul_(scale).add_(offset)

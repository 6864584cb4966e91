"""The image operations of AutoAugment and its followers, on a whole batch, each image with its own magnitude.

Every function takes images of shape (n, C, H, W), uint8 in 0..255 or floating point in 0..1, C = 1 or 3, and returns
new ones of the same kind. An image's result depends on that image alone, to the bit, on any device: sums over an
image are taken in integers, and products and sums of pixels in separate steps that are rounded one by one (where
they are fused, as on a GPU, the bits are others).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_FRACTION = float(2**20)  # resolution at which a floating point image is averaged


def bound_of(images: Tensor) -> float:
    """The value of white: 255 for integers, 1 for floating point."""
    return 1.0 if images.is_floating_point() else 255.0


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    """Shape (n,) to (n, 1, 1, 1), in the dtype that the images are computed in."""
    dtype = images.dtype if images.is_floating_point() else torch.float32
    return values.to(dtype).view(-1, 1, 1, 1)


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """``factor * images + (1 - factor) * other``, clipped; fractions are cut off in integers."""
    ratio = _per_image(factor, images)
    result = (images * ratio).add_(other * (1.0 - ratio))
    return result.clamp_(0.0, bound_of(images)).to(images.dtype)


def _grey(images: Tensor) -> Tensor:
    """Luma (ITU-R 601) of RGB, shape (n, 1, H, W): int32 cut down for integers, else floating point."""
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    if images.is_floating_point():
        return (red * 0.2989).add_(green * 0.587).add_(blue * 0.114)
    weighted = red.to(torch.int32).mul_(2989)
    weighted.add_(green.to(torch.int32).mul_(5870)).add_(blue.to(torch.int32).mul_(1140))
    return weighted.div_(10000, rounding_mode="floor")


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: factor 0 is black, 1 the image."""
    return (images * _per_image(factor, images)).clamp_(0.0, bound_of(images)).to(images.dtype)


def color(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image: factor 0 is grey, 1 the image. One channel stays as it is."""
    return images if images.shape[1] == 1 else _blend(images, _grey(images), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean grey level: factor 0 is one flat grey, 1 the image."""
    grey = images if images.shape[1] == 1 else _grey(images)
    if images.is_floating_point():
        exact = (grey * _FRACTION).round_().to(torch.int64).flatten(1).sum(dim=1)
        mean = exact.to(torch.float64) / _FRACTION
    else:
        mean = grey.flatten(1).sum(dim=1, dtype=torch.int64).to(torch.float64)
    return _blend(images, _per_image(mean / grey[0].numel(), images), factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image (3 x 3, centre 5, others 1, over 13): 0 is smooth, 1 the image, 2 sharpened.

    The outermost pixels stay as they are.
    """
    height, width = images.shape[-2:]
    if height <= 2 or width <= 2:
        return images
    pixels = images if images.is_floating_point() else images.to(torch.float32)
    columns = pixels[..., :-2, :] + pixels[..., 1:-1, :]
    columns += pixels[..., 2:, :]
    smooth = columns[..., :-2] + columns[..., 1:-1]
    smooth += columns[..., 2:]
    inner = pixels[..., 1:-1, 1:-1]
    smooth += inner * 4
    smooth /= 13.0
    if not images.is_floating_point():
        smooth.round_()  # sums of integers are exact, and 13 is odd, so there are no ties
    step = smooth.sub_(inner).mul_(1.0 - _per_image(factor, images))
    result = images.clone()
    result[..., 1:-1, 1:-1] = step.add_(inner).clamp_(0.0, bound_of(images))
    return result


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper ``bits`` (0..8) of each pixel."""
    if images.is_floating_point():
        levels = _per_image(2.0**bits, images)
        return torch.minimum((images * levels).floor_(), levels - 1.0).div_(levels)
    mask = (256 - 2 ** (8 - bits.to(torch.int64))).to(torch.uint8)
    return images & mask.view(-1, 1, 1, 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the pixels at or above ``threshold`` (in 0..1, of white)."""
    if images.is_floating_point():
        return torch.where(images >= _per_image(threshold, images), 1.0 - images, images)
    # The first level that is inverted; a threshold of float32 may lie just above the whole number it means.
    first = (threshold.to(torch.float64) * 255.0 - 1e-3).ceil_().clamp_(0, 255).to(torch.uint8)
    over = (images >= first.view(-1, 1, 1, 1)).view(torch.uint8)
    return images.bitwise_xor(over.mul_(255))


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to the whole range; a channel of one value stays as it is."""
    bound = bound_of(images)
    pixels = images if images.is_floating_point() else images.to(torch.float32)
    low, high = pixels.flatten(2).amin(dim=2), pixels.flatten(2).amax(dim=2)
    flat = high == low
    scale = ((high - low) * (1.0 / bound)).masked_fill_(flat, 1.0)
    stretched = (pixels - low.masked_fill_(flat, 0.0)[..., None, None]).div_(scale[..., None, None])
    return stretched.clamp_(0.0, bound).to(images.dtype)


def equalize(images: Tensor) -> Tensor:
    """Flatten each channel's histogram of 256 levels, in integers, as Pillow's ImageOps.equalize does."""
    if images.is_floating_point():
        levels = (images * (256.0 - 1e-3)).to(torch.uint8)
        return (equalize(levels).to(images.dtype)).div_(255.0)
    count, channels, height, width = images.shape
    planes = count * channels
    pixels = images.reshape(planes, height * width).to(torch.int64)
    offsets = torch.arange(0, planes * 256, 256, device=images.device).view(-1, 1)
    histogram = torch.zeros(planes * 256, dtype=torch.int64, device=images.device)
    one = torch.ones(1, dtype=torch.int64, device=images.device)
    histogram.scatter_add_(0, (pixels + offsets).view(-1), one.expand(pixels.numel()))
    histogram = histogram.view(planes, 256)
    below = histogram.cumsum(dim=1)
    levels = torch.arange(256, device=images.device)
    brightest = torch.where(histogram > 0, levels, 0).amax(dim=1, keepdim=True)
    step = (height * width - histogram.gather(1, brightest)).div_(255, rounding_mode="floor")
    table = (below - histogram).add_(step.div(2, rounding_mode="floor"))
    table.div_(step.clamp(min=1), rounding_mode="floor").clamp_(0, 255)
    table = torch.where(step > 0, table, levels)
    return table.to(torch.uint8).gather(1, pixels).view(images.shape)


def warp_places(matrices: Tensor, height: int, width: int) -> Tensor:
    """Where each output pixel of an affine map comes from, for `warp`; shape (maps, height * width), int64.

    Args:
        matrices: Shape (maps, 6), float32: the output pixel (x, y), counted from the image's centre, shows what is
            at (a x + b y + c, d x + e y + f) from the centre of the input; the nearest pixel counts.
    """
    device = matrices.device
    x = torch.arange(width, device=device, dtype=torch.float32) - (width - 1) / 2
    y = torch.arange(height, device=device, dtype=torch.float32) - (height - 1) / 2
    a, b, c, d, e, f = matrices.to(torch.float32).view(-1, 6, 1).unbind(dim=1)
    # Centred coordinates are added first and the image's centre last, so that a quarter turn stays exact.
    source_x = (a * x).unsqueeze(1) + (b * y + c).unsqueeze(2)
    source_y = (d * x).unsqueeze(1) + (e * y + f).unsqueeze(2)
    # A border of one pixel stands for everything outside; places count from its corner.
    column = source_x.add_((width - 1) / 2).round_().clamp_(-1, width).to(torch.int64).add_(1)
    row = source_y.add_((height - 1) / 2).round_().clamp_(-1, height).to(torch.int64).add_(1)
    return row.mul_(width + 2).add_(column).view(-1, height * width)


def warp(images: Tensor, places: Tensor, fill: float = 0.0) -> Tensor:
    """Each image through its own map.

    Args:
        places: A row of `warp_places` for each image, shape (n, H * W).
        fill: What shows where that lies outside.
    """
    count, channels = images.shape[:2]
    framed = functional.pad(images, (1, 1, 1, 1), value=fill).view(count, channels, -1)
    return framed.gather(2, places.unsqueeze(1).expand(-1, channels, -1)).view(images.shape)

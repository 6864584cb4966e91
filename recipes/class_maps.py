"""Grad-CAM: where in an image a trained network sees a class, from a checkpoint of an image recipe alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.dist import load_state_dict
from phalanx.dist.checkpoint_folders import newest_whole
from phalanx.dist.plain_values import decode
from phalanx.recipes.settings import SettingsError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Trained:
    """A network and what its images are like."""

    model: nn.Module
    recipe: str
    data: str
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    path: Path

    def normalised(self, image: Tensor) -> Tensor:
        """Bytes [channels, side, side] -> a batch of one."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return ((image.float() / 255 - mean) / std)[None]


def load(checkpoint: Path) -> Trained:
    """The network of a checkpoint, or of the newest whole one in a folder of them or of a run.

    Raises:
        SettingsError: There is none, or it is of another recipe.
    """
    folders = (checkpoint, checkpoint / "checkpoints")
    inside = next((found for folder in folders if (found := newest_whole(folder)) is not None), None)
    path = checkpoint if (checkpoint / "state.json").is_file() else inside
    if path is None:
        raise SettingsError(
            f"--checkpoint {checkpoint}: there is no whole checkpoint.\n"
            "Fix: the folder of a run, such as runs/cifar, or one of its checkpoints/step-N"
        )
    try:
        about = decode(json.loads((path / "state.json").read_bytes())["values"]).get("images")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise SettingsError(f"--checkpoint {path}: its state.json cannot be read ({error}).") from error
    if not isinstance(about, dict) or "network" not in about:
        raise SettingsError(
            f"--checkpoint {path} does not say what its images are like: an image recipe (mnist, cifar, resnet) of this "
            "version did not write it.\nFix: a checkpoint of one of these recipes"
        )
    model = _network(about["recipe"], about["network"])
    try:
        load_state_dict(model, path)
    except ValueError as error:
        raise SettingsError(f"--checkpoint {path}: {error}") from error
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]  # the maps must be there still when they are weighed
    return Trained(
        model.eval(),
        about["recipe"],
        about["data"],
        int(about["side"]),
        tuple(about["mean"]),
        tuple(about["std"]),
        tuple(about["classes"]),
        path,
    )


def _network(recipe: str, arguments: list[Any]) -> nn.Module:
    if recipe == "mnist":
        from phalanx.recipes import mnist

        return mnist.network(*arguments)
    if recipe == "resnet":
        from phalanx.recipes import classifiers

        return classifiers.network(*arguments)
    from phalanx.recipes import residual

    return residual.network(*arguments)


class _Watch:
    """Hooks on one module: its maps on the way forward, their gradient on the way back."""

    def __init__(self, module: nn.Module) -> None:
        self.maps = self.gradient = torch.empty(0)
        self.handle = module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.maps = output.detach().clone()
        # A hook of the tensor: a module's own cannot stand what follows being in place, as in DenseNet.
        output.register_hook(self._backward)  # type: ignore[no-untyped-call]
        return output.clone()

    def _backward(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach()


def last_maps(model: nn.Module, batch: Tensor) -> str:
    """The name of the last module whose output still has places: [n, channels, rows, columns] of more than one."""
    found: list[str] = []
    handles = []
    for name, module in model.named_modules():

        def note(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor) and output.ndim == 4 and output.shape[2] * output.shape[3] > 1:
                found.append(name)

        if name:
            handles.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    if not found:
        raise SettingsError("No module of the network has maps to weigh.\nFix: --layer NAME of one that has")
    return found[-1]


@dataclass(frozen=True)
class ClassMap:
    """How much each place speaks for a class, 0 to 1, [side, side]; and what the network says of the image."""

    heat: Tensor
    label: int
    chances: Tensor
    layer: str


def class_map(
    trained: Trained, image: Tensor, label: int | None = None, layer: str | None = None
) -> ClassMap:
    """Grad-CAM (Selvaraju et al., 2016, arXiv:1610.02391): maps weighed by their mean gradient, what is below zero cut.

    Args:
        trained: From `load`.
        image: Bytes [channels, side, side].
        label: The class that is asked about; None: the likeliest.
        layer: Name of the module whose maps are weighed; None: the last that has some.
    """
    batch = trained.normalised(image)
    layer = layer or last_maps(trained.model, batch)
    modules = dict(trained.model.named_modules())
    if layer not in modules:
        raise SettingsError(
            f"--layer {layer}: the network has {', '.join(name for name in modules if name)}."
        )
    watch = _Watch(modules[layer])
    with torch.enable_grad():
        outputs = trained.model(batch.requires_grad_())
        if label is None:
            label = int(outputs[0].argmax())
        if not 0 <= label < outputs.shape[1]:
            raise SettingsError(f"--label {label}: the network has the classes 0 to {outputs.shape[1] - 1}.")
        outputs[0, label].backward()
    watch.handle.remove()
    if watch.maps.ndim != 4 or watch.gradient.shape != watch.maps.shape:
        raise SettingsError(
            f"--layer {layer} gives no maps that the answer depends on.\nFix: --layer {last_maps(trained.model, batch)}"
        )
    weights = watch.gradient.mean((2, 3), keepdim=True)
    heat = (weights * watch.maps).sum(1, keepdim=True).relu()
    heat = F.interpolate(heat, size=image.shape[-2:], mode="bilinear", align_corners=False)[0, 0]
    highest = float(heat.max())
    return ClassMap(heat / highest if highest > 0 else heat, label, outputs[0].detach().softmax(0), layer)


def read_image(path: Path, side: int, channels: int) -> Tensor:
    """An image file as bytes [channels, side, side]: its middle square.

    Raises:
        SettingsError: It is none.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            square = ImageOps.fit(file.convert("L" if channels == 1 else "RGB"), (side, side))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise SettingsError(f"--image {path} cannot be read as an image: {error}") from error
    pixels: NDArray[np.uint8] = np.array(square)
    return torch.from_numpy(pixels.reshape(side, side, channels)).permute(2, 0, 1)


def draw(trained: Trained, image: Tensor, found: ClassMap, picture: Path) -> None:
    """The image, and the heat over it, as PNG."""
    import matplotlib.figure

    from phalanx.recipes.curves import write_picture

    figure = matplotlib.figure.Figure(figsize=(8, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    pixels = image.permute(1, 2, 0).numpy()
    for axes in (left, right):
        if pixels.shape[2] == 1:
            axes.imshow(pixels[..., 0], cmap="gray", vmin=0, vmax=255)
        else:
            axes.imshow(pixels)
        axes.set_axis_off()
    right.imshow(found.heat.numpy(), cmap="jet", alpha=0.45, vmin=0, vmax=1)
    best = int(found.chances.argmax())
    left.set_title(f"{trained.classes[best]}: {float(found.chances[best]):.1%}")
    right.set_title(f"for {trained.classes[found.label]}, {found.layer}")
    write_picture(figure, picture)

"""torchvision's classifiers by name: with any number of classes, published weights, auxiliary heads, an average of themselves."""

from __future__ import annotations

import copy
import difflib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.dist import load_state_dict, rank_zero_first
from phalanx.recipes import datasets
from phalanx.recipes.image_folder import MEAN, STD
from phalanx.recipes.settings import SettingsError

#: What the loss of an auxiliary head counts, as in the papers.
AUXILIARY = {"googlenet": 0.3, "inception_v3": 0.4}


def _models() -> Any:
    try:
        from torchvision import models
    except ImportError:
        raise SettingsError(
            "torchvision, which has the networks, is not installed.\n"
            f"Fix: pip install {datasets.torchvision_for(torch.__version__)}"
        ) from None
    return models


def check_name(arch: str) -> None:
    """SettingsError unless torchvision has a classifier of that name."""
    models = _models()
    known = models.list_models(module=models)
    if arch not in known:
        near = difflib.get_close_matches(arch, known, n=3) or ["resnet18", "resnet50"]
        raise SettingsError(
            f"--arch {arch}: torchvision has no such classifier.\nFix: --arch {' or '.join(near)}"
        )


def plain(arch: str, classes: int) -> nn.Module:
    """The network with fresh weights; with its auxiliary heads where it has some."""
    check_name(arch)
    extra = {"aux_logits": True, "init_weights": True} if arch in AUXILIARY else {}
    made: nn.Module = _models().get_model(arch, weights=None, num_classes=classes, **extra)
    return made.to(memory_format=torch.channels_last)


def network(arch: str, classes: int, averaged: bool, channels_last: bool) -> nn.Module:
    """As a run's checkpoint holds it."""
    return Classifier(plain(arch, classes), averaged=averaged, channels_last=channels_last)


def take_weights(model: nn.Module, arch: str, weights: str) -> str:
    """Load torchvision's published weights, or a file's; what has another number of classes stays fresh. Collective.

    Returns:
        What was done, for the user.
    """
    if weights in ("DEFAULT", "IMAGENET1K_V1", "IMAGENET1K_V2"):
        source: Any = datasets.everywhere(lambda: _published(arch, weights))
        name = f"torchvision's {weights} weights"
    else:
        source, name = weights, weights
    try:
        match = load_state_dict(model, source, strict=False, ignore_mismatched=True)
    except (ValueError, OSError) as error:
        raise SettingsError(f"--weights {weights}: {error}") from error
    return f"{name}: {str(match).splitlines()[0]}"


def _published(arch: str, weights: str) -> Any:
    try:
        entry = _models().get_model_weights(arch)[weights] if weights != "DEFAULT" else None
        entry = entry or _models().get_model_weights(arch).DEFAULT
    except KeyError:
        raise SettingsError(
            f"--weights {weights}: torchvision has none of that name for {arch}.\nFix: --weights DEFAULT"
        ) from None
    try:
        with rank_zero_first(per="node"):  # one rank downloads, the others of its node find the file
            return entry.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        if type(error).__name__ == "RankZeroFailed":
            raise
        raise SettingsError(
            f"--weights {weights}: {entry.url} could not be fetched: {error}\n"
            "Fix: fetch it on a machine that reaches it, and --weights FILE"
        ) from error


class Classifier(nn.Module):
    """A network that takes images as bytes, or as floats of 0 to 255; and the moving average of its weights, if any.

    Training runs the network, evaluation the average. That lies in buffers, so that no optimizer takes it for
    weights, and is part of every checkpoint.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, *, averaged: bool = False, channels_last: bool = True) -> None:
        super().__init__()
        self.network = network
        self.average: nn.Module | None = copy.deepcopy(network) if averaged else None
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        for module in self.average.modules() if self.average is not None else ():
            for name, weight in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, weight.detach())
        for name, values in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, 255 * torch.tensor(values).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Any:
        images = ((images.float() - self.mean) / self.std).contiguous(memory_format=self._format)
        return (self.network if self.training or self.average is None else self.average)(images)

    @torch.no_grad()
    def follow(self, decay: float, step: int) -> None:
        """Take the average one step towards the network, a longer one in the first steps."""
        assert self.average is not None
        decay = min(decay, (1 + step) / (10 + step))
        now = self.network.state_dict()
        for name, tensor in self.average.state_dict().items():
            if tensor.is_floating_point():
                tensor.lerp_(now[name].to(tensor.dtype), 1 - decay)
            else:
                tensor.copy_(now[name])


def loss_of(arch: str, outputs: Any, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The sum of the samples' losses, auxiliary heads included, and the logits."""
    logits, *heads = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    for head in heads:
        if head is not None:
            side = F.cross_entropy(head, targets, reduction="sum", label_smoothing=smoothing)
            loss = loss + AUXILIARY[arch] * side
    return loss, logits


def mixed(images: Tensor, labels: Tensor, classes: int, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """A batch mixed with its neighbours: mixup (Zhang et al., 2017) or CutMix (Yun et al., 2019), at even chances.

    Drawn from torch's global generator, which the engine has seeded for this batch.

    Args:
        images: Floats [n, channels, rows, columns].
        labels: [n].
        classes: How many there are.
        mixup: The Beta distribution's alpha for mixup; 0: none.
        cutmix: Likewise for CutMix.

    Returns:
        The images and the chances of each class [n, classes]; as they are when both are 0.
    """
    if not mixup and not cutmix:
        return images, labels
    targets = F.one_hot(labels, classes).to(images.dtype)
    cut = cutmix > 0 and (mixup == 0 or float(torch.rand(())) < 0.5)
    alpha = torch.tensor(cutmix if cut else mixup)
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    if not cut:
        return (
            images * share + images.roll(1, 0) * (1 - share),
            targets * share + targets.roll(1, 0) * (1 - share),
        )
    rows, columns = images.shape[-2:]
    half = (1 - share) ** 0.5 / 2
    middle_row, middle_column = (float(torch.rand(())) * size for size in (rows, columns))
    top, bottom = (int(max(0.0, min(rows, middle_row + sign * half * rows))) for sign in (-1, 1))
    left, right = (int(max(0.0, min(columns, middle_column + sign * half * columns))) for sign in (-1, 1))
    images = images.clone()
    images[..., top:bottom, left:right] = images.roll(1, 0)[..., top:bottom, left:right]
    share = 1 - (bottom - top) * (right - left) / (rows * columns)
    return images, targets * share + targets.roll(1, 0) * (1 - share)

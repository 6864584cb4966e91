"""The seed of a whole process, and weights for classes that are not equally frequent."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from phalanx.dist.arguments import require_flag, require_int, short

MOST_CLASSES = (
    1 << 31
)  # a weight for each has to fit into memory; labels beyond are something else, such as hashes

_logger = logging.getLogger(__name__)
_said: set[bool] = set()


def seed_everything(seed: int, *, deterministic: bool = False) -> int:
    """Seed the generators of random, numpy and torch, on the CPU and on every CUDA device.

    ::

        seed_everything(0)           # before the model is made: the same first weights everywhere

    The same seed on every rank is right: ranks start from equal weights, and what has to differ
    between them (samples, augmentation, dropout) is derived by a ShardLoader. CUDA is not initialised
    for it.

    Args:
        seed: ``0 <= seed < 2**32``, the range that all of them accept.
        deterministic: Ask torch for deterministic algorithms: the same numbers on the same hardware,
            slower, and an error from an operation that has none. Switches ``cudnn.benchmark`` off and
            sets ``CUBLAS_WORKSPACE_CONFIG`` where it is unset. False leaves all of that as it is.
            What happens to ``cudnn.benchmark`` is logged once.

    Returns:
        The seed.

    Raises:
        ValueError: ``seed`` is no integer or out of range.
    """
    try:
        seed = require_int("seed", seed, at_least=0, at_most=(1 << 32) - 1)
    except ValueError:
        raise ValueError(
            f"seed={short(seed)}: an integer from 0 to 2**32 - 1 is needed, since numpy takes no other.\n"
            "Fix: seed_everything(0)"
        ) from None
    deterministic = require_flag("deterministic", deterministic)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # every device: those of CUDA when, and if, it is initialised
    if deterministic:
        _make_deterministic()
    if deterministic not in _said:
        _said.add(deterministic)
        _logger.info("%s", _about_benchmark(deterministic))
    return seed


def _make_deterministic() -> None:
    if torch.cuda.is_available() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        initialized: Any = torch.cuda.is_initialized
        if initialized():
            _logger.warning(
                "CUBLAS_WORKSPACE_CONFIG was not set when CUDA started: matrix products may still differ from run "
                "to run, or raise. Fix: export CUBLAS_WORKSPACE_CONFIG=:4096:8, or call this first"
            )
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def _about_benchmark(deterministic: bool) -> str:
    if deterministic:
        return (
            "cudnn.benchmark is off: convolutions use one deterministic algorithm rather than the fastest that "
            "is found by trying"
        )
    return f"cudnn.benchmark stays {'on' if torch.backends.cudnn.benchmark else 'off'}" + (
        ": convolutions may pick another algorithm, and other last bits, in each run"
        * torch.backends.cudnn.benchmark
    )


def class_weights(
    targets: Sequence[int] | torch.Tensor | np.ndarray[Any, Any], num_classes: int | None = None
) -> torch.Tensor:
    """A weight per class, inverse to how often it occurs, for ``CrossEntropyLoss(weight=...)``.

    Class c gets ``n / (present classes * n_c)``: the mean over the samples is 1 and every class that
    occurs has the same total. One that never occurs gets 0.

    >>> class_weights([0, 0, 0, 1], num_classes=3)
    tensor([0.6667, 2.0000, 0.0000])

    Args:
        targets: The class of each sample of the *whole* training set (not of one rank's share).
        num_classes: By default the largest target plus one.

    Returns:
        A float32 tensor of ``num_classes`` weights.

    Raises:
        ValueError: No target, a target that is negative, no integer, or not below ``num_classes``.
    """
    if num_classes is not None:
        num_classes = require_int("num_classes", num_classes, at_least=1, at_most=MOST_CLASSES)
    try:
        labels = torch.as_tensor(targets).detach().cpu().reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"targets={short(targets)}: class_weights() needs the class of each sample as integers.\n"
            "Fix: a list, an array or a tensor of them"
        ) from None
    if labels.numel() == 0 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"targets={short(targets)}: class_weights() needs the class of each sample as integers, got "
            f"{labels.numel()} {labels.dtype}.\nFix: targets.long()"
        )
    labels = labels.long()
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= (num_classes or MOST_CLASSES):
        raise ValueError(
            f"class_weights(): targets go from {lowest} to {highest}, classes from 0"
            + f" to {(num_classes or MOST_CLASSES) - 1}.\nFix: leave out samples that have no class, or say num_classes"
        )
    counts = torch.bincount(labels, minlength=num_classes or 0).double()
    present = counts > 0
    weights = torch.zeros_like(counts)
    weights[present] = labels.numel() / (present.sum() * counts[present])
    return weights.float()

"""What the recipes' loops share: rank 0's word, refusals in one message, exact evaluation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from phalanx.dist import Accuracy, World, gather_objects
from phalanx.dist.checkpoints import CheckpointError
from phalanx.dist.steps import StepLoader
from phalanx.recipes.confusion import Confusion
from phalanx.recipes.scores import Scores
from phalanx.recipes.settings import SettingsError
from phalanx.recipes.share_sums import ShareSums

T = TypeVar("T")


def from_rank_zero(make: Callable[[], T]) -> T:
    """Rank 0's value of ``make()`` on every rank; its SettingsError is one on every rank. Collective."""
    answer: tuple[T | None, str | None] = (None, None)
    if rank() == 0:
        try:
            answer = (make(), None)
        except SettingsError as error:
            answer = (None, str(error))
    value, problem = gather_objects(answer)[0]
    if problem is not None:
        raise SettingsError(problem)
    found: T = value
    return found


def rank() -> int:
    """This process's rank, 0 without a group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@contextlib.contextmanager
def settings_errors() -> Iterator[None]:
    """Where the library refuses what the user asked for, or a checkpoint: its message alone, exit code 2."""
    try:
        yield
    except (ValueError, CheckpointError) as error:
        raise SettingsError(str(error)) from error


@torch.no_grad()
def evaluate(model: nn.Module, loader: StepLoader, confusion: Confusion | None = None) -> Scores:
    """Mean cross-entropy and accuracy over every sample once, whatever the number of ranks. Collective.

    To the last digit the same on all of them when the loader has virtual ranks.

    Args:
        model: Put back to its mode afterwards.
        loader: Images and labels.
        confusion: Is filled, and gathered over the ranks.
    """
    was_training = model.training
    model.eval()
    sums, accuracy = ShareSums(loader, 2), Accuracy()
    for images, labels in loader:
        outputs = model(images).float()
        sums.add(F.cross_entropy(outputs, labels).double() * len(labels), len(labels))
        accuracy.update(outputs, labels)
        if confusion is not None:
            confusion.update(outputs, labels, images)
    if confusion is not None:
        confusion.gather()
    model.train(was_training)
    loss_sum, count = sums.totals()
    return {"loss": loss_sum / count if count else float("nan"), "accuracy": accuracy.compute()}


def share_cores(world: World) -> None:
    """Give this rank its part of the node's cores, unless the launcher or the user has decided."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_world_size))

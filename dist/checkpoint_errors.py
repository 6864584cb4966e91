"""Errors of saving and resuming a run."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or agreed on."""


class DamagedCheckpointsError(CheckpointError):
    """There are checkpoints, and every one of them is damaged."""


class FolderInUseError(CheckpointError):
    """Another run writes its checkpoints to this folder."""


class OptimizerMismatchError(CheckpointError, ValueError):
    """The saved optimizer state is not that of this optimizer; nothing has been changed."""


class PlanMismatchError(CheckpointError, ValueError):
    """The checkpoint is of a run that saw other samples: another seed, batch size or dataset."""


class CheckpointWarning(UserWarning):
    """Something about a checkpoint that the run survived but its owner should know."""

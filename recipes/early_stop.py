"""Stopping where the validation loss no longer falls, with the best weights kept."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.dist import CheckpointManager
from phalanx.recipes import training
from phalanx.recipes.settings import SettingsError

BEST = "best"


@dataclass
class Waiting:
    """What an early stop has seen; plain, so that it goes into a checkpoint.

    >>> waiting = Waiting(patience=2)
    >>> [waiting.judge(loss, epoch, 100 * (epoch + 1)) for epoch, loss in enumerate((1.0, 0.8, 0.9, 0.8))]
    [True, True, False, False]
    >>> waiting.is_over, waiting.best_epoch, waiting.best_step
    (True, 1, 200)
    """

    patience: int
    best: float = math.inf
    best_epoch: int = -1
    best_step: int = -1
    waited: int = 0

    def judge(self, loss: float, epoch: int, step: int) -> bool:
        """Whether an epoch's loss, after the run's ``step``, is the best so far."""
        if loss < self.best:
            self.best, self.best_epoch, self.best_step, self.waited = loss, epoch, step, 0
            return True
        self.waited += 1
        return False

    @property
    def is_over(self) -> bool:
        """Whether it has waited in vain."""
        return self.waited >= self.patience


class EarlyStop:
    """Watches the validation loss of a run, and keeps the best epoch's checkpoint in the run's folder ``best``.

    What it remembers is saved with every checkpoint (``state``), so that a run that goes on stops where it would have.
    All ranks judge the same loss and so agree. Without ``patience`` it does nothing.

    Args:
        patience: Epochs without a better loss after which the run stops; None: never.
        checkpoints: The run's own; the best one is a copy of one of them.
        folder: Of the run.
        state: What the newest checkpoint has of it.
    """

    def __init__(
        self, patience: int | None, checkpoints: CheckpointManager, folder: Path, state: Any = None
    ) -> None:
        self._checkpoints, self._folder = checkpoints, folder / BEST
        self._waiting = None if patience is None else Waiting(**{**(state or {}), "patience": patience})
        self._is_new = False
        if self._waiting is not None and self._waiting.best_step >= 0:
            self._is_new = True  # the run may have been cut short between the save and the copy
            self.keep()

    @property
    def is_over(self) -> bool:
        """Whether the run is to stop."""
        return self._waiting is not None and self._waiting.is_over

    @property
    def state(self) -> dict[str, Any] | None:
        """For the checkpoint."""
        return None if self._waiting is None else asdict(self._waiting)

    def judge(self, loss: float, epoch: int, step: int) -> None:
        """Take the validation loss after an epoch, and after the run's ``step``, into account."""
        self._is_new = self._waiting is not None and self._waiting.judge(loss, epoch, step)

    def keep(self) -> None:
        """After the epoch's save: keep a copy of it if the epoch was the best. Collective."""
        if not self._is_new:
            return
        self._is_new = False
        self._checkpoints.wait()
        training.from_rank_zero(self._copy)

    def _copy(self) -> None:
        assert self._waiting is not None
        name = f"step-{self._waiting.best_step}"
        saved = Path(self._checkpoints.folder) / name
        if not saved.is_dir() or (self._folder / name).is_dir():
            return
        part = self._folder / f".{name}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            shutil.copytree(saved, part, copy_function=_link_or_copy)
            part.rename(self._folder / name)
        except (OSError, shutil.Error) as error:
            raise SettingsError(
                f"{self._folder}: the best weights cannot be kept there: {error}\n"
                "Fix: make room, or leave out --patience; the same command then goes on"
            ) from error
        for older in self._folder.glob("step-*"):
            if older.name != name:
                shutil.rmtree(older, ignore_errors=True)

    def take_best(self, **parts: Any) -> str | None:
        """Load the best epoch's checkpoint, for the test; what to tell of it. Collective.

        Args:
            parts: ``model``, ``optimizer``, ``loader`` and ``scheduler``, as for the run's own checkpoints.
        """
        if self._waiting is None or self._waiting.best_epoch < 0:
            return None
        best = CheckpointManager(self._folder, **parts)
        best.restore()
        best.close()
        why = f"no better for {self._waiting.waited} epochs" if self.is_over else "the run's best"
        return f"kept epoch {self._waiting.best_epoch + 1}: validation loss {self._waiting.best:.4f}, {why}"


def _link_or_copy(source: str, target: str) -> None:
    """A second name for a file that is never written to again, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

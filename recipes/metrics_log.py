"""metrics.jsonl and TensorBoard events of a run: what a killed and resumed run writes too, no line twice."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor
from torch.nn import functional as F

from phalanx.dist import Accuracy, Progress
from phalanx.dist.steps import StepLoader
from phalanx.recipes.confusion import Confusion
from phalanx.recipes.curves import picture_of
from phalanx.recipes.runs import RunFolder, read_metrics, write_whole
from phalanx.recipes.scores import judged
from phalanx.recipes.share_sums import ShareSums

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """metrics.jsonl and TensorBoard events of a run; rank 0 writes, for the others it does nothing.

    A line is a JSON object: ``split`` (train, validation or test), ``epoch`` (from 1), ``step``
    (optimizer steps so far), and the scores: ``loss``, ``accuracy``. A train line is about that step's batch
    alone, so that a run that was killed and resumed leaves the same lines as one that was not. The test's of an image
    recipe has ``confusion`` too: for each true class how many images were taken for each class.

    Args:
        run: Where the file and the events lie.
        progress: What the restored checkpoint holds: lines from after it are cut, and the test's.
        writes: Whether this rank writes.
    """

    def __init__(self, run: RunFolder, progress: Progress, *, writes: bool = True) -> None:
        self._file: TextIO | None = None
        self._events: SummaryWriter | None = None
        self._folder = run.path
        if not writes:
            return
        kept = [line for line in read_metrics(run.metrics) if _stays(line, progress)]
        write_whole(run.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = run.metrics.open("a", encoding="utf-8", buffering=1)
        self._events = _event_writer(run.path / "tensorboard", progress.step)

    def write(
        self,
        split: str,
        epoch: int,
        step: int,
        scores: Mapping[str, float],
        confusion: Confusion | None = None,
    ) -> None:
        """Append a line; it is out of this process at once. ``confusion`` goes with it: counts, and pictures."""
        if self._file is None or not judged(scores):
            return
        line: dict[str, Any] = {"split": split, "epoch": epoch, "step": step} | {
            name: value if math.isfinite(value) else None  # JSON has no other word for it
            for name, value in scores.items()
        }
        if confusion is not None and confusion.counts:
            line["confusion"] = confusion.counts
        self._file.write(json.dumps(line) + "\n")
        if self._events is not None:
            for name, value in scores.items():
                self._events.add_scalar(f"{name}/{split}", value, step)
        for name, figure in confusion.draw(self._folder) if confusion is not None else ():
            if self._events is not None:
                self._events.add_image(f"{name}/{split}", picture_of(figure), step, dataformats="HWC")

    def close(self) -> None:
        """Close both."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


class StepMetrics:
    """Loss and accuracy of every so many steps' batches, over all ranks, as train lines of the log.

    The loss is the plain cross-entropy, as in validation, whatever smoothing the training adds.

    Args:
        log: Where the lines go.
        loader: The training loader, asked for the counts of its last micro batch.
        every: A line for each step that is a multiple of it.
    """

    def __init__(self, log: MetricsLog, loader: StepLoader, every: int) -> None:
        self._log, self._loader, self._every = log, loader, every
        self._loss_sum, self._accuracy = ShareSums(loader, 1), Accuracy()

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Take in a micro batch; at a logged step's last one, write the line. Collective."""
        loader = self._loader
        step = loader.progress.step + (not loader.is_last_micro)
        if step % self._every:
            return
        if loader.local_count:  # a stand-in batch is no sample
            outputs = outputs.detach().float()
            self._loss_sum.add(F.cross_entropy(outputs, labels, reduction="sum"))
            self._accuracy.update(outputs, labels)
        if loader.is_last_micro:
            loss = self._loss_sum.totals()[0] / loader.global_count
            epoch, accuracy = loader.progress.epoch + 1, self._accuracy.compute()
            self._log.write("train", epoch, step, {"loss": loss, "accuracy": accuracy})
            self._loss_sum.reset()
            self._accuracy.reset()


class StepLoss:
    """The loss of every so many steps, over all ranks, as train lines of the log.

    Args:
        log: Where the lines go.
        loader: The training loader, asked for the counts of its last micro batch.
        every: A line for each step that is a multiple of it.
    """

    def __init__(self, log: MetricsLog, loader: StepLoader, every: int) -> None:
        self._log, self._loader, self._every = log, loader, every
        self._sums = ShareSums(loader, 2)

    def update(self, loss_sum: Tensor, count: int) -> None:
        """Take in a micro batch's loss, summed over ``count`` of whatever the mean is over. Collective."""
        loader = self._loader
        step = loader.progress.step + (not loader.is_last_micro)
        if step % self._every:
            return
        if loader.local_count:  # a stand-in batch is no sample
            self._sums.add(loss_sum, count)
        if loader.is_last_micro:
            total, counted = self._sums.totals()
            self._log.write("train", loader.progress.epoch + 1, step, {"loss": total / counted})
            self._sums.reset()


def _stays(line: dict[str, Any], progress: Progress) -> bool:
    if line["split"] == "train":
        return bool(line["step"] <= progress.step)
    # At an epoch's last step a checkpoint may come before the validation: the epoch counts, not the step.
    return bool(line["split"] == "validation" and line["epoch"] <= progress.epoch)


def _event_writer(folder: Path, steps_done: int) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("no TensorBoard events: tensorboard is missing (pip install 'phalanx[recipes]')", flush=True)
        return None
    return SummaryWriter(folder, purge_step=steps_done + 1 if steps_done else None)

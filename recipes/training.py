"""What the recipes' loops share: exact evaluation, records, a progress display, curves."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.dist import Accuracy, Progress, ShardLoader, World, gather_objects
from phalanx.dist.checkpoints import CheckpointError
from phalanx.recipes.datasets import ImageSets
from phalanx.recipes.runs import RunFolder, read_metrics, write_whole
from phalanx.recipes.settings import SettingsError
from phalanx.recipes.share_sums import ShareSums

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
def evaluate(model: nn.Module, loader: ShardLoader) -> tuple[float, float]:
    """Mean cross-entropy and accuracy over every sample once, whatever the number of ranks. Collective.

    To the last digit the same on all of them when the loader has virtual ranks.
    """
    was_training = model.training
    model.eval()
    sums, accuracy = ShareSums(loader, 2), Accuracy()
    for images, labels in loader:
        outputs = model(images).float()
        sums.add(F.cross_entropy(outputs, labels).double() * len(labels), len(labels))
        accuracy.update(outputs, labels)
    model.train(was_training)
    loss_sum, count = sums.totals()
    return loss_sum / count if count else float("nan"), accuracy.compute()


def share_cores(world: World) -> None:
    """Give this rank its part of the node's cores, unless the launcher or the user has decided."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_world_size))


class MetricsLog:
    """metrics.jsonl and TensorBoard events of a run; rank 0 writes, for the others it does nothing.

    A line is a JSON object: ``split`` (train, validation or test), ``epoch`` (from 1), ``step``
    (optimizer steps so far), ``loss``, ``accuracy``. A train line is about that step's batch alone, so
    that a run that was killed and resumed leaves the same lines as one that was not.

    Args:
        run: Where the file and the events lie.
        progress: What the restored checkpoint holds: lines from after it are cut, and the test's.
        writes: Whether this rank writes.
    """

    def __init__(self, run: RunFolder, progress: Progress, *, writes: bool = True) -> None:
        self._file: TextIO | None = None
        self._events: SummaryWriter | None = None
        if not writes:
            return
        kept = [line for line in read_metrics(run.metrics) if _stays(line, progress)]
        write_whole(run.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = run.metrics.open("a", encoding="utf-8", buffering=1)
        self._events = _event_writer(run.path / "tensorboard", progress.step)

    def write(self, split: str, epoch: int, step: int, loss: float, accuracy: float) -> None:
        """Append a line; it is out of this process at once."""
        if self._file is None or math.isnan(accuracy):  # nan: there was no sample to judge
            return
        line = {
            "split": split,
            "epoch": epoch,
            "step": step,
            "loss": loss if math.isfinite(loss) else None,  # JSON has no other word for it
            "accuracy": accuracy,
        }
        self._file.write(json.dumps(line) + "\n")
        if self._events is not None:
            self._events.add_scalar(f"loss/{split}", loss, step)
            self._events.add_scalar(f"accuracy/{split}", accuracy, step)

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

    def __init__(self, log: MetricsLog, loader: ShardLoader, every: int) -> None:
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
            self._log.write("train", epoch, step, loss, accuracy)
            self._loss_sum.reset()
            self._accuracy.reset()


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


class Ledger:
    """One line per step and rank: which positions of the epoch were taken. The proof that each came once.

    Lines are out of the process before the step's checkpoint, so that whatever a checkpoint holds is
    in the ledger; steps after it are run again and noted again, and the last note of a step counts.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        self._file: int | None = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = os.open(
                Path(folder) / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
            )
            self._write("\n")  # ends a line that a kill cut short
        self._taken: list[int] = []

    def note(self, loader: ShardLoader) -> None:
        """Note the micro batch that ``loader`` delivered last."""
        if self._file is None:
            return
        self._taken += [int(position) for position in loader.positions] if loader.local_count else []
        if loader.is_last_micro:
            progress = loader.progress
            self._write(
                json.dumps({"epoch": progress.epoch, "step": progress.step, "positions": self._taken}) + "\n"
            )
            self._taken = []

    def _write(self, text: str) -> None:
        assert self._file is not None
        os.write(self._file, text.encode())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Display:
    """Progress for the user: a bar on a terminal, otherwise a plain line for some of the epochs. Rank 0 only.

    Args:
        epochs: Of the whole run.
        speaks: Whether this rank prints.
        stream: Where to; a bar is drawn only when it is a terminal.
    """

    def __init__(self, epochs: int, *, speaks: bool, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._epochs, self._speaks = epochs, speaks
        self._bar: Any = None
        self._task: Any = None
        self._started = time.monotonic()
        self.train_s = 0.0  # seconds spent in training epochs
        self._waited_s = self._epoch_s = 0.0
        self._samples = 0

    def __enter__(self) -> Display:
        if self._speaks and self._stream.isatty():
            from rich import progress as bars
            from rich.console import Console

            columns = (
                bars.TextColumn("{task.description}"),
                bars.BarColumn(),
                bars.TextColumn("{task.fields[rate]}"),
                bars.TimeRemainingColumn(),
            )
            self._bar = bars.Progress(*columns, console=Console(file=self._stream))
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._speaks:
            print(text, file=self._stream, flush=True)

    def watch(self, loader: ShardLoader, epoch: int) -> Iterator[Any]:
        """The loader's batches of epoch ``epoch`` (from 0), counted and timed."""
        batches = iter(loader)
        begun = time.monotonic()
        self._waited_s, self._samples = 0.0, 0
        if self._bar is not None:
            if self._task is None:
                total = self._epochs * loader.plan.steps_per_epoch
                self._task = self._bar.add_task("", total=total, completed=loader.progress.step, rate="")
            self._bar.update(self._task, description=f"epoch {epoch + 1}/{self._epochs}")
        while True:
            before = time.monotonic()
            batch = next(batches, None)
            now = time.monotonic()
            self._waited_s += now - before
            self._epoch_s = now - begun
            if batch is None:
                break
            yield batch
            if loader.is_last_micro:
                self._samples += loader.global_count
                if self._bar is not None:
                    self._bar.update(self._task, completed=loader.progress.step, rate=self._rate())
        self.train_s += self._epoch_s

    def start(self, run: RunFolder, sets: ImageSets) -> None:
        """Say what is about to be done."""
        for note in run.notes:
            self.say(note)
        held_out = f", {len(sets.validation)} held out" if len(sets.validation) else ""
        self.say(f"{sets.source}: {len(sets.train)} images to train on{held_out}, {len(sets.test)} to test")

    def finish(
        self,
        run: RunFolder,
        checkpoint: Path | None,
        loss: float,
        accuracy: float,
        *,
        title: str,
        tested_only: bool,
    ) -> None:
        """Draw the curves, say how the test went and where everything is."""
        self.say(f"test accuracy {accuracy:.2%}, loss {loss:.4f}")
        if not self._speaks:
            return
        if tested_only:
            self.say(f"checkpoint {checkpoint}")
            return
        if self.train_s:
            self.say(f"trained for {self.train_s:.1f} s")
        if draw_curves(run.metrics, run.path / "curves.png", title):
            self.say(f"curves     {run.path / 'curves.png'}")
        self.say(f"log        {run.metrics}")
        self.say(f"checkpoint {checkpoint}")

    def epoch_done(self, epoch: int, loss: float, accuracy: float) -> None:
        """Say how epoch ``epoch`` (from 0) ended: every one on a terminal, elsewhere about ten of them."""
        every = 1 if self._bar is not None else -(-self._epochs // 10)
        if (epoch + 1) % every and epoch + 1 != self._epochs:
            return
        text = f"epoch {epoch + 1}/{self._epochs}"
        if not math.isnan(accuracy):
            text += f"  validation loss {loss:.4f}, accuracy {accuracy:.2%}"
        if self._samples:
            text += f"  {self._rate()}"
        self.say(text)

    def _rate(self) -> str:
        """Samples per second over all ranks, and where a step's time goes."""
        elapsed_s = max(self._epoch_s, 1e-9)
        return f"{self._samples / elapsed_s:,.0f} samples/s, {self._waited_s / elapsed_s:.0%} of the time in data"


def draw_curves(metrics: Path, picture: Path, title: str) -> bool:
    """Draw loss and accuracy over the steps from metrics.jsonl; False, with a word, without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError:
        print("no curves: matplotlib is missing (pip install 'phalanx[recipes]')", flush=True)
        return False
    lines = read_metrics(metrics)
    figure = matplotlib.figure.Figure(
        figsize=(10, 4), layout="constrained"
    )  # no pyplot: no display, no global state
    for axes, value in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for split, style in (("train", "-"), ("validation", ".-"), ("test", "*")):
            points = [(line["step"], line[value]) for line in lines if line["split"] == split]
            if points:
                faint = 0.5 if split == "train" else 1.0
                axes.plot(*zip(*points, strict=True), style, label=split, alpha=faint)
        axes.set_xlabel("step")
        axes.set_ylabel(value)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    temporary = picture.with_name(picture.name + ".tmp")
    temporary.write_bytes(content.getvalue())
    os.replace(temporary, picture)
    return True

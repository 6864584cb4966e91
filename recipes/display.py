"""What a run shows while it trains and when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from phalanx.dist.steps import StepLoader
from phalanx.recipes.curves import draw_curves
from phalanx.recipes.peak_memory import peak_memory, told_memory, write_memory
from phalanx.recipes.runs import RunFolder
from phalanx.recipes.scores import Scores, judged, told
from phalanx.recipes.step_profile import StepProfile


class Display:
    """Progress for the user: a bar on a terminal, otherwise a plain line for some of the epochs. Rank 0 only.

    Args:
        epochs: Of the whole run.
        speaks: Whether this rank prints.
        stream: Where to; a bar is drawn only when it is a terminal.
        profile: Is told of each step, and its table shown at the end.
    """

    def __init__(
        self,
        epochs: int,
        *,
        speaks: bool,
        stream: TextIO | None = None,
        profile: StepProfile | None = None,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._epochs, self._speaks = epochs, speaks
        self._profile = profile or StepProfile(False, Path(), 0)
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

    def watch(self, loader: StepLoader, epoch: int) -> Iterator[Any]:
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
            with self._profile.data():
                batch = next(batches, None)
            now = time.monotonic()
            self._waited_s += now - before
            self._epoch_s = now - begun
            if batch is None:
                break
            with self._profile.work():
                yield batch
                self._profile.finish_work()
            if loader.is_last_micro:
                self._profile.step_done()
                self._samples += loader.global_count
                if self._bar is not None:
                    self._bar.update(self._task, completed=loader.progress.step, rate=self._rate())
        self.train_s += self._epoch_s

    def start(self, run: RunFolder, data: str) -> None:
        """Say what is about to be done: with which data."""
        for note in run.notes:
            self.say(note)
        self.say(data)

    def finish(
        self,
        run: RunFolder,
        checkpoint: Path | None,
        scores: Scores,
        *,
        title: str,
        tested_only: bool,
    ) -> None:
        """Draw the curves, say how the test went, what the ranks needed and where everything is. Collective."""
        peaks, profile = peak_memory(), self._profile.told()
        if scores:
            self.say(f"test {told(dict(reversed(scores.items())))}")
        if not self._speaks:
            return
        if tested_only:
            self.say(f"checkpoint {checkpoint}")
            return
        if self.train_s:
            self.say(f"trained for {self.train_s:.1f} s")
        for line in profile:
            self.say(line)
        self.say(f"memory     {told_memory(peaks)} at most")
        write_memory(run.path, peaks)
        if draw_curves(run.metrics, run.path / "curves.png", title):
            self.say(f"curves     {run.path / 'curves.png'}")
        for name in ("confusion", "mistakes"):
            if (run.path / f"{name}.png").is_file():
                self.say(f"{name:10} {run.path / name}.png")
        self.say(f"log        {run.metrics}")
        self.say(f"checkpoint {checkpoint}")

    def epoch_done(self, epoch: int, scores: Scores) -> None:
        """Say how epoch ``epoch`` (from 0) ended: every one on a terminal, elsewhere about ten of them."""
        every = 1 if self._bar is not None else -(-self._epochs // 10)
        if (epoch + 1) % every and epoch + 1 != self._epochs:
            return
        text = f"epoch {epoch + 1}/{self._epochs}"
        if judged(scores):
            text += f"  validation {told(scores)}"
        if self._samples:
            text += f"  {self._rate()}"
        self.say(text)

    def _rate(self) -> str:
        """Samples per second over all ranks, and where a step's time goes."""
        elapsed_s = max(self._epoch_s, 1e-9)
        return f"{self._samples / elapsed_s:,.0f} samples/s, {self._waited_s / elapsed_s:.0%} of the time in data"

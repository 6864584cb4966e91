"""Checkpoints that are whole or absent, and a run that goes on from the newest whole one."""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist import checkpoint_files as files
from phalanx.dist import checkpoint_folders as folders
from phalanx.dist.arguments import (
    require_flag,
    require_int,
    require_module,
    require_path,
    require_real,
    short,
)
from phalanx.dist.checkpoint_agreement import compare_ranks, meet, refuse_different_steps
from phalanx.dist.checkpoint_errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointsError,
    FolderInUseError,
    OptimizerMismatchError,
    PlanMismatchError,
)
from phalanx.dist.checkpoint_gather import gather_parts
from phalanx.dist.checkpoint_run_folder import RunFolder
from phalanx.dist.checkpoint_shards import any_sharded, plan_shards
from phalanx.dist.checkpoint_sources import Source
from phalanx.dist.checkpoint_staging import MIN_BYTES, BackgroundWriter, Staging
from phalanx.dist.checkpoint_writing import Gather, ShardedSave, gather_of_its_own, several_tries
from phalanx.dist.plain_values import NotPlainError
from phalanx.dist.rank_errors import on_every_rank, on_rank_zero
from phalanx.dist.run_state import Loader, Restored, RunState, Scheduler, Snapshot
from phalanx.dist.starting_points import is_there
from phalanx.dist.stop_signals import DelayedMax, StopFlag, agreement_for
from phalanx.dist.world import World, gather_objects, world_or_single

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointWarning",
    "DamagedCheckpointsError",
    "FolderInUseError",
    "NotPlainError",
    "OptimizerMismatchError",
    "PlanMismatchError",
    "Restored",
]

logger = logging.getLogger(__name__)

EXIT_SAVED = 75  # BSD's EX_TEMPFAIL: "saved, run me again", which launchers and schedulers requeue on
_FAILED = 1 << 20
_DUE = 1  # what ranks tell each other in maybe_save: rank 0's clock says so, or 1 + a signal's number


class CheckpointManager:
    """Saves a run's whole state so that it can be killed at any instant, and resumes it.

    ::

        checkpoints = CheckpointManager("checkpoints", model=model, optimizer=optimizer, loader=train_loader,
                                        every_steps=500)
        for epoch in range(checkpoints.restore().epoch, epochs):
            for x, y in train_loader:
                ...
                checkpoints.maybe_save()            # every 500 steps, and when a signal asks to stop
            checkpoints.save(accuracy=accuracy)     # at the end of each epoch

    A checkpoint is a folder ``step-<N>`` with ``model.safetensors`` (names without any wrapper; it loads
    with the safetensors package alone), ``optimizer.safetensors``, ``state.json`` and ``manifest.json``
    with sizes and hashes. Nothing is pickled. It is written under another name, synced and renamed, so it
    is whole or absent. Rank 0 writes; a folder that other nodes do not see is an error naming them.

    `maybe_save` takes over SIGTERM, SIGUSR1 and SIGINT at its first call: ranks agree on a step, save, and
    exit with status 75. When a rank fails, nothing is saved.

    Args:
        folder: Where the checkpoints go; one run at a time. Made when needed.
        model: The model, wrapped or not.
        optimizer: Its optimizer; every parameter must be one of the model's.
        loader: The training `ShardLoader`, whose progress numbers the checkpoints. Without one, steps
            are counted by calls of `maybe_save` (or of `save`, if that is all you call), and epochs by
            calls of `save`.
        scheduler: A learning-rate scheduler, or anything with a plain ``state_dict()``.
        keep: How many of the newest to keep; None or -1 keeps all.
        every_steps: `maybe_save` saves when the step is a multiple of this.
        every_s: `maybe_save` saves when the last save is this many seconds ago, by rank 0's clock.
        asynchronous: True: `save` returns once everything is copied into host memory that is kept for it (as
            much as the checkpoint is large), and a thread writes it. False: it returns when all is on disk. None:
            True for 64 MB and more, where there is room for the copy.
        patience_s: How long `save` and `restore` wait for other ranks to call them too, more than 0 seconds.

    Raises:
        ValueError: An argument is out of range, or the optimizer has parameters that the model lacks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Loader | None = None,
        scheduler: Scheduler | None = None,
        keep: int | None = 3,
        every_steps: int | None = None,
        every_s: float | None = None,
        asynchronous: bool | None = None,
        patience_s: float = 50,
    ) -> None:
        self.folder = require_path("folder", folder)
        require_module("model", model)
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer={short(optimizer)} is no optimizer.\nFix: the one that parallelize returned, or Adam(...)"
            )
        self.state = RunState(model, optimizer, loader, scheduler)
        if every_steps is not None:
            every_steps = require_int("every_steps", every_steps, at_least=1)
        if every_s is not None:
            every_s = require_real("every_s", every_s, above=0, fix="seconds, or None for never")
        patience_s = require_real("patience_s", patience_s, above=0, fix="seconds, such as 50")
        if asynchronous is not None:
            asynchronous = require_flag("asynchronous", asynchronous)
        if scheduler is not None and not (
            hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")
        ):
            raise ValueError(
                f"scheduler={short(scheduler)} has no state_dict and load_state_dict.\n"
                "Fix: a scheduler of torch.optim.lr_scheduler, or leave it out"
            )
        if loader is not None and not hasattr(loader, "progress"):
            raise ValueError(
                f"loader is a {type(loader).__name__}, which does not know how far it is: a resumed run would repeat "
                "samples.\nFix: pass the training ShardLoader"
            )
        self.state.check()
        self.every_steps, self.every_s, self.asynchronous = every_steps, every_s, asynchronous
        self._counts_steps = False
        self._place = RunFolder(self.folder, keep)
        self._agreed = self._saved_step = 0
        self._stop: StopFlag | None = None
        self._agree: DelayedMax | None = None
        self.patience_s = patience_s
        self._saved_at = time.monotonic()
        self._staging = Staging()
        self._writer: BackgroundWriter | None = None
        self._weights_bytes = 0
        self._writing = False  # a thread was begun and not asked for yet; the same on every rank
        self._gather: Gather | None = (
            None  # the writers' own, which must not meet with the loop's collectives
        )

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and self._writer is not None:
            self._writer.join()  # other ranks may be gone: wait, and ask nobody
            self._writing = False
        self.close()

    # Saving

    def save(self, **values: Any) -> Path:
        """Save now; returns the checkpoint's folder, which is there once `wait` has returned.

        Saving a step again replaces its checkpoint, unless nothing has changed. An asynchronous save first
        waits for the one before it.

        Collective: every rank must call it, at the same step.

        Args:
            values: Plain values (numbers, strings, lists, dicts) to get back from `restore`, or functions that
                return one, which every rank calls when a save is due, so that they may be collective; rank 0's
                count.

        Raises:
            CheckpointError: It, or the one before it, could not be written (on every rank); earlier
                checkpoints are intact.
            NotPlainError: A value, or the scheduler's state, would need pickle.
        """
        if self.state.loader is None:
            self.state.epoch += 1
            if not self._counts_steps:
                self.state.step += 1
        return self._save(values)

    def maybe_save(self, **values: Any) -> bool:
        """Save if it is time; returns whether it did. Call it at the end of every step.

        When one of the ranks got SIGTERM, SIGUSR1 or SIGINT, all of them save at the end of the same step,
        within half a second or one more step, and exit.

        Collective: every rank must call it, equally often.

        Raises:
            SystemExit: With status 75, after the save that a signal asked for.
            CheckpointError: As for `save`.
        """
        if self._agree is None:
            world = world_or_single()
            self._agree = agreement_for(world.world_size, world.device)
            self._stop = StopFlag()
            self._stop.install()
        assert self._stop is not None
        if self.state.loader is None:
            self.state.step += 1
            self._counts_steps = True
        wanted = self._stop.signal and _DUE + self._stop.signal
        if not wanted and self.every_s is not None and time.monotonic() - self._saved_at >= self.every_s:
            wanted = _DUE if world_or_single().is_rank_zero else 0
        if self._writer is not None and self._writer.failed:
            wanted = _FAILED
        self._agreed = max(self._agreed, self._agree(wanted))
        if self._agreed >= _FAILED:
            self._agreed = 0
            self.wait()  # raises on every rank
        if not getattr(self.state.loader, "is_last_micro", True):
            return False  # within a step: its samples count as seen, and its update is still to come
        step = self.state.current_step()
        due = self.every_steps is not None and step % self.every_steps == 0 and step != self._saved_step
        if not self._agreed and not due:
            return False
        self._agreed = 0
        self._save(values)  # a signal is told there once more, and ends the run
        return True

    def _save(self, values: Mapping[str, Any]) -> Path:
        world = world_or_single()
        meet("save", self.patience_s)
        self._place.take(world, to_write=True)
        self.wait()  # at most one at a time
        step = self.state.current_step()
        self.state.capture()
        # The first thing is to hear from every rank: with one of them gone this raises, and nothing is saved.
        asked = self._stop.signal if self._stop is not None else 0
        told = gather_objects((step, asked))
        refuse_different_steps([step for step, _ in told])
        plain = {name: value() if callable(value) else value for name, value in values.items()}
        snapshot = on_every_rank(world, lambda: self.state.snapshot(plain, world.world_size))
        # Noted now: a thread that fails must not ask the model, whose state_dict() would reshard it in mid-forward.
        self._weights_bytes = sum(
            tensor.numel() * tensor.element_size() for tensor in snapshot.parts["model"].values()
        )
        if snapshot.gather:
            snapshot = replace(snapshot, parts=gather_parts(snapshot.parts, self._staging, world))
        if any_sharded(snapshot.parts):
            self._save_shards(snapshot, world)
        else:
            self._writing = on_rank_zero(world, lambda: self._save_whole(snapshot))
        self._saved_at, self._saved_step = time.monotonic(), step
        path = self.folder / f"step-{step}"
        self._exit_if_asked(max(asked for _, asked in told), path)
        return path

    def _exit_if_asked(self, asked: int, path: Path) -> None:
        """End this rank, like every other, when a signal that any of them got asked for it."""
        if not asked:
            return
        assert self._agree is not None
        self._agree.finish()
        self.wait()
        if world_or_single().is_rank_zero:
            logger.warning("signal %d asked to stop: saved %s, exit %d", asked, path, EXIT_SAVED)
        raise SystemExit(EXIT_SAVED)

    def wait(self) -> None:
        """Return when what was saved is on disk.

        Collective while an asynchronous save is under way: every rank must call it.

        Raises:
            CheckpointError: It could not be written (on every rank); earlier checkpoints are intact.
        """
        if self._writing:
            self._writing = False
            on_every_rank(world_or_single(), self._finish)

    def _save_whole(self, snapshot: Snapshot) -> bool:
        """Write everything, on rank 0 alone; whether a thread does it."""
        tensors = {
            f"{part}/{name}": tensor
            for part, content in snapshot.parts.items()
            for name, tensor in content.items()
        }
        if not self._in_background(tensors):
            self._write(snapshot)
            return False
        held = self._staging.hold(tensors)
        parts = {
            part: {name: held[f"{part}/{name}"] for name in content}
            for part, content in snapshot.parts.items()
        }
        self._start_writer(lambda: self._write(replace(snapshot, parts=parts)))
        return True

    def _save_shards(self, snapshot: Snapshot, world: World) -> None:
        """Write this rank's parts; rank 0 completes the checkpoint when all ranks have."""
        plan = plan_shards(snapshot.parts, snapshot.metadata, world)
        background = all(gather_objects(self._in_background(plan.tensors)))
        gather: Gather = gather_objects
        if background:
            gather = self._gather = self._gather or gather_of_its_own(world)
        writing = ShardedSave(self.folder, snapshot, plan, world)
        on_rank_zero(world, writing.begin)
        work = partial(writing.run, gather, self._place.publish, self._not_written)
        if background:
            held = on_every_rank(world, lambda: self._staging.hold(plan.tensors))
            writing.tensors = held
            self._start_writer(work)
            self._writing = True
        else:
            work()

    def _in_background(self, tensors: Mapping[str, Tensor]) -> bool:
        if self.asynchronous is not None:
            return self.asynchronous
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return size >= MIN_BYTES and self._staging.room_for(tensors)

    def _start_writer(self, work: Callable[[], None]) -> None:
        if self._writer is None:
            self._writer = BackgroundWriter()
        self._writer.start(work)

    def _write(self, snapshot: Snapshot) -> None:
        """Write, publish and tidy up; on rank 0 alone."""
        final = self.folder / f"step-{snapshot.step}"

        def once() -> None:
            temporary = folders.temporary_path(self.folder, final.name)
            try:
                temporary.mkdir(parents=True)
                snapshot.write(temporary)
                self._place.publish(temporary, final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

        several_tries(once, final, self._not_written)

    def _not_written(self, final: Path, error: OSError) -> CheckpointError:
        newest = folders.newest_whole(self.folder)
        kept = (
            f"Earlier checkpoints are intact (newest: {newest})"
            if newest
            else "There is no earlier checkpoint"
        )
        space = ""
        try:
            space = f" ({shutil.disk_usage(self.folder).free >> 20} MB free, the weights alone are {self._weights_bytes >> 20} MB)"
        except OSError:
            pass
        return CheckpointError(
            f"{final} could not be written: {error.strerror or error}{space}.\n{kept}.\n"
            "Fix: make room or choose another folder, then start the run again"
        )

    # Finding and restoring

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole as far as its manifest and file sizes tell; None for none."""
        self._join()
        return folders.newest_whole(self.folder)

    def verify(self) -> list[str]:
        """Read and hash every checkpoint; returns what is wrong, ``[]`` when all are as they were written."""
        self._join()
        return [
            f"{path}: {problem}"
            for _, path in folders.steps_in(self.folder)
            for problem in files.find_problems(path)
        ]

    def restore(
        self,
        else_from: Source | None = None,
        *,
        partial_optimizer: bool = False,
        other_plan: bool = False,
    ) -> Restored:
        """Load the newest whole checkpoint into model, optimizer, loader and scheduler.

        A damaged one is named in a warning and the one before it is used. With no checkpoint in the folder
        the run starts fresh, or from ``else_from``. The number of ranks may differ from when it was saved.

        Collective: every rank must call it.

        Args:
            else_from: What to start from when the folder has no checkpoint yet: a file or dict with the
                entries of a tutorial (``model`` or ``state_dict``, ``optimizer``, ``epoch``: the number of
                finished epochs) or bare weights. A path at which there is nothing is a fresh start, with a
                warning.
            partial_optimizer: Let parameters start without optimizer state where none was saved.
            other_plan: Go on although seed, batch size or dataset differ, as far as the loader can.

        Raises:
            DamagedCheckpointsError: There are checkpoints and all are damaged.
            PlanMismatchError: Another seed, global batch size or dataset length; both values are named.
            StateDictError: The checkpoint is of another model.
            OptimizerMismatchError: The optimizer has other parameters, or is another one.
            CheckpointError: Another rank failed, or ranks loaded different weights.
        """
        world = world_or_single()
        meet("restore", self.patience_s)
        self.wait()
        self._place.take(world, to_write=False)
        name, damaged = on_rank_zero(world, self._place.choose)
        if damaged and world.is_rank_zero:
            warnings.warn(
                CheckpointWarning(f"passed over damaged checkpoints: {'; '.join(damaged)}. Using {name}."),
                stacklevel=2,
            )
        if name is not None:
            path = self.folder / name
            restored = on_every_rank(
                world, lambda: self.state.load(path, partial_optimizer, other_plan, hashed=world.is_rank_zero)
            )
            restored = replace(restored, damaged=tuple(damaged))
        elif else_from is None:
            return Restored()
        else:
            found = on_every_rank(world, lambda: is_there(else_from))
            if not any(gather_objects(found)):
                if world.is_rank_zero:
                    warnings.warn(
                        CheckpointWarning(
                            f"else_from={str(else_from)!r}: nothing there; the run starts from the beginning."
                        ),
                        stacklevel=2,
                    )
                return Restored()
            restored = on_every_rank(world, lambda: self.state.load_foreign(else_from, partial_optimizer))
        compare_ranks(self.state, restored)
        self._saved_at = time.monotonic()
        return restored

    def close(self) -> None:
        """Wait for what is being written, let go of the folder and give the signals back.

        The end of the process does the same. ``with CheckpointManager(...) as checkpoints:`` calls it.

        Collective while an asynchronous save is under way: every rank must call it.

        Raises:
            CheckpointError: As for `wait`.
        """
        try:
            self.wait()
        finally:
            self._place.let_go()
            if self._writer is not None:
                self._writer.forget()
                self._writer = None
            if self._stop is not None:
                self._stop.close()
                self._stop = self._agree = None

    def _finish(self) -> None:
        """`wait` on this rank, which may have nothing to wait for."""
        if self._writer is not None:
            self._writer.finish()

    def _join(self) -> None:
        """Let a write that is under way end; its error stays for `wait`."""
        if self._writer is not None:
            self._writer.join()

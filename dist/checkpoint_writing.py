"""Bringing a checkpoint to disk: several tries, and a save in which every rank writes its part."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx.dist import checkpoint_files as files
from phalanx.dist.checkpoint_errors import CheckpointError
from phalanx.dist.checkpoint_shards import ShardPlan
from phalanx.dist.run_state import Snapshot
from phalanx.dist.world import World

logger = logging.getLogger(__name__)

TRIES = 3
PAUSE_S = 0.5  # before the second try, twice that before the third
# Trying again helps against a network file system's hiccup, not against these.
LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
NotWritten = Callable[[Path, OSError], CheckpointError]


def several_tries(work: Callable[[], T], final: Path, not_written: NotWritten) -> T:
    """What `work` returns; it is tried again where that may help.

    Raises:
        CheckpointError: It failed for good, as `not_written` puts it.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return work()
        except OSError as error:
            if error.errno in LASTING or attempt == TRIES:
                raise not_written(final, error) from error
            logger.warning("%s: %s; try %d of %d", final, error, attempt + 1, TRIES)
            time.sleep(PAUSE_S * attempt)
    raise AssertionError("not reached")


def gather_of_its_own(world: World) -> Gather:
    """A `gather_objects` over a group of its own, for a thread beside the one that trains.

    Collective: every rank must call it, and then calls what it returns equally often.
    """
    if world.world_size == 1:
        return lambda value: [value]
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)

    def gather(value: Any) -> list[Any]:
        gathered: list[Any] = [None] * world.world_size
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    return gather


class ShardedSave:
    """One save in which every rank writes a file; `begin` on rank 0, then `run` on every rank.

    The folder is published when all have written theirs. If one could not, nothing is, and all raise.
    """

    def __init__(self, folder: Path, snapshot: Snapshot, plan: ShardPlan, world: World) -> None:
        self.snapshot, self.plan, self.world = snapshot, plan, world
        self.tensors = plan.tensors
        self.final = folder / f"step-{snapshot.step}"
        # One name for all ranks, without asking: no other process may be writing here.
        self.temporary = folder / f"{self.final.name}.tmp-00000000"

    def begin(self) -> None:
        """Make the folder that all write into."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        files.sync_folder(self.temporary.parent)

    def run(self, gather: Gather, publish: Callable[[Path, Path], None], not_written: NotWritten) -> None:
        """Write this rank's file, and on rank 0 the rest.

        Collective: `gather` is called on every rank.

        Raises:
            CheckpointError: A rank could not write its part; nothing was published.
        """
        record = self._agreed(gather, lambda: several_tries(self._write_own, self.final, not_written))

        def complete() -> None:
            if self.world.is_rank_zero:
                self.snapshot.finish_shards(self.temporary, self.plan.index, dict(record))
                publish(self.temporary, self.final)

        self._agreed(gather, lambda: several_tries(complete, self.final, not_written))

    def _write_own(self) -> tuple[str, files.FileRecord]:
        path = self.temporary / self.plan.file
        path.unlink(missing_ok=True)  # what an earlier try left
        return self.plan.file, files.write_tensors(path, self.tensors, {})

    def _agreed(self, gather: Gather, work: Callable[[], T]) -> list[T]:
        """Every rank's result, or the same error on every rank."""
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        told = gather((result, None if failure is None else str(failure) or type(failure).__name__))
        problems = [(rank, problem) for rank, (_, problem) in enumerate(told) if problem is not None]
        if problems:
            if self.world.is_rank_zero:
                shutil.rmtree(self.temporary, ignore_errors=True)
            if failure is not None:
                raise failure
            raise CheckpointError(f"rank {problems[0][0]}: {problems[0][1]}")
        return [value for value, _ in told]

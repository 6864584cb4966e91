"""The checkpoint folder of one run: taken, cleared, checked to be shared, and searched."""

from __future__ import annotations

import errno
import logging
import socket
from pathlib import Path

from phalanx.dist import checkpoint_files as files
from phalanx.dist import checkpoint_folders as folders
from phalanx.dist.arguments import require_int, short
from phalanx.dist.checkpoint_errors import CheckpointError, DamagedCheckpointsError
from phalanx.dist.rank_errors import on_rank_zero
from phalanx.dist.world import World, gather_objects

logger = logging.getLogger(__name__)

LOCK_PATIENCE_S = 5.0
PROBE_PATIENCE_S = 5.0


class RunFolder:
    """Where one run keeps its checkpoints. What is written goes through rank 0.

    Args:
        folder: Made when it is taken.
        keep: How many of the newest to keep; None or -1 keeps all.

    Raises:
        ValueError: There is a file in its place, or `keep` is out of range.
    """

    def __init__(self, folder: Path, keep: int | None) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder}: a file is where the checkpoint folder should be")
        self.folder, self.keep = folder, _checked_keep(keep)
        self.damaged: set[int] = set()
        self._lock: folders.FolderLock | None = None
        self._ready = self._checked_nodes = False  # the same on every rank

    def take(self, world: World, to_write: bool) -> None:
        """Once, before the folder is used: take its lock, clear what dead runs left, ask whether nodes share it."""

        if self._ready:
            return
        self._ready = on_rank_zero(world, lambda: self._take_folder(to_write))
        if not self._checked_nodes and self._ready and world.local_world_size < world.world_size:
            self._refuse_private_folders(world)
            self._checked_nodes = True

    def _take_folder(self, to_write: bool) -> bool:
        """Lock and tidy the folder, on rank 0; False when it can only be read, which is enough to restore."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = folders.FolderLock(self.folder, LOCK_PATIENCE_S)
            cleared = folders.clear_leftovers(self.folder)
        except OSError as error:
            if not to_write and error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
                return False
            raise CheckpointError(
                f"{self.folder}: not usable for checkpoints: {error.strerror or error}.\n"
                "Fix: choose a folder that rank 0 can write to"
            ) from error
        if cleared:
            logger.info("%s: removed %s, left by a run that was ended", self.folder, ", ".join(cleared))
        return True

    def _refuse_private_folders(self, world: World) -> None:
        probe = on_rank_zero(world, lambda: folders.write_probe(self.folder))
        here = folders.sees_probe(self.folder, probe, PROBE_PATIENCE_S)
        answers = gather_objects((socket.gethostname(), world.rank, here))
        if world.is_rank_zero:
            (self.folder / probe).unlink(missing_ok=True)
        blind = [f"{host} (rank {rank})" for host, rank, seen in answers if not seen]
        if blind:
            raise CheckpointError(
                f"{self.folder.resolve()}: what rank 0 writes on {answers[0][0]} is not there on {', '.join(blind)}. "
                "A resumed run would find no checkpoint on those.\nFix: choose a folder on storage that all nodes share"
            )

    def choose(self) -> tuple[str | None, list[str]]:
        """The newest checkpoint that is whole to the last bit, and the damaged ones passed over."""
        damaged: list[str] = []
        present = folders.steps_in(self.folder)
        for number, path in reversed(present):
            problems = files.find_problems(path)
            if not problems:
                return path.name, damaged
            self.damaged.add(number)
            damaged.append(f"{path.name} ({', '.join(problems)})")
        if present:
            raise DamagedCheckpointsError(
                f"{self.folder}: all {len(present)} checkpoints are damaged: {'; '.join(damaged)}.\n"
                "Starting over would in time delete them. Fix: put a good copy back, or use another folder to start over"
            )
        return None, []

    def publish(self, temporary: Path, final: Path) -> None:
        """Give a complete checkpoint its name and delete what is older than wanted; on rank 0."""
        step = int(final.name.removeprefix("step-"))
        folders.publish(temporary, final, known_damaged=step in self.damaged)
        self.damaged.discard(step)
        folders.keep_newest(self.folder, self.keep, step, self.damaged)

    def let_go(self) -> None:
        """Give the lock back; `take` takes it again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._ready = False


def _checked_keep(keep: int | None) -> int | None:
    if keep is None or (isinstance(keep, int) and keep == -1):
        return None
    try:
        return require_int("keep", keep, at_least=1)
    except ValueError:
        raise ValueError(
            f"keep={short(keep)}: at least 1, or None (or -1) to keep every checkpoint"
        ) from None

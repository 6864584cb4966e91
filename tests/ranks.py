"""Real ranks for tests: forked from a server that holds torch, joined on gloo through a file."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo: the first optimizer of a process imports it, over a second for every rank.
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])


class RankError(AssertionError):
    """A rank raised: the message is that rank's own traceback."""


def _rank_main(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    backend: str | None,
    meeting_file: str,
    timeout_s: float,
    environ: Mapping[str, str],
    folder: str,
) -> None:
    os.environ.update(environ)
    os.chdir(folder)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.manual_seed(torch.seed())  # a forked rank must not share its parent's generator
        if backend is not None:
            dist.init_process_group(
                backend,
                init_method=f"file://{meeting_file}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        value = function(rank, world_size, *args)
        pipe.send(("value", value))
        if backend is not None and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        pipe.close()
        os._exit(1)
    pipe.close()


class RankRunner:
    """Callable fixture: ``run_ranks(function, *args, world_size=2)`` returns one value per rank.

    ``function(rank, world_size, *args)`` must be a module-level function that returns plain values.
    A rank that raises fails the test with its traceback and the rest are ended; a hang fails after
    ``timeout_s`` and names the ranks still running. ``backend=None`` makes no process group (for
    tests of ``init_world`` itself); ``environ`` is a mapping, or a function of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int,
        backend: str | None = "gloo",
        timeout_s: float = 60.0,
        environ: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    ) -> list[Any]:
        self._count += 1
        meeting_file = self._folder / f"meeting-{self._count}"
        pipes: list[Connection] = []
        ranks = []
        for rank in range(world_size):
            extra = environ(rank) if callable(environ) else (environ or {})
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank_main,
                args=(
                    theirs, function, args, rank, world_size, backend,
                    str(meeting_file), timeout_s, dict(extra), str(self._folder),
                ),
            )  # fmt: skip
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        patience_s = 0.0
        try:
            values = self._collect(pipes, timeout_s)
            patience_s = 10.0  # all have answered: let them leave their group and exit by themselves
            return values
        finally:
            for process in ranks:
                process.join(timeout=patience_s)
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()
            meeting_file.unlink(missing_ok=True)

    def _collect(self, pipes: list[Connection], timeout_s: float) -> list[Any]:
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(values) < len(pipes) and not errors:
            running = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in values}
            ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"still running after {timeout_s} s: ranks {sorted(running.values())}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = running[pipe]
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "error", "the rank died without a traceback (killed by a signal?)"
                if kind == "error":
                    errors[rank] = value
                else:
                    values[rank] = value
        if errors:
            raise RankError("\n".join(f"rank {rank} raised:\n{text}" for rank, text in errors.items()))
        return [values[rank] for rank in range(len(pipes))]

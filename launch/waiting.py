"""`--gpus auto:N --wait`: a queue of the jobs of all users of this node that wait for idle GPUs."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from pathlib import Path
from types import TracebackType

from phalanx.dist import gpu_locks
from phalanx.launch import values as checked
from phalanx.launch.node_gpus import NodeGpus
from phalanx.launch.values import Values
from phalanx.tools.usage import CannotFinish, UsageMistake

_LOOK_AGAIN_S, _SAY_AGAIN_S = 1.0, 60.0
_TICKET = re.compile(r"waiting-(\d+)\.lock")
#: With these a job has several nodes: each would hold its own GPUs while it waits for the others'.
_NOT_WITH = ("hosts", "hostfile", "local_nodes", "emit")


def check(given: Values, *, several_nodes: bool = False) -> None:
    """Refuse ``--wait`` where it cannot work.

    Raises:
        UsageMistake: There is nothing to wait for, or the job has several nodes.
    """
    if "wait" not in given:
        if "wait_timeout_s" in given:
            raise UsageMistake(
                f"{given['wait_timeout_s']} without --wait: the job would not wait at all.",
                fix="--gpus auto:2 --wait --wait-timeout-s 3600",
            )
        return
    for key in _NOT_WITH:
        if key in given:
            raise UsageMistake(
                f"{given[key]} with --wait: jobs wait for the GPUs of this node only.",
                fix="leave --wait out, or start the job on one node",
            )
    if several_nodes or checked.nnodes(given)[1] > 1:
        what = given.get("nnodes", "a job of several nodes")
        raise UsageMistake(
            f"{what} with --wait: each node would hold its GPUs while it waits for the other nodes'.",
            fix="leave --wait out",
        )
    if "gpus" not in given or not given["gpus"].text.strip().lower().startswith("auto"):
        asked = f"{given['gpus']} with --wait" if "gpus" in given else "--wait without --gpus"
        raise UsageMistake(f"{asked}: only idle GPUs are waited for.", fix="--gpus auto:2 --wait")


class Waiting:
    """A place in the queue; a context, left when the GPUs are held or the wait is over.

    First come, first served: a job looks for GPUs when nobody who came before it waits any more, whatever number
    of GPUs each wants. A place is a locked file, so it is free as soon as its process has ended in any way.
    """

    def __init__(self, given: Values, folder: Path | None = None) -> None:
        check(given)
        self._given, self._folder = given, folder or gpu_locks.default_folder()
        word = given["gpus"].text.strip().lower().removeprefix("auto").removeprefix(":")
        self._wanted = int(word) if word.isdecimal() else 1  # what is no number is refused by `choose`
        self._timeout_s = checked.seconds(given, "wait_timeout_s", zero=False)
        self._began = time.monotonic()
        self._said: float | None = None

    def __enter__(self) -> Waiting:
        try:
            door = gpu_locks.open_lock_file("queue", self._folder)
            try:
                fcntl.flock(door, fcntl.LOCK_EX)  # one at a time takes a number
                self._number = max(_numbers(self._folder), default=0) + 1
                self._ticket = gpu_locks.open_lock_file(_name(self._number), self._folder)
                fcntl.flock(self._ticket, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(door)
        except OSError as error:
            raise CannotFinish(
                f"--wait: no place in the queue of this node could be taken in {self._folder}: {error.strerror}.",
                fix="a TMPDIR that all users of the node can write to, or leave --wait out",
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gpu_locks.lock_file(_name(self._number), self._folder).unlink(missing_ok=True)
        os.close(self._ticket)

    def is_over(self, node: NodeGpus) -> bool:
        """Whether it is this job's turn and the GPUs are idle; otherwise some time has passed.

        Raises:
            UsageMistake: The node has fewer GPUs than that.
            CannotFinish: The time is up.
        """
        if self._wanted > len(node.visible):
            raise UsageMistake(
                f"{self._given['gpus']} with --wait: {len(node.visible)} GPUs are visible here, "
                "so the wait would never end.",
                fix=f"--gpus auto:{len(node.visible)} --wait" if node.visible else "--gpus none",
            )
        ahead = self._ahead()
        idle = sum(not gpu.users for gpu in node.visible)
        if not ahead and idle >= self._wanted:
            return True
        self._tell(node, ahead, idle)
        time.sleep(_LOOK_AGAIN_S)
        return False

    def _ahead(self) -> int:
        """How many came before this job and still wait."""
        return sum(
            _is_waiting(number, self._folder) for number in _numbers(self._folder) if number < self._number
        )

    def _tell(self, node: NodeGpus, ahead: int, idle: int) -> None:
        now = time.monotonic()
        plural = "s" * (self._wanted > 1)
        held = "; ".join(f"GPU {gpu.index} by {', '.join(gpu.users)}" for gpu in node.visible if gpu.users)
        state = f"{idle} of {len(node.visible)} idle" + f", in use: {held}" * bool(held)
        queue = f"; {ahead} job{'s' * (ahead > 1)} came first" * bool(ahead)
        if self._timeout_s is not None and now - self._began >= self._timeout_s:
            raise CannotFinish(
                f"{self._given['gpus']} with --wait: no {self._wanted} idle GPU{plural} within "
                f"{self._timeout_s:g} s: {state}{queue}.",
                fix="a longer --wait-timeout-s, or fewer GPUs",
            )
        if self._said is None or now - self._said >= _SAY_AGAIN_S:
            self._said = now
            print(
                f"phalanx run: waiting for {self._wanted} idle GPU{plural}: {state}{queue}.",
                file=sys.stderr,
                flush=True,
            )


def _name(number: int) -> str:
    return f"waiting-{number:08d}"


def _numbers(folder: Path) -> list[int]:
    found = map(_TICKET.fullmatch, os.listdir(folder))
    return [int(match[1]) for match in found if match]


def _is_waiting(number: int, folder: Path) -> bool:
    """Whether a process holds that place. A shared lock, so that two who look do not see each other."""
    try:
        handle = os.open(
            gpu_locks.lock_file(_name(number), folder), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        )
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False

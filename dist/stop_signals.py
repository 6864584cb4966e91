"""Being asked to stop: signals set a flag, and ranks agree on the step at which they all act on it."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PACE_S = 0.25  # ranks ask one another this often whether to stop
MAX_REST = 256  # calls between two rounds at the most, should steps become much slower
_REPEAT_S = 1.0  # launchers and schedulers often send the same signal twice at once


class StopFlag:
    """Remembers that a signal asked to stop.

    The handler that was there before is kept, called after, and put back by `close`. A second SIGINT
    or SIGTERM, more than a second after the first, acts as it would have without us.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._first_at = 0.0
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take over the stop signals; off the main thread, where Python cannot, nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            previous = signal.getsignal(number)
            # None: a handler that is not Python's. Ignored on purpose (nohup, a background job) stays so.
            if previous is not None and previous != signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._handle)

    def close(self) -> None:
        """Put the previous handlers back where ours are still in place."""
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number, signal.SIG_DFL)
        now = time.monotonic()
        again = self.signal != 0 and now - self._first_at > _REPEAT_S and number != signal.SIGUSR1
        if os.getpid() != self._pid or again:  # a forked child has no steps to end
            signal.signal(number, previous)
            os.kill(os.getpid(), number)
            return
        if not self.signal:
            self.signal, self._first_at = number, now
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


class DelayedMax:
    """The largest value any rank passed, some calls later: the all-reduce runs while steps compute.

    Where calls are short, most of them do nothing: after each round the ranks rest for as many calls as
    fit into ``pace_s`` by the slowest rank's clock, which the same all-reduce tells them all. So rounds
    cost next to nothing, every rank starts them at the same calls, and an answer is at most two rounds away.
    With one rank the value comes back at once. Collective: every rank calls it equally often.

    Args:
        group: Of all ranks; None for one rank.
        device: Where the value is reduced.
        pace_s: Seconds between rounds, about.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, pace_s: float = PACE_S) -> None:
        self._group = group
        self._pace_us = int(pace_s * 1e6)
        self._numbers = torch.zeros(2, dtype=torch.int64, device=device)  # value, microseconds a call
        self._work: dist.Work | None = None
        self._rest = 0
        self._calls = 0  # since the last round began
        self._began_at = time.monotonic()

    def __call__(self, value: int) -> int:
        """Pass this rank's value (again until it is answered), get the agreed one of an earlier call, or 0.

        Raises:
            RuntimeError: A rank is gone.
        """
        if self._group is None:
            return value
        self._calls += 1
        agreed = 0
        if self._work is not None:
            self._work.wait()
            self._work = None
            agreed, microseconds = (int(number) for number in self._numbers.tolist())
            self._rest = min(MAX_REST, self._pace_us // max(1, microseconds))
        if self._rest and not agreed:
            self._rest -= 1
            return agreed
        now = time.monotonic()
        self._numbers[0] = value
        self._numbers[1] = int((now - self._began_at) / self._calls * 1e6)
        self._calls, self._began_at = 0, now
        self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def finish(self) -> None:
        """Wait for the all-reduce under way, before another use of the group that must not overtake it."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def agreement_for(world_size: int, device: torch.device) -> DelayedMax:
    """A `DelayedMax` over all ranks, on the CPU wherever the group can: reading it must not wait for a GPU.

    Collective: with a group that is NCCL alone, a gloo group is made for it.
    """
    cpu = torch.device("cpu")
    if world_size == 1 or not dist.is_initialized():
        return DelayedMax(None, cpu)
    if "gloo" in dist.get_backend_config() or device.type == "cpu":
        return DelayedMax(dist.group.WORLD, cpu)
    made = dist.new_group(backend="gloo")
    assert isinstance(made, dist.ProcessGroup)
    return DelayedMax(made, cpu)

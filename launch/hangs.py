"""`--hang-timeout-s`: notices that no rank makes progress, says where each stands, and ends the attempt.

Progress is a new stack of a rank's main thread, more bytes in a log, or a rank's end. Each rank writes its stack
to a file of its own when it gets `STACK_SIGNAL`: by faulthandler, which does not need the interpreter's lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.launch.agent import Outcome, RankStart, Supervisor
from phalanx.launch.failures import Failure, write_json
from phalanx.launch.stacks import Stack, collective, groups, last_stack, stragglers
from phalanx.launch.worker import STACK_SIGNAL, STACKS_VARIABLE

_SHOWN_FRAMES = 8


def picture(stacks: Mapping[int, Stack | None], late: Sequence[int]) -> str:
    """Where each rank stands, equal stacks once; the ranks of ``late`` are marked."""
    lines = []
    for group in groups({rank: stack or () for rank, stack in stacks.items()}):
        name = collective(group.stack)
        at = (
            f"in {name}"
            if name
            else "at work, not in a collective"
            if group.stack
            else "ended, or without a stack"
        )
        mark = " <- the others wait for it" if set(group.ranks) & set(late) else ""
        lines.append(f"rank {', '.join(map(str, group.ranks))}: {at}{mark}")
        lines += [f"    {frame}" for frame in group.stack[:_SHOWN_FRAMES]]
    return "\n".join(lines)


def hang_json(stacks: Mapping[int, Stack | None], late: Sequence[int], timeout_s: float) -> dict[str, Any]:
    """The content of ``hang.json``."""
    found = groups({rank: stack or () for rank, stack in stacks.items()})
    return {
        "schema": 1,
        "timeout_s": timeout_s,
        "stragglers": list(late),
        "groups": [
            {"ranks": list(g.ranks), "collective": collective(g.stack), "stack": [str(f) for f in g.stack]}
            for g in found
        ],
    }


def _takes_signal(pid: int) -> bool:
    """Whether a process has a handler for `STACK_SIGNAL`: without one the signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


class WatchingSupervisor(Supervisor):
    """A `Supervisor` whose attempts also end, as failed, when no rank makes progress."""

    def start(self, ranks: Sequence[RankStart], node: int) -> dict[int, int]:
        folder = self._output.attempt_folder(self.attempt + 1)
        self._files = {r.local_rank: folder / f"rank-{r.rank}.stacks" for r in ranks} if folder else {}
        self._seen: Any = None
        self._hang: Failure | None = None
        self._since = self._next_look = time.monotonic()
        watched = [
            replace(r, environ={**r.environ, STACKS_VARIABLE: str(self._files.get(r.local_rank, ""))})
            for r in ranks
        ]
        return super().start(watched, node)

    def _judge(self) -> tuple[Outcome | None, float]:
        outcome, look_again_at = super()._judge()
        if outcome is not None or self.ended_by is not None:
            return outcome, look_again_at
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + max(0.2, self._limit_s / 8)
            if self._is_still(now):
                self._hang = self._describe()
                return "failed", now
        return None, min(look_again_at, self._next_look)

    @property
    def _limit_s(self) -> float:
        return self._spec.hang_timeout_s or float("inf")

    def _is_still(self, now: float) -> bool:
        """Compare with the last look, and ask the ranks for their stacks anew."""
        self._stacks = {self._ranks[local].rank: self._take_stack(local) for local in self._pids.values()}
        sizes = {log: log.stat().st_size for log in self._spec.log_dir.rglob("rank-*.log")}
        seen = (self._stacks, sizes)
        if seen != self._seen or not all(stack is None or stack for stack in self._stacks.values()):
            self._seen, self._since = seen, now
        return now - self._since >= self._limit_s

    def _take_stack(self, local_rank: int) -> Stack | None:
        """What a rank wrote since the last look; None when it has ended."""
        if local_rank in self._ends:
            return None
        pid = next(pid for pid, local in self._pids.items() if local == local_rank)
        try:
            text = self._files[local_rank].read_text(errors="replace")
            os.truncate(self._files[local_rank], 0)
            if _takes_signal(pid):
                os.kill(pid, STACK_SIGNAL)
        except (OSError, KeyError):
            return ()
        return last_stack(text)

    def _describe(self) -> Failure:
        late = stragglers(self._stacks)
        try:
            write_json(self._spec.log_dir / "hang.json", hang_json(self._stacks, late, self._limit_s))
        except OSError:
            pass
        rank = late[0] if late else min(self._stacks)
        who = f"the others wait for rank {', '.join(map(str, late))}" if late else "no rank stands out"
        local = next(r.local_rank for r in self._ranks.values() if r.rank == rank)
        return Failure(
            rank=rank,
            local_rank=local,
            node=self.node,
            exit_code=1,
            signal=None,
            exception="Hang",
            message=f"no progress for {self._limit_s:g} s; {who}\n{picture(self._stacks, late)}",
            traceback="",
            time=time.time(),
            order_ns=time.monotonic_ns(),
            is_consequence=False,
        )

    def failures(self) -> list[Failure]:
        return [self._hang] if self._hang is not None else super().failures()

"""Where the time of a run's steps goes: waiting for data, for other ranks, or computing; and a trace to look into."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from phalanx.dist import gather_objects

WARM_UP_STEPS, STEPS = 5, 10
DATA, WORK = "step: data", "step: work"  # ranges in the trace
#: How collectives are called in a trace: gloo's on its threads, NCCL's kernels on the GPU.
COLLECTIVES = ("gloo:", "nccl")

Span = tuple[float, float]


class StepProfile:
    """Records 10 steps after the first 5, writes ``profile/rank-R.json``, and tells each rank's shares.

    Shares are of the recorded steps alone, without what comes between them (validation, checkpoints)::

        data            the loop waits for its next batch
        communication   a collective is under way: gloo's work, or an NCCL kernel; waiting for a slower rank is in it
        compute         the rest: forward, backward, optimizer

    A collective that hides behind the backward, as DDP's do, counts as communication. On a GPU the recorded steps wait for
    it at their ends.

    Args:
        wanted: Whether to record at all.
        folder: Of the run.
        rank: This process's.
    """

    def __init__(self, wanted: bool, folder: Path, rank: int) -> None:
        self._wanted, self._trace = wanted, folder / "profile" / f"rank-{rank}.json"
        self._profiler: Any = None
        self._seen = 0
        self._shares: dict[str, float] = {}

    def data(self) -> contextlib.AbstractContextManager[Any]:
        """Around the wait for a batch."""
        return contextlib.nullcontext() if self._profiler is None else record_function(DATA)

    def work(self) -> contextlib.AbstractContextManager[Any]:
        """Around what is done with a batch."""
        return contextlib.nullcontext() if self._profiler is None else record_function(WORK)

    def finish_work(self) -> None:
        """At the end of a batch's work, within it: whatever the GPU has still to do belongs to it."""
        if self._profiler is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    def step_done(self) -> None:
        """After a step."""
        if not self._wanted:
            return
        self._seen += 1
        if self._seen == WARM_UP_STEPS:
            self._start()
        elif self._seen == WARM_UP_STEPS + STEPS:
            self.stop()

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notes are for its makers
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop(self) -> None:
        """Write the trace and work out the shares; again, it does nothing."""
        if self._profiler is None:
            return
        profiler, self._profiler, self._wanted = self._profiler, None, False
        profiler.stop()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._trace))
        self._shares = shares(
            [(event.name, event.time_range.start, event.time_range.end) for event in profiler.events()]
        )
        self._shares["steps"] = min(self._seen - WARM_UP_STEPS, STEPS)

    def told(self) -> list[str]:
        """Lines of a table of all ranks' shares; none without a profile. Collective."""
        asked = self._wanted or bool(self._shares)
        self.stop()
        found: list[dict[str, float]] = gather_objects(self._shares)
        if not asked:
            return []
        if not all(each.get("total_us") for each in found):
            return [f"no profile: it begins after {WARM_UP_STEPS} steps, and the run had no more"]
        lines = [f"profile of {found[0]['steps']} steps   data  communication  compute   ms a step"]
        for rank, each in enumerate(found):
            total, steps = each["total_us"], each["steps"]
            lines.append(
                f"{f'rank {rank}':20} {each['data_us'] / total:6.1%}  {each['communication_us'] / total:13.1%}  "
                f"{each['compute_us'] / total:7.1%}  {total / steps / 1000:10.2f}"
            )
        return [*lines, f"traces     {self._trace.parent}/rank-*.json (https://ui.perfetto.dev shows them)"]


def shares(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Microseconds of the recorded steps by kind, from (name, start, end) of a trace's events.

    >>> shares([("step: data", 0, 2), ("step: work", 2, 10), ("gloo:all_reduce", 4, 6), ("nccl:x", 5, 7), ("gloo:y", 9, 15)])
    {'data_us': 2, 'communication_us': 4, 'compute_us': 4, 'total_us': 10}
    """
    kinds: dict[str, list[Span]] = {DATA: [], WORK: [], "collective": []}
    for name, start, end in events:
        if name in kinds:
            kinds[name].append((start, end))
        elif name.startswith(COLLECTIVES):
            kinds["collective"].append((start, end))
    work = _merged(kinds[WORK])
    data_us = _length(_merged(kinds[DATA]))
    communication_us = _overlap(work, _merged(kinds["collective"]))
    return {
        "data_us": data_us,
        "communication_us": communication_us,
        "compute_us": _length(work) - communication_us,
        "total_us": data_us + _length(work),
    }


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Sorted, with what overlaps put together."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _overlap(ours: Sequence[Span], theirs: Sequence[Span]) -> float:
    """How long both are under way; each sorted, without overlaps."""
    total: float = 0
    place = 0
    for start, end in ours:
        while place < len(theirs) and theirs[place][1] <= start:
            place += 1
        here = place
        while here < len(theirs) and theirs[here][0] < end:
            total += min(end, theirs[here][1]) - max(start, theirs[here][0])
            here += 1
    return total

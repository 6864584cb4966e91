"""Why a run failed, by what its ranks printed: `phalanx explain` on the logs that are at hand, within limits.

The report of a failure must come whatever happens here: little is read, for a short time, and an error
of ours becomes one line.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.launch.failures import Failure
    from phalanx.tools.explain import Explanation, Source

_LIMIT_S = 2.0
_OURS = re.compile(r"^failure report:\d+: (?:First failure: rank \d+ \([^)]*\): )?")
_HEAD_BYTES, _TAIL_BYTES = 256 * 1024, 2 * 1024 * 1024  # of one rank's log
_MOST_LOGS = 64


def explain_run(failures: Sequence[Failure], log_dir: Path | None) -> tuple[list[dict[str, Any]], str]:
    """The diagnoses for ``failure.json``, and the text for the terminal; both empty where the cause is unknown."""
    try:
        explanation = _explain(failures, log_dir)
        if explanation.outcome != "explained":
            return [], ""
        from phalanx.tools.explain import render

        found = (
            replace(d, evidence=tuple(map(_without_our_words, d.evidence))) for d in explanation.diagnoses
        )
        explanation = replace(explanation, diagnoses=tuple(found))
        return [diagnosis.to_json() for diagnosis in explanation.diagnoses], render(explanation)
    except Exception as error:
        return [], f"(phalanx explain failed on these logs: {type(error).__name__}: {error})"


def _without_our_words(evidence: str) -> str:
    """What our own report quotes, not the report itself: it stands right above."""
    return _OURS.sub("", evidence)


def _explain(failures: Sequence[Failure], log_dir: Path | None) -> Explanation:
    from phalanx.tools.explain import explain_sources

    return explain_sources(_sources(failures, log_dir, time.monotonic() + _LIMIT_S))


def _sources(failures: Sequence[Failure], log_dir: Path | None, deadline: float) -> Iterator[Source]:
    from phalanx.tools.explain import Source

    own = socket.gethostname()
    logs = {f.rank: Path(f.log) for f in failures if f.log and f.host in ("", own)}
    if log_dir is not None:
        for path in sorted(log_dir.glob("rank-*.log")):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal():
                logs.setdefault(int(number), path)
    for rank, path in list(logs.items())[:_MOST_LOGS]:
        if time.monotonic() > deadline:
            break
        yield Source(name=path.name, data=_ends(path), rank=rank)
    # Last, so that evidence is quoted from the logs where they have it.
    yield Source(name="failure report", data=_report(failures).encode(errors="replace"))


def _report(failures: Sequence[Failure]) -> str:
    """What the launcher knows, in the words of its report, the first failure in front."""
    lines = []
    for failure in failures:
        place = f"rank {failure.rank} (local rank {failure.local_rank}, node {failure.node})"
        lines += [f"[rank{failure.rank}]: {line}" for line in failure.traceback.splitlines()]
        if failure is failures[0]:
            lines.append(f"First failure: {place}: {failure.headline}")
    return "\n".join(lines) + "\n"


def _ends(path: Path) -> bytes:
    """The start and the end of a log."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES + _TAIL_BYTES)
            size = file.seek(0, 2)
            if size <= len(head):
                return head
            file.seek(size - _TAIL_BYTES)
            return head[:_HEAD_BYTES] + b"\n" + file.read()
    except OSError:
        return b""

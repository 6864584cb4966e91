"""Which rank failed first, and why: from exit statuses, reported exceptions and what the kernel says.

Several ranks fail within milliseconds when one does. The first is decided by kind before time: a
connection that a dead peer closed, a timeout of the store, or an abort is never the cause while
another failure is there; among the rest the earliest time stamp wins, taken in the rank at the
moment of the exception.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.launch.processes import signal_name

#: What gloo, NCCL, the store and sockets say when the other side is gone.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket timeout|timed out waiting"
    r"|wait timeout after|peer (has )?closed|socket closed|connection was likely closed"
    r"|failed to (recv|send)|recvvalue|sendbytes failed|recvbytes failed|could not (send|receive) .*bytes"
    r"|read error|write error .*gloo|application timeout caused pair closure|connectfullmesh failed"
    r"|remote (process|peer|side).*(exited|gone|closed|error)|ncclremoteerror|communicator was aborted"
    r"|nccl communicator.*abort|watchdog caught collective operation timeout|store.*(timed out|timeout)"
    r"|the client socket has (failed|timed out)|monitoredbarrier|rank \d+ (failed to|did not) (join|reach|pass)",
    re.IGNORECASE,
)
_PEER_GONE_TYPES = frozenset(
    {
        "DistNetworkError",
        "DistStoreError",
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        # phalanx.dist's own, which name the rank that failed or did not come
        "RankZeroFailed",
        "RanksMissing",
    }
)
#: What phalanx.dist raises on the ranks that only heard of an error, by type.
_HEARD_OF = {
    "CheckpointError": re.compile(r"rank \d+: "),
    "RendezvousError": re.compile(r".*(the store is gone|reached nobody)", re.DOTALL),
}
#: Types whose message decides: a ValueError that speaks of a timeout is the script's own.
_MESSAGE_DECIDES = frozenset(
    {"RuntimeError", "DistBackendError", "DistError", "TimeoutError", "OSError", "Exception"}
)
_TRACEBACK_HEAD = "Traceback (most recent call last):"


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank's process ended."""

    local_rank: int
    rank: int
    pid: int
    exit_code: int  # negative: the signal that ended it
    time: float  # seconds since the epoch
    monotonic_ns: int
    max_rss_bytes: int = 0
    ended_by_us: bool = False  # a signal of ours came first


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failure, ready to be reported."""

    rank: int
    local_rank: int
    node: int
    exit_code: int | None
    signal: str | None
    exception: str | None
    message: str
    traceback: str
    time: float
    order_ns: int
    is_consequence: bool
    log: str | None = None
    last_lines: str = ""
    max_rss_bytes: int = 0
    host: str = ""  # "" in a job on one node
    is_bare_abort: bool = False  # SIGABRT without a word about another rank
    uncertainty_s: float = 0.0  # of `time` and `order_ns`, against node 0's clock

    def to_json(self) -> dict[str, Any]:
        names = (
            "rank",
            "local_rank",
            "node",
            "exit_code",
            "signal",
            "exception",
            "message",
            "traceback",
            "time",
            "log",
        )
        found = {name: getattr(self, name) for name in names}
        return found | {"host": self.host} if self.host else found

    @property
    def is_lost_node(self) -> bool:
        """Whether it stands for a whole node that went without a word."""
        return self.exit_code is None and self.signal is None and self.exception is None

    @property
    def place(self) -> str:
        """``rank 3 (local rank 1, node 1)``."""
        return f"rank {self.rank} (local rank {self.local_rank}, node {self.node})"

    @property
    def headline(self) -> str:
        """``ValueError: boom``, ``SIGSEGV: ...`` or ``exit code 3``: one line."""
        what = self.exception or self.signal
        first_line = self.message.strip().split("\n", 1)[0]
        if what is None:
            return first_line or f"exit code {self.exit_code}"
        return f"{what}: {first_line}" if first_line else what


def speaks_of_a_lost_peer(exception: str, message: str) -> bool:
    """Whether an exception is what a rank sees when another one has gone.

    >>> speaks_of_a_lost_peer("RuntimeError", "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    True
    >>> speaks_of_a_lost_peer("ValueError", "connection closed is no colour")
    False
    """
    name = exception.rpartition(".")[2]
    if name in _PEER_GONE_TYPES:
        return True
    if name in _HEARD_OF:
        return _HEARD_OF[name].match(message) is not None
    return name in _MESSAGE_DECIDES and _PEER_GONE.search(message) is not None


def read_torch_error_file(path: Path) -> dict[str, Any] | None:
    """The record that a function under torch's ``@record`` left, in the form of a worker's report."""
    try:
        content = json.loads(path.read_text())["message"]
        if isinstance(content, str):
            message, text, when = content, "", 0.0
        else:
            message = str(content["message"])
            text = str(content.get("extraInfo", {}).get("py_callstack", ""))
            when = float(content.get("extraInfo", {}).get("timestamp", 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    name, separator, rest = message.partition(": ")
    if not separator or not name.isidentifier():
        name, rest = "Exception", message
    return {
        "origin": "torch",
        "exception": name,
        "message": rest,
        "traceback": text,
        "time": when,
        "monotonic_ns": 0,
    }


def traceback_in(text: str) -> dict[str, Any] | None:
    """The last Python traceback in printed text, for programs that cannot report by themselves.

    >>> traceback_in("x\\nTraceback (most recent call last):\\n  File \\"a.py\\", line 1\\nValueError: boom\\n")["message"]
    'boom'
    """
    start = text.rfind(_TRACEBACK_HEAD)
    if start < 0:
        return None
    lines = text[start:].splitlines()
    for number, line in enumerate(lines[1:], 1):
        if line and not line[0].isspace():
            name, _, message = line.partition(": ")
            if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
                return None
            trace = "\n".join(lines[: number + 1]) + "\n"
            return {
                "origin": "log",
                "exception": name.rpartition(".")[2],
                "message": message,
                "traceback": trace,
                "time": 0.0,
                "monotonic_ns": 0,
            }
    return None


def make_failure(
    end: RankEnd,
    report: Mapping[str, Any] | None,
    *,
    node: int,
    explanation: str,
    log: Path | None,
    tail: str,
) -> Failure:
    """Put together what is known about one rank.

    Args:
        end: How its process ended.
        report: Its exception, as `worker.Reporter`, `read_torch_error_file` or `traceback_in` give it.
        node: This node's rank.
        explanation: What is known about the signal that ended it; "" without one.
        log: Its log.
        tail: The last text that it printed.
    """
    died_by_signal = end.exit_code < 0
    signame = signal_name(-end.exit_code) if died_by_signal else None
    last_lines = "" if report and report["traceback"] else "\n".join(tail.splitlines()[-20:])
    exception = message = trace = None
    when, order_ns = end.time, end.monotonic_ns
    if report is not None:
        exception, message, trace = report["exception"], report["message"], report["traceback"]
        if report["monotonic_ns"]:
            when, order_ns = report["time"], report["monotonic_ns"]
    if report is None or (died_by_signal and not end.ended_by_us):
        by_signal = -end.exit_code in (signal.SIGABRT, signal.SIGPIPE)
        is_consequence = by_signal or (
            report is not None and speaks_of_a_lost_peer(exception or "", message or "")
        )
        message = explanation or (f"exit code {end.exit_code}" if message is None else message)
        if died_by_signal and report is not None:
            message = f"{message}; before that, {report['exception']}: {report['message']}"
            exception = None
    else:
        is_consequence = speaks_of_a_lost_peer(exception or "", message or "")
    return Failure(
        rank=end.rank,
        local_rank=end.local_rank,
        node=node,
        exit_code=None if died_by_signal else end.exit_code,
        signal=None if end.ended_by_us else signame,
        exception=exception,
        message=message or "",
        traceback=trace or "",
        time=when,
        order_ns=order_ns,
        is_consequence=is_consequence,
        log=str(log) if log else None,
        last_lines=last_lines,
        is_bare_abort=-end.exit_code == signal.SIGABRT and report is None and not _PEER_GONE.search(tail),
        max_rss_bytes=end.max_rss_bytes,
    )


def by_cause(failures: Sequence[Failure]) -> list[Failure]:
    """Failures with the first cause in front: kind before time.

    An abort that said nothing of a peer comes before the connections that it closed. On several nodes, two failures whose order the clocks cannot tell are ordered by what is known of them: a bare
    exit code comes after an exception or a signal.
    """
    ordered = sorted(
        failures, key=lambda f: (f.is_consequence, f.is_consequence and not f.is_bare_abort, f.order_ns)
    )
    if not ordered:
        return []
    first = min(
        (failure for failure in ordered if _may_be_as_early(failure, ordered[0])),
        key=lambda f: (f.exception is None and f.signal is None, f.order_ns),
    )
    return [first, *(failure for failure in ordered if failure is not first)]


def _may_be_as_early(failure: Failure, first: Failure) -> bool:
    if failure.node == first.node or (failure.is_consequence, failure.is_bare_abort) != (
        first.is_consequence,
        first.is_bare_abort,
    ):
        return failure is first
    return (failure.order_ns - first.order_ns) / 1e9 <= failure.uncertainty_s + first.uncertainty_s


def format_report(failures: Sequence[Failure], *, attempts: int, failure_file: Path | None) -> str:
    """The text that ends a failed run; ``failures`` as `by_cause` sorts them."""
    first, others = failures[0], failures[1:]
    lines = ["", f"First failure: {first.place}: {first.headline}"]
    detail = first.traceback or "\n".join(first.message.strip().split("\n")[1:])
    lines += [f"  {line}" for line in detail.rstrip("\n").split("\n") if detail]
    if first.last_lines:
        lines.append("  Its last lines:")
        lines += [f"  | {line}" for line in first.last_lines.split("\n")]
    elif not first.traceback and not first.is_lost_node:
        lines.append("  It printed nothing.")
    if first.exception and first.exit_code not in (1, None):
        lines.append(f"  It left with exit code {first.exit_code}.")
    for other in others:
        later_s = (other.order_ns - first.order_ns) / 1e9
        since = (
            f"{later_s:.2f} s later" if later_s >= 0 else f"{-later_s:.2f} s before, but as a peer sees it"
        )
        lines.append(f"Then rank {other.rank} ({since}): {other.headline}")
    if first.signal == "SIGKILL":
        sizes = ", ".join(
            f"rank {f.rank} {f.max_rss_bytes / 2**30:.2f} GiB" for f in sorted(failures, key=lambda f: f.rank)
        )
        lines.append(f"Peak memory: {sizes}")
    if attempts > 1:
        lines.append(f"This was attempt {attempts} of {attempts}.")
    if first.log:
        where = (
            f" (node {first.node} is {first.host})" if first.host not in ("", socket.gethostname()) else ""
        )
        lines.append(f"Log: {first.log}{where}")
    if failure_file:
        lines.append(f"Details: {failure_file}")
    return "\n".join(lines)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is whole or absent."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=2, default=str) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def failure_json(failures: Sequence[Failure], diagnoses: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The content of ``failure.json``; ``diagnoses`` are those of `phalanx explain`."""
    return {
        "schema": 1,
        "first": failures[0].to_json(),
        "others": [failure.to_json() for failure in failures[1:]],
        "diagnoses": list(diagnoses),
    }

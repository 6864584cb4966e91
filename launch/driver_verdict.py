"""How a job on several nodes ended: one exit code, one report, failure.json and run.json."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT, SIGPIPE
from typing import TYPE_CHECKING, Any

from phalanx.launch.driver_node import DriverNode
from phalanx.launch.explained import explain_run
from phalanx.launch.failures import Failure, by_cause, failure_json, format_report, write_json
from phalanx.launch.preflight import versions
from phalanx.launch.processes import signal_name
from phalanx.launch.slurm_state import ending, node_state

if TYPE_CHECKING:
    from phalanx.launch.driver import NodesJob

_SAVED = 75
#: Of a time that is known by the driver's link alone, in seconds.
_UNCERTAINTY_S = 0.5


@dataclass(frozen=True)
class Verdict:
    """The exit code, with what the user is told about it."""

    exit_code: int
    texts: tuple[str, ...] = ()


def judge(job: NodesJob, nodes: Sequence[DriverNode], ended_by: int | None, started: float) -> Verdict:
    """Put together what the nodes said of their ends, and write it down."""
    _link_logs(job.log_dir, nodes)
    verdict = _verdict(job, nodes, ended_by)
    with suppress(OSError):
        write_json(job.log_dir / "run.json", run_json(job, nodes, started, verdict.exit_code))
    return verdict


def _verdict(job: NodesJob, nodes: Sequence[DriverNode], ended_by: int | None) -> Verdict:
    codes = [node.exit_code for node in nodes]
    failures = merged(nodes)
    if set(codes) == {0}:
        return Verdict(0)
    if not failures and set(codes) <= {0, 143, _SAVED} and _SAVED in codes:
        return Verdict(_SAVED)
    if ended_by is not None and (not failures or 1 not in codes):
        code = 141 if ended_by == SIGPIPE else 130 if ended_by == SIGINT else 143
        who = "the reader of its output" if ended_by == SIGPIPE else signal_name(ended_by)
        kept = tuple(f"phalanx run: {node.label}: {node.lost}" for node in nodes if node.lost)
        kept += (f"phalanx run: {why}.",) if (why := ending()) else ()
        return Verdict(code, (*kept, f"phalanx run: ended by {who}; no rank is left. Logs: {job.log_dir}"))
    if failures:
        return _failed(job, nodes, failures)
    worst = max((code for code in codes if code is not None), default=3)
    return Verdict(worst, (f"phalanx run: the nodes ended with exit codes {codes}. Logs: {job.log_dir}",))


def merged(nodes: Sequence[DriverNode]) -> list[Failure]:
    """All nodes' failures, the first cause in front, each rank once.

    What the agents put together among themselves has the better clocks, and so counts first; what a single node
    alone told, and a node that was lost, is put in its place by the driver's clock.
    """
    together = [f for node in nodes for f in node.failures if f.host]
    alone = [(node, f) for node in nodes for f in node.failures if not f.host]
    by_rank: dict[int, Failure] = {}
    for failure in together:
        by_rank.setdefault(failure.rank, failure)
    anchor = next(iter(by_rank.values()), None)
    zero_s = 0.0 if anchor is None else anchor.time - nodes[0].clock_offset_s - anchor.order_ns / 1e9
    for node, failure in alone:
        at_s = failure.time - node.clock_offset_s - zero_s
        placed = replace(failure, node=node.number, host=node.host.name, order_ns=int(at_s * 1e9))
        by_rank.setdefault(failure.rank, replace(placed, uncertainty_s=_UNCERTAINTY_S))
    told = {failure.node for failure in by_rank.values()}
    for node in nodes:
        if node.lost and node.number not in told:
            failure = _lost(node, nodes, zero_s)
            by_rank.setdefault(failure.rank, failure)
    return by_cause(list(by_rank.values()))


def _lost(node: DriverNode, nodes: Sequence[DriverNode], zero_s: float) -> Failure:
    before = [other.ready["spec"]["nproc_per_node"] for other in nodes[: node.number] if other.ready]
    at_s = node.lost_at or time.time()
    said = "\n".join([*node.stderr_lines()[-20:], *filter(None, [node_state(node.host.name), ending()])])
    return Failure(
        rank=sum(before),
        local_rank=0,
        node=node.number,
        exit_code=None,
        signal=None,
        exception=None,
        message=f"its node {node.label} was lost: {node.lost}" + (f"\n{said}" if said else ""),
        traceback="",
        time=at_s,
        order_ns=int((at_s - zero_s) * 1e9),
        is_consequence=False,
        host=node.host.name,
        uncertainty_s=_UNCERTAINTY_S,
    )


def _failed(job: NodesJob, nodes: Sequence[DriverNode], failures: list[Failure]) -> Verdict:
    from phalanx.launch.run import refused_arguments

    if refused_arguments(failures):
        text = (
            f"phalanx run: {job.resolved.display} does not take these arguments (it ended with exit code 2, "
            f"its message is above). Logs: {job.log_dir}"
        )
        return Verdict(2, (text,))
    diagnoses, explanation = explain_run(failures, job.log_dir)
    path: Path | None = job.log_dir / "failure.json"
    try:
        assert path is not None
        write_json(path, failure_json(failures, diagnoses))
    except OSError:
        path = None
    spec: dict[str, Any] = next((node.ready["spec"] for node in nodes if node.ready), {})
    report = format_report(failures, attempts=spec.get("max_restarts", 0) + 1, failure_file=path)
    return Verdict(1, (report, explanation) if explanation else (report,))


def _link_logs(folder: Path, nodes: Sequence[DriverNode]) -> None:
    """Every rank's newest log beside run.json too, where this machine sees it."""
    for node in nodes:
        for log in sorted((folder / f"node-{node.number}").glob("rank-*.log")):
            with suppress(OSError):
                link = folder / log.name
                link.unlink(missing_ok=True)
                link.symlink_to(Path(log.parent.name, log.name))


def run_json(job: NodesJob, nodes: Sequence[DriverNode], started: float, code: int | None) -> dict[str, Any]:
    """The content of ``run.json``: that of node 0, with what the nodes are."""
    import os
    import socket

    first: dict[str, Any] = next((node.ready["spec"] for node in nodes if node.ready), {})
    return {
        "schema": 1,
        "spec": {**first, "log_dir": str(job.log_dir), "command_line": list(job.command_line)},
        "versions": {name.lower(): version for name, version in versions().items()},
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nodes": [_node_json(node) for node in nodes],
        "started": started,
        "ended": None if code is None else time.time(),
        "exit_code": code,
    }


def _node_json(node: DriverNode) -> dict[str, Any]:
    return {
        "node": node.number,
        "host": node.host.name,
        "hostname": node.facts["hostname"] if node.facts else None,
        "nproc_per_node": node.ready["spec"]["nproc_per_node"] if node.ready else None,
        "exit_code": node.exit_code,
        "lost": node.lost,
    }

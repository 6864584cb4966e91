"""The launcher's part of a run: torch's elastic agent, with the guardian's processes as its workers.

`Supervisor` is the event loop: it starts an attempt, shows what the ranks print, passes signals on,
and tells how the attempt ended. `Agent` is the elastic agent on top: rendezvous, rank numbers,
restarts.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource

from phalanx.dist.rank_signs import RankSign, RankSigns
from phalanx.launch import failures
from phalanx.launch.board import Board
from phalanx.launch.evidence import Witness
from phalanx.launch.failures import Failure, RankEnd
from phalanx.launch.guardian import GuardianHandle
from phalanx.launch.interrupts import Interrupts
from phalanx.launch.output import Output
from phalanx.launch.spec import RunSpec
from phalanx.launch.worker import EXIT_SAVED

#: How long the ranks may go on after one has lost its peer, to see whose failure was the cause.
_CAUSE_PATIENCE_S = 0.5
#: How long a stop may take before the launcher itself ends what is left.
_STOP_LIMIT_S = 45.0
#: How long a stream may stay open, silent, after its rank and all its descendants are gone.
_STREAM_PATIENCE_S = 1.0

Outcome = Literal["finished", "saved", "failed", "stopped"]


class LauncherError(RuntimeError):
    """phalanx itself cannot go on; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """One rank about to start."""

    local_rank: int
    rank: int
    world_size: int
    environ: Mapping[str, str]


class Supervisor:
    """Runs attempts, one after another, and knows how the newest ended."""

    def __init__(
        self,
        spec: RunSpec,
        guardian: GuardianHandle,
        output: Output,
        interrupts: Interrupts,
        reports: socket.socket,
        witness: Witness,
    ) -> None:
        self._spec = spec
        self._guardian = guardian
        self._output = output
        self._interrupts = interrupts
        self._report_socket = reports
        self._witness = witness
        self.attempt = 0
        self.node = 0
        self.ended_by: int | None = None  # the first signal that asked for the end
        self._ranks: dict[int, RankStart] = {}  # by local rank
        self._pids: dict[int, int] = {}  # process id -> local rank, of the attempt
        self._ends: dict[int, RankEnd] = {}
        self._reports: dict[int, dict[str, Any]] = {}  # by local rank
        self._stopped = False
        self._stop_asked_ns: int | None = None
        self._explanations: dict[int, str] = {}
        self._kill_at: float | None = None
        self._signs = RankSigns()
        self._unheard: set[tuple[int, int]] = set()
        self.board = Board()
        self._has_news = False

    # ----------------------------------------------------------------- an attempt

    def start(self, ranks: Sequence[RankStart], node: int) -> dict[int, int]:
        """Start the ranks of the next attempt; returns their process ids by local rank."""
        self.attempt += 1
        self.node = node
        self._ranks = {rank.local_rank: rank for rank in ranks}
        self._pids, self._ends, self._reports, self._explanations = {}, {}, {}, {}
        self._stopped, self._stop_asked_ns, self._kill_at = False, None, None
        for rank in ranks:
            streams = self._output.open_rank(self.attempt, rank.local_rank, rank.rank, rank.world_size)
            environ = {**rank.environ, "TORCHELASTIC_ERROR_FILE": str(self._torch_error_file(rank) or "")}
            self._guardian.start(rank.local_rank, environ, streams)
            for fd in streams:
                os.close(fd)
        while len(self._pids) < len(ranks):
            self.turn(1.0)
        self._signs.show(self._sign(pid, self._ranks[local_rank]) for pid, local_rank in self._pids.items())
        return {local_rank: pid for pid, local_rank in self._pids.items()}

    def _sign(self, pid: int, rank: RankStart) -> RankSign:
        """What `phalanx gpus` shall say of a rank's process."""
        named = self._spec.rdzv_id not in ("", "none")
        return RankSign(
            pid=pid,
            rank=rank.rank,
            local_rank=rank.local_rank,
            world_size=rank.world_size,
            job=self._spec.rdzv_id if named else self._spec.log_dir.absolute().name,
        )

    def _torch_error_file(self, rank: RankStart) -> Path | None:
        folder = self._output.attempt_folder(self.attempt)
        return folder / f"rank-{rank.rank}.error.json" if folder else None

    def wait(self, timeout_s: float) -> Outcome | None:
        """Serve the ranks until the attempt has ended; None when ``timeout_s`` is over or the board has news."""
        deadline = time.monotonic() + timeout_s
        while True:
            outcome, look_again_at = self._judge()
            if outcome is not None:
                return outcome
            now = time.monotonic()
            if now >= deadline or self._has_news:
                self._has_news = False
                return None
            self.turn(min(deadline, look_again_at) - now)

    def _judge(self) -> tuple[Outcome | None, float]:
        """The outcome if there is one by now, else when to look again at the latest."""
        now = time.monotonic()
        all_ended = len(self._ends) == len(self._ranks)
        if self.ended_by is not None:
            if all_ended:
                return "stopped", now
            if self._kill_at is not None and now >= self._kill_at:
                return "stopped", now
            return None, self._kill_at or float("inf")
        codes = {end.exit_code for end in self._ends.values()}
        if codes - {0, EXIT_SAVED}:
            failing = [end for end in self._ends.values() if end.exit_code not in (0, EXIT_SAVED)]
            patience_ends = min(end.monotonic_ns for end in failing) / 1e9 + _CAUSE_PATIENCE_S
            if all_ended or now >= patience_ends or not all(self._looks_caused(end) for end in failing):
                return "failed", now
            return None, patience_ends
        if all_ended:
            return ("saved" if EXIT_SAVED in codes else "finished"), now
        limits = [
            report["monotonic_ns"] / 1e9 + self._spec.grace_s
            for local_rank, report in self._reports.items()
            if local_rank not in self._ends and report["origin"] != "thread"
        ]
        if limits and now >= min(limits):
            return "failed", now  # it raised, but something keeps it from ending
        if EXIT_SAVED in codes:
            first_saved = min(end.monotonic_ns for end in self._ends.values() if end.exit_code == EXIT_SAVED)
            limits.append(first_saved / 1e9 + self._spec.grace_s)
            if now >= limits[-1]:
                return "saved", now
        return None, min(limits, default=float("inf"))

    def _looks_caused(self, end: RankEnd) -> bool:
        """Whether an end may well be the consequence of another rank's."""
        if end.exit_code in (-signal.SIGABRT, -signal.SIGPIPE):
            return True
        report = self._reports.get(end.local_rank)
        return report is not None and failures.speaks_of_a_lost_peer(report["exception"], report["message"])

    def stop(self) -> None:
        """End every rank and descendant, and show the rest of what they printed."""
        if self._stopped or not self._ranks:
            return
        self._stop_asked_ns = time.monotonic_ns()
        self._guardian.stop()
        self._await_stop()
        self._signs.close()
        self._read_to_the_end()
        self._output.close_rank_streams()
        self._output.restore_terminal()
        self.show_all()

    def _await_stop(self) -> None:
        deadline = time.monotonic() + _STOP_LIMIT_S
        while not self._stopped:
            if time.monotonic() > deadline:
                raise LauncherError("the guardian process did not answer a request to end all ranks.")
            self.turn(1.0)

    def _read_to_the_end(self) -> None:
        """Read every stream until it closes; one that a stranger holds open, until it is silent."""
        signals, quiet_since = self._interrupts.count, time.monotonic()
        while self._output.is_open and self._interrupts.count <= signals:
            if self.turn(0.05) or not self._output.is_shown:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > _STREAM_PATIENCE_S:
                return

    def show_all(self) -> None:
        """Pass on what is still held back; a second signal gives up on a reader that does not read."""
        signals = self._interrupts.count
        while not self._output.is_shown and self._interrupts.count <= signals:
            self.turn(0.1)

    # ----------------------------------------------------------------- the event loop

    def turn(self, timeout_s: float) -> bool:
        """One turn of the event loop; returns whether a rank's stream or our own output moved."""
        poll = select.poll()
        interests = self._output.interests()
        for fd, events in interests.items():
            poll.register(fd, events)
        for source in (self._guardian, self._report_socket, self._interrupts, self.board):
            poll.register(source.fileno(), select.POLLIN)
        # Rounded up: a time-out that is a little short would make the loop spin.
        milliseconds = None if timeout_s == float("inf") else max(0, int(timeout_s * 1000) + 1)
        moved = False
        for fd, _ in poll.poll(milliseconds):
            if fd in interests:
                self._output.handle(fd)
                moved = True
            elif fd == self._interrupts.fileno():
                for signum in self._interrupts.arrived():
                    self._on_signal(signum)
            elif fd == self._report_socket.fileno():
                self._read_reports()
            elif fd == self.board.fileno():
                self.board.take_news()
                self._has_news = True
            else:
                for event in self._guardian.events():
                    self._on_event(event)
        if self._output.closed_by_reader and self.ended_by is None:
            self.end(signal.SIGPIPE, signal.SIGTERM)
        return moved

    def _read_reports(self) -> None:
        size = struct.calcsize("3i")
        while True:
            try:
                data, ancillary, _, _ = self._report_socket.recvmsg(
                    256 * 1024, socket.CMSG_SPACE(size), socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid = struct.unpack("3i", content[:size])[0]
                    if pid in self._pids:  # anybody may send to an abstract address
                        self._keep_report(self._pids[pid], json.loads(data))

    def _keep_report(self, local_rank: int, report: dict[str, Any]) -> None:
        """The first report of a rank counts, but one that ends it replaces one of a mere thread."""
        about_worker = self._witness.explain_worker(report["message"] + report["traceback"])
        if about_worker:
            head, separator, rest = report["message"].partition("\n")
            report = {**report, "message": f"{head} ({about_worker}){separator}{rest}"}
        known = self._reports.get(local_rank)
        if known is None or (known["origin"] == "thread" and report["origin"] == "main"):
            self._reports[local_rank] = report

    def _on_event(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            self._pids[event["pid"]] = event["local_rank"]
        elif kind == "exit":
            self._read_reports()  # sent before the exit, so it is there
            self._on_exit(event)
        elif kind == "stopped":
            self._stopped = True
            if event["left"]:
                raise LauncherError(f"processes {event['left']} cannot be ended (stuck in the kernel?).")
        elif kind == "unheard":
            self._say_unheard(event["local_rank"], event["signum"])
        elif kind == "cannot-start":
            raise LauncherError(f"a rank's process cannot be started: {event['error']}.")
        elif kind == "gone":
            raise LauncherError("its guardian process was killed from outside; all ranks were ended.")

    def _on_exit(self, event: Mapping[str, Any]) -> None:
        local_rank, exit_code = event["local_rank"], event["exit_code"]
        asked = self._stop_asked_ns is not None and event["monotonic_ns"] >= self._stop_asked_ns
        by_us = asked and exit_code in (-signal.SIGKILL, -signal.SIGTERM)
        self._ends[local_rank] = RankEnd(
            local_rank=local_rank,
            rank=self._ranks[local_rank].rank,
            pid=event["pid"],
            exit_code=exit_code,
            time=event["time"],
            monotonic_ns=event["monotonic_ns"],
            max_rss_bytes=event["max_rss_bytes"],
            ended_by_us=by_us or (self.ended_by is not None and exit_code < 0),
        )
        if exit_code < 0 and not self._ends[local_rank].ended_by_us:
            self._explanations[local_rank] = self._witness.explain(-exit_code, event["pid"])

    # ----------------------------------------------------------------- signals

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGWINCH:
            self._output.resize()
            self._guardian.signal(signum)
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            self._guardian.signal(signum, careful=True)
        elif signum == signal.SIGTSTP:
            self._guardian.signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._guardian.signal(signal.SIGCONT)
        elif self.ended_by is None:
            self.end(signum, signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
        elif signum == signal.SIGINT and self._interrupts.is_deliberate:
            self._kill_at = time.monotonic()

    def end(self, reason: int, passed_on: int = signal.SIGTERM) -> None:
        """Ask all ranks to end; they have ``grace_s`` seconds."""
        self.ended_by = reason
        self._kill_at = time.monotonic() + self._spec.grace_s
        self._guardian.signal(passed_on)

    def _say_unheard(self, local_rank: int, signum: int) -> None:
        name = signal.Signals(signum).name
        if (local_rank, signum) not in self._unheard:
            self._unheard.add((local_rank, signum))
            rank = self._ranks[local_rank].rank
            self._output.say(f"phalanx run: {name} was not passed on to rank {rank}: it would have ended it.")

    # ----------------------------------------------------------------- how it ended

    @property
    def all_saved(self) -> bool:
        """Whether every rank left with the exit code for "saved"."""
        ends = self._ends.values()
        return len(ends) == len(self._ranks) > 0 and all(end.exit_code == EXIT_SAVED for end in ends)

    def failures(self) -> list[Failure]:
        """The newest attempt's failures, the cause first; call after `stop`."""
        found = []
        for local_rank, end in self._ends.items():
            report = self._report_of(local_rank, end)
            if end.exit_code in (0, EXIT_SAVED) or (end.ended_by_us and report is None):
                continue
            found.append(
                failures.make_failure(
                    end,
                    report,
                    node=self.node,
                    explanation=self._explanations.get(local_rank, ""),
                    log=self._output.log_path(local_rank),
                    tail=self._output.tail(local_rank),
                )
            )
        return failures.by_cause(found)

    def _report_of(self, local_rank: int, end: RankEnd) -> dict[str, Any] | None:
        report = self._reports.get(local_rank)
        if report is not None and not (report["origin"] == "thread" and end.ended_by_us):
            return report
        error_file = self._torch_error_file(self._ranks[local_rank])
        found = failures.read_torch_error_file(error_file) if error_file else None
        if found is None and end.exit_code == 1:
            found = failures.traceback_in(self._output.tail(local_rank))
        return found


class Agent(SimpleElasticAgent):
    """torch's elastic agent whose workers are the guardian's ranks.

    The loop is its own: it wakes up on events in place of sleeping between looks, and knows ranks that
    saved and left.
    """

    def __init__(
        self, worker_spec: WorkerSpec, spec: RunSpec, supervisor: Supervisor, interrupts: Interrupts
    ) -> None:
        super().__init__(worker_spec)
        self._spec = spec
        self._supervisor = supervisor
        self._interrupts = interrupts
        self._output = supervisor._output
        self.outcome: Outcome | None = None
        self.failures: list[Failure] = []  # those of the last attempt, on all nodes
        self.is_reporter = True  # whether this node tells the whole story of a failure
        self.attempts = spec.max_restarts + 1  # how many there were, when the run has failed

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            result = self._monitor_workers(group, float("inf"))
            group.state = result.state
            if result.state == WorkerState.HEALTHY:
                continue
            if result.state != WorkerState.FAILED or not self._may_restart():
                return result
            self._say_restart()
            self._remaining_restarts -= 1
            self._restart_workers(group)

    def _may_restart(self) -> bool:
        return self._remaining_restarts > 0 and self._supervisor.ended_by is None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._store = worker_group.store = None  # its server's port may be wanted again
        if self._spec.nnodes_max == 1:
            super()._rendezvous(worker_group)
        else:
            self._interrupts.call(lambda: super(Agent, self)._rendezvous(worker_group))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = [
            RankStart(
                local_rank=worker.local_rank,
                rank=worker.global_rank,
                world_size=worker.world_size,
                environ=self._environ(worker_group, worker),
            )
            for worker in worker_group.workers
        ]
        return dict(self._supervisor.start(ranks, worker_group.group_rank or 0))

    def _environ(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        """What torchrun sets for a worker, and the GPUs that it may use."""
        spec = group.spec
        environ = {
            "RANK": worker.global_rank,
            "LOCAL_RANK": worker.local_rank,
            "GROUP_RANK": group.group_rank,
            "ROLE_RANK": worker.role_rank,
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "WORLD_SIZE": worker.world_size,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": bool(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        gpus = self._spec.gpus
        if self._spec.virtual_local_rank:
            visible = gpus if gpus is not None else os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            own = visible[worker.local_rank] if worker.local_rank < len(visible) else str(worker.local_rank)
            environ |= {"LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": own.strip() or str(worker.local_rank)}
        elif gpus is not None:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return {name: str(value) for name, value in environ.items()}

    def _monitor_workers(self, worker_group: WorkerGroup, timeout_s: float = 0.0) -> RunResult:
        outcome = self._supervisor.wait(timeout_s)
        if outcome is None:
            return RunResult(state=WorkerState.HEALTHY)
        self._supervisor.stop()
        self.outcome = outcome
        self.failures = self._supervisor.failures() if outcome == "failed" else []
        succeeded = outcome in ("finished", "saved")
        if outcome == "stopped":
            return RunResult(state=WorkerState.STOPPED)
        return RunResult(state=WorkerState.SUCCEEDED if succeeded else WorkerState.FAILED)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._supervisor.stop()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        return  # `run` closes the guardian, which ends whatever is left

    def _say_restart(self) -> None:
        first = self.failures[0]
        attempts = self._spec.max_restarts + 1
        text = f"attempt {self._supervisor.attempt} of {attempts} failed: rank {first.rank}: {first.headline}"
        self._output.say(f"{text}; restarting")
        folder = self._output.attempt_folder(self._supervisor.attempt)
        if folder is not None:
            try:
                failures.write_json(folder / "failure.json", failures.failure_json(self.failures))
            except OSError:
                return

    def _record_worker_events(self, result: RunResult) -> None:
        return

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        # torch's own looks the host's full name up, which takes seconds where name servers are slow.
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata={"state": state})

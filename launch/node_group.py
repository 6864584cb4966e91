"""The agent of a node among others: what ends an attempt anywhere ends it everywhere, with one verdict.

torch's agents hear of one another only through their ranks' broken connections and the rendezvous. These tell one
another over the `Board` how their ranks ended, and each comes to the same decision from the same posts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState

from phalanx.launch import node_failures
from phalanx.launch.agent import Agent, LauncherError
from phalanx.launch.board import Board
from phalanx.launch.node_failures import LostNode
from phalanx.launch.node_link import silence_limit
from phalanx.launch.preflight import way_to
from phalanx.launch.processes import signal_name

#: How often an agent looks when nothing wakes it.
_LOOK_S = 0.25
#: A node that has been silent for so long is spoken of; when ranks elsewhere broke, it is taken for lost.
SILENT_S = 10.0
#: A node that has been silent for so long is lost where the job can go on without it; elsewhere the limit is that of
#: a driver's link, 60 s: TCP needs up to 51 s to go on after a cut of 30 s.
LOST_ELASTIC_S = 15.0
#: How long the others' accounts are waited for after the ranks were ended.
_ACCOUNTS_LIMIT_S = 60.0
#: How often node 0 looks for nodes that want to join.
_JOINERS_S = 1.0

Next = Literal["end", "restart"]


class NodeGroupAgent(Agent):
    """`Agent` for a job on several nodes."""

    board: Board

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lost_s = silence_limit()

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            joiners = _Joiners(group.spec.rdzv_handler, self.board, self._watches_for_joiners())
            try:
                verdict = self._one_attempt()
            except LauncherError as error:
                self.board.post("broken", str(error))
                raise
            finally:
                joiners.stop()
                self.board.close()
            if verdict == "end":
                succeeded = self.outcome in ("finished", "saved")
                return RunResult(state=WorkerState.SUCCEEDED if succeeded else WorkerState.FAILED)
            self._restart_workers(group)

    def _watches_for_joiners(self) -> bool:
        return self.board.node == 0 and self.board.nodes < self._spec.nnodes_max

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        self.board = self._supervisor.board = worker_group.spec.rdzv_handler.board  # type: ignore[attr-defined]
        self._local_address = worker_group.spec.rdzv_handler.local_address  # type: ignore[attr-defined]
        self._told_silent: set[int] = set()
        self._saved_since: float | None = None

    def _environ(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        environ = super()._environ(group, worker)
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            # gloo would look its address up by the host's own name, which may mean loopback.
            with contextlib.suppress(OSError):
                interface = way_to(self._local_address)[1]
                environ |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        return environ

    # ----------------------------------------------------------------- one attempt

    def _one_attempt(self) -> Next:
        """Serve the ranks until the attempt has ended on all nodes; decides what comes next."""
        outcome = None
        while outcome is None and not self._is_over_elsewhere():
            outcome = self._supervisor.wait(_LOOK_S)
        if outcome in ("finished", "saved"):
            self._supervisor.stop()
            self.outcome = outcome
            self._tell(outcome)
            if not self._await_others():
                return "end"
            outcome = None
        if outcome == "stopped":
            return self._end_alike("stopped", signal=self._supervisor.ended_by)
        if outcome is None and not self._has_failed():
            return self._change() if self._changes() else self._end_alike("saved")
        return self._fail()

    def _end_alike(self, outcome: Literal["stopped", "saved"], **values: Any) -> Next:
        self._supervisor.stop()
        self.outcome = outcome
        self._tell(outcome, **values)
        return "end"

    def _fail(self) -> Next:
        self.board.post("failing", True)  # the others end their ranks at once
        self._supervisor.stop()
        host = self._host(self.board.node)
        own = self._supervisor.failures()
        own = [node_failures.on_node_zero(failure, self.board.clock, host) for failure in own]
        self._tell("failed", failures=[node_failures.to_json(failure) for failure in own])
        self._await(lambda: not self._missing_accounts(), _ACCOUNTS_LIMIT_S)
        return self._verdict()

    def _tell(self, outcome: str, **values: Any) -> None:
        used = self._spec.max_restarts - self._remaining_restarts
        self.board.post("ended", {"outcome": outcome, "restarts_used": used, **values})

    def _is_over_elsewhere(self) -> bool:
        """Whether something on another node ends this attempt here; passes on a signal that ended a peer."""
        ended = self.board.read("ended")
        for node, end in ended.items():
            is_new = node != self.board.node and self._supervisor.ended_by is None
            if end["outcome"] == "stopped" and is_new and not self._changes():
                self._end_with(node, end["signal"])
        if any(end["outcome"] == "saved" for end in ended.values()):
            self._saved_since = self._saved_since or time.monotonic()
        return self._has_failed() or self._changes() or self._saved_enough()

    def _end_with(self, node: int, signum: int) -> None:
        self._output.say(
            f"phalanx run: node {node} ({self._host(node)}) was ended by {signal_name(signum)}; ending here too."
        )
        self._supervisor.end(signum)

    def _has_failed(self) -> bool:
        return bool(self.board.read("failing")) or (bool(self._lost(self._lost_s)) and not self._changes())

    def _saved_enough(self) -> bool:
        """Whether ranks elsewhere saved and left, and those here had time to do the same."""
        return self._saved_since is not None and time.monotonic() > self._saved_since + self._spec.grace_s

    def _await_others(self) -> bool:
        """Wait, with own ranks finished, for those of the others; returns whether the attempt failed or changes."""

        def have_all_ended() -> bool:
            return set(self.board.read("ended")) >= set(range(self.board.nodes))

        self._await(lambda: have_all_ended() or self._is_over_elsewhere(), float("inf"))
        if any(end["outcome"] == "saved" for end in self.board.read("ended").values()):
            self.outcome = "saved"
        if have_all_ended() or self._supervisor.ended_by is not None:
            return bool(self.board.read("failing"))
        return self._has_failed() or self._changes()

    def _await(self, is_settled: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not is_settled() and time.monotonic() < deadline and self._supervisor.ended_by is None:
            self._supervisor.turn(_LOOK_S)

    # ----------------------------------------------------------------- the others

    def _host(self, node: int) -> str:
        return str(self.board.about().get(node, {}).get("host", "?"))

    def _ranks_of(self, node: int) -> tuple[int, ...]:
        about = self.board.about()
        counts = [int(about.get(other, {}).get("ranks", 1)) for other in range(node + 1)]
        return tuple(range(sum(counts[:-1]), sum(counts)))

    def _lost(self, limit_s: float) -> list[LostNode]:
        """Nodes that went without an account of their end: disconnected, or silent for ``limit_s``."""
        if self._is_elastic_without(1):
            limit_s = min(limit_s, LOST_ELASTIC_S)
        accounted = set(self.board.read("ended"))
        now_ns = time.monotonic_ns() + self.board.clock.monotonic_ns
        found = [self._lost_node(node, None, now_ns) for node in self.board.gone() if node not in accounted]
        for node, silent_s in self.board.silence().items():
            if node not in accounted and silent_s >= SILENT_S:
                self._say_silent(node, silent_s)
                if silent_s >= limit_s:
                    found.append(self._lost_node(node, silent_s, now_ns - int(silent_s * 1e9)))
        # What becomes of the others is only heard through node 0.
        return [lost for lost in found if lost.node == 0] or found

    def _lost_node(self, node: int, silent_s: float | None, since_ns: int) -> LostNode:
        ranks = self._ranks_of(node)
        said = self.board.read("broken").get(node, "")
        return LostNode(
            node=node, host=self._host(node), ranks=ranks, silent_s=silent_s, since_ns=since_ns, said=said
        )

    def _say_silent(self, node: int, silent_s: float) -> None:
        if node in self._told_silent:
            return
        self._told_silent.add(node)
        limit_s = min(LOST_ELASTIC_S, self._lost_s) if self._is_elastic_without(1) else self._lost_s
        self._output.say(
            f"phalanx run: node {node} ({self._host(node)}) has not answered for {silent_s:.0f} s; "
            f"after {limit_s:.0f} s it is taken for lost."
        )

    def _missing_accounts(self) -> set[int]:
        lost = {node.node for node in self._lost(SILENT_S)}
        if 0 in lost:
            return set()
        return set(range(self.board.nodes)) - set(self.board.read("ended")) - lost

    def _is_elastic_without(self, count: int) -> bool:
        return (
            self._spec.nnodes_min < self._spec.nnodes_max
            and self.board.nodes - count >= self._spec.nnodes_min
        )

    # ----------------------------------------------------------------- decisions

    def _changes(self) -> bool:
        """Whether nodes come or have gone, and the job goes on with those that are there."""
        if self.board.read("failing"):
            return False
        if self.board.read("change"):
            return True
        ended = self.board.read("ended").items()
        leaving = {n for n, end in ended if end["outcome"] == "stopped" and end["signal"] == signal.SIGTERM}
        gone = leaving - {self.board.node} | {lost.node for lost in self._lost(self._lost_s)}
        return bool(gone) and self._is_elastic_without(len(gone))

    def _change(self) -> Next:
        gone = [f"node {lost.node} ({lost.host}) is lost" for lost in self._lost(self._lost_s)]
        what = ", ".join(gone) or "a node comes or leaves"
        self.board.post("change", what)
        self._supervisor.stop()
        self._output.say(
            f"phalanx run: {what}; the nodes meet again, and the ranks restart on those that come."
        )
        return "restart"

    def _verdict(self) -> Next:
        """Whether there is another attempt, from what all nodes told: the same everywhere."""
        accounts = self.board.read("ended")
        self.lost_nodes = self._lost(SILENT_S)
        told = [
            [node_failures.from_json(one) for one in end.get("failures", ())] for end in accounts.values()
        ]
        self.failures = node_failures.merge(told, self.lost_nodes, time.time())
        self.outcome = "failed"
        used = max(int(end["restarts_used"]) for end in accounts.values())
        self._remaining_restarts = self._spec.max_restarts - used
        self.attempts = used + 1
        lost = {node.node for node in self.lost_nodes}
        self.is_reporter = 0 in lost or self.board.node == 0
        stopped = any(end["outcome"] == "stopped" for end in accounts.values())
        if self._supervisor.ended_by is not None or stopped or not self.failures:
            return "end"
        if self.failures[0].is_lost_node and self._is_elastic_without(len(lost)):
            self._output.say(
                f"phalanx run: {self.failures[0].headline}; the ranks restart on the nodes that are left."
            )
            return "restart"
        if self._remaining_restarts <= 0:
            return "end"
        self._say_restart()
        self._remaining_restarts -= 1
        return "restart"


class _Joiners:
    """Looks, on node 0 of an elastic job, for nodes that wait to join, and tells all agents."""

    def __init__(self, handler: Any, board: Board, active: bool) -> None:
        self._handler, self._board = handler, board
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="phalanx-joiners", daemon=True)
        if active:
            self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(_JOINERS_S):
            try:
                waiting = self._handler.num_nodes_waiting()
            except Exception:  # the rendezvous is out of reach: who is lost is the board's to say
                continue
            if waiting > 0:
                self._board.post("change", f"{waiting} joining")
                return

    def stop(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

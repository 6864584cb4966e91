"""One job on several nodes, from one place: starts a node agent on each and keeps a link to it.

The nodes get ready at the same time: while their agents import torch, the driver compares what it heard of
them. Nothing starts before all are fit. Then it shows what they print, hands signals on, and says how the
job ended. What runs on a host ends by itself when the link to it is cut.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

from phalanx.dist.environments.hostfile import Host
from phalanx.launch.driver_node import DriverNode
from phalanx.launch.driver_output import DriverOutput
from phalanx.launch.driver_verdict import Verdict, judge, run_json
from phalanx.launch.failures import Failure, write_json
from phalanx.launch.host_problems import Problem, common_address, message_of, problems_of
from phalanx.launch.interrupts import Interrupts
from phalanx.launch.node_environ import sent_environ
from phalanx.launch.node_link import Link, Message, silence_limit
from phalanx.launch.options import Given
from phalanx.launch.preflight import fingerprint
from phalanx.launch.spec import Target

Start = Callable[[str, Sequence[str]], "subprocess.Popen[bytes]"]

_READY_S = 120.0  # for a host to answer; an import over a network file system takes its time
_CAUSE_PATIENCE_S = 1.0  # for failures on other nodes, after one node's ranks failed
_END_AFTER_S = 1.0  # between the request and the end of such nodes
_END_PATIENCE_S = 8.0  # for a node that was told to end at once
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class NodesJob:
    """What all nodes of a job are told.

    Args:
        given: The options for a node agent, by key; those of single hosts are added to it.
        per_node: Options of single nodes, in their order.
        target: TARGET as typed.
        resolved: What it is on this machine.
        show: ``rank0`` or ``all``.
        same_machine: Whether all nodes are played by this machine.
        address: Where the others reach node 0; None finds out.
        port: On node 0; None takes a free one.
        environ: Further variables for every node.
    """

    given: Mapping[str, Given]
    per_node: Sequence[Mapping[str, Given]]
    target: str
    resolved: Target
    args: Sequence[str]
    command_line: Sequence[str]
    log_dir: Path
    show: str
    grace_s: float = 10.0
    same_machine: bool = False
    address: str | None = None
    port: int | None = None
    environ: Mapping[str, str] | None = None


def drive(job: NodesJob, hosts: Sequence[Host], start: Start) -> int:
    """Run a job on hosts; node 0 is the first of them.

    Args:
        job: What to run.
        hosts: At least one.
        start: Starts a program on a host, with pipes as its three standard streams, in a session of its own.

    Returns:
        What `phalanx.launch.run.run` returns on one node; 2 or 3 when a host is not fit, and nothing was started.
    """
    return _Driver(job, hosts, start).run()


class _Driver:
    def __init__(self, job: NodesJob, hosts: Sequence[Host], start: Start) -> None:
        self._job, self._hosts, self._start = job, hosts, start
        self._nodes: list[DriverNode] = []
        self._output = DriverOutput(job.show)
        self._interrupts = Interrupts([*_SIGNALS, *_PASSED_ON, signal.SIGWINCH, signal.SIGTSTP])
        self._ended_by: int | None = None
        self._silence_s = silence_limit()
        self._word = secrets.token_hex(16)
        self._gone = self._told_to_end = False
        self._started = time.time()
        self._end_at: float | None = None
        self._problems: list[Problem] = []
        self._address = ""
        self._input_free = False

    # ----------------------------------------------------------------- from start to end

    def run(self) -> int:
        self._interrupts.install()
        try:
            with self._tokens() as tokens:
                self._start_all(tokens)
                self._get_ready()
            if self._problems or self._ended_by is not None:
                return self._refuse()
            self._go()
            while not all(node.is_over for node in self._nodes):
                self._turn(0.5)
                self._watch()
            self._output.finish(self._nodes)
            verdict = judge(self._job, self._nodes, self._ended_by, self._started)
            return self._say(verdict)
        finally:
            for node in self._nodes:
                node.close()
            self._output.drain(self._interrupts)
            self._interrupts.remove()

    def _start_all(self, tokens: tuple[str | None, str | None]) -> None:
        words = [sys.executable, "-m", "phalanx.launch.node"]
        for number, host in enumerate(self._hosts):
            try:
                process = self._start(host.name, words)
            except OSError as error:
                what = f"{error.filename or 'its starter'} cannot be run ({error.strerror})"
                self._problems.append(Problem(host=host.name, what=what, fix="install it (OpenSSH's client)"))
                return
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            os.set_blocking(process.stderr.fileno(), False)
            link = Link(process.stdout.fileno(), process.stdin.fileno(), silence_s=self._silence_s)
            node = DriverNode(number, host, process, link)
            self._nodes.append(node)
            node.asked_at = time.time()
            link.send(self._order(number, tokens))

    def _order(self, number: int, tokens: tuple[str | None, str | None]) -> Message:
        """The job as one node is told it."""
        job = self._job
        values = {**job.given, **job.per_node[number]}
        values["node_rank"] = Given(str(number), "--node-rank")
        rank0 = number == 0
        files = self._files()
        return {
            "order": "job",
            "node": number,
            "given": {key: [given.text, given.source] for key, given in values.items()},
            "target": job.target,
            "args": list(job.args),
            "command_line": list(job.command_line),
            "folder": os.getcwd(),
            "log_dir": str(job.log_dir.absolute() / f"node-{number}"),
            "environ": {**sent_environ(os.environ), "PWD": os.getcwd(), **(job.environ or {})},
            "grace_s": job.grace_s,
            "silence_s": self._silence_s,
            "files": files,
            "token": tokens[0],
            "log_token": tokens[1],
            "doorbell": True,
            "port": job.port or 0,
            "word": self._word,
            "size": self._output.size if rank0 else None,
            "stdin": rank0 and self._output.has_input,
        }

    def _files(self) -> list[str]:
        target = self._job.resolved
        return [str(Path(target.name).absolute())] if target.kind == "script" else []

    @contextmanager
    def _tokens(self) -> Iterator[tuple[str | None, str | None]]:
        """Files that a host sees where it shares this folder and the log folder; gone at the end."""
        name = f".phalanx-{self._word[:12]}"
        paths = [Path.cwd() / name, self._job.log_dir.absolute() / name]
        made: list[Path | None] = []
        for path in paths:
            try:
                path.touch()
                made.append(path)
            except OSError:
                made.append(None)
        try:
            yield (str(made[0]) if made[0] else None, str(made[1]) if made[1] else None)
        finally:
            for found in made:
                if found is not None:
                    found.unlink(missing_ok=True)

    def _get_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        asked: set[int] = set()
        while self._ended_by is None and not self._problems:
            if time.monotonic() > deadline:
                for node in self._nodes:
                    if not self._is_heard(node) and node.lost is None:
                        node.lost = f"no answer within {_READY_S:g} s"
            if all(map(self._is_heard, self._nodes)):
                break
            self._ring(asked)
            self._turn(1.0)
        expected = {name: fingerprint(Path(name)) for name in self._files()}
        if self._ended_by is None:
            self._problems += problems_of(self._nodes, expected, same_machine=self._job.same_machine)
        if not self._problems and self._ended_by is None:
            local = "127.0.0.1" if self._job.same_machine else None
            self._address = self._job.address or local or common_address(self._nodes)

    def _is_heard(self, node: DriverNode) -> bool:
        """Whether all is known of a node that is needed to judge it."""
        if node.lost is not None or node.refused is not None:
            return True
        if node.facts is None:
            return False
        first = self._nodes[0]
        has_door = first.lost is None and (first.facts is None or "port" in first.facts)
        met = node.answers is not None or not has_door
        return node.facts["folder_problem"] is not None or (node.ready is not None and met)

    def _ring(self, asked: set[int]) -> None:
        """Once node 0 has said where it listens, let every other node try."""
        first = self._nodes[0]
        if first.facts is None or "port" not in first.facts:
            return
        candidates = [self._job.address] if self._job.address else first.facts["addresses"]
        if self._job.same_machine:
            candidates = ["127.0.0.1"]
        for node in self._nodes:
            if node.facts is None or node.number in asked or node.lost:
                continue
            asked.add(node.number)
            if node is first and not self._job.address:
                node.answers = dict.fromkeys(candidates, "")
                continue
            port = first.facts["port"]
            node.link.send({"order": "reach", "addresses": candidates, "port": port, "word": self._word})

    def _refuse(self) -> int:
        """Nothing was started, or what was is not to go on."""
        if self._ended_by is not None:
            self._output.say("phalanx run: interrupted before the ranks started.")
            return 130 if self._ended_by == signal.SIGINT else 143
        with suppress(OSError):  # it stays where another run's logs are in it
            self._job.log_dir.rmdir()
        text, code = message_of(self._problems, self._nodes)
        self._output.say(f"phalanx run: {text}")
        return code

    def _go(self) -> None:
        first = self._nodes[0]
        assert first.facts is not None
        for line in self._warnings():
            self._output.say(f"phalanx run: warning: {line}")
        self._output.say(f"phalanx run: {self._headline()}")
        for node in self._nodes:
            node.link.send({"order": "go", "address": self._address, "port": first.facts["port"]})
        with suppress(OSError):
            write_json(self._job.log_dir / "run.json", run_json(self._job, self._nodes, self._started, None))
        self._gone = True
        self._input_free = self._output.has_input

    def _headline(self) -> str:
        counts = [node.ready["spec"]["nproc_per_node"] for node in self._nodes if node.ready]
        total = sum(counts)
        each = (
            f"{counts[0]} on each"
            if len(set(counts)) == 1
            else f"{', '.join(map(str, counts))} in their order"
        )
        ranks = f"{total} rank{'s' * (total > 1)} on {len(counts)} node{'s' * (len(counts) > 1)} ({each})"
        first = self._nodes[0]
        assert first.facts is not None
        assert first.ready is not None
        address = f"[{self._address}]" if ":" in self._address else self._address
        meet = f"node 0 at {address}:{first.facts['port']}"
        return f"{ranks}; {meet}; {first.ready['threads']}; logs in {self._job.log_dir}."

    def _warnings(self) -> list[str]:
        from phalanx.launch.host_problems import warnings_of

        return warnings_of(self._nodes, same_machine=self._job.same_machine)

    # ----------------------------------------------------------------- the event loop

    def _turn(self, timeout_s: float) -> None:
        poll = select.poll()
        reading = not self._output.is_full
        owners: dict[int, tuple[DriverNode, str]] = {}
        for node in self._nodes:
            if node.lost is None:
                node.link.interests(poll, read=reading)
                owners[node.link.read_fd] = owners[node.link.write_fd] = (node, "link")
            if node.stderr_open and node.process.stderr is not None:
                poll.register(node.process.stderr, select.POLLIN)
                owners[node.process.stderr.fileno()] = (node, "stderr")
        self._output.interests(poll, read=self._input_free)
        poll.register(self._interrupts.fileno(), select.POLLIN)
        for fd, _ in poll.poll(int(timeout_s * 1000) + 1):
            if fd == self._interrupts.fileno():
                for signum in self._interrupts.arrived():
                    self._on_signal(signum)
            elif fd in owners:
                node, what = owners[fd]
                self._serve(node, what)
            elif self._input_free and self._output.is_input(fd):
                self._pass_input()
            else:
                self._output.flush()
        for node in self._nodes:
            if not node.is_over:
                node.link.beat()
                if reading and node.link.is_silent and node.facts is not None:
                    self._lose(node, f"nothing was heard of it for {self._silence_s:g} s")
        if self._output.closed_by_reader and self._ended_by is None:
            self._end_all(signal.SIGPIPE, signal.SIGTERM)

    def _serve(self, node: DriverNode, what: str) -> None:
        if what == "stderr":
            node.read_stderr()
            return
        node.link.flush()
        for kind, data in node.link.receive():
            if kind in "12":
                self._output.show(node, kind, data)
            elif kind == "J":
                for message in Link.message((kind, data)):
                    self._on_event(node, message)
        if not node.link.is_open and not node.is_over:
            self._lose(node, "")

    def _lose(self, node: DriverNode, why: str) -> None:
        """Nothing more is heard of a node: let its ssh say why, for a moment."""
        deadline = time.monotonic() + 2.0
        node.lost_at = time.time()
        if not why:
            with suppress(subprocess.TimeoutExpired):
                node.process.wait(2.0)
            while node.stderr_open and time.monotonic() < deadline:
                assert node.process.stderr is not None
                select.select([node.process.stderr], [], [], 0.2)
                node.read_stderr()
            code = node.process.poll()
            why = "the link to it was cut" + (
                "" if code is None else f" ({_name(node)} ended: {_ending(code)})"
            )
        node.lost = why
        node.kill()

    def _on_event(self, node: DriverNode, event: Message) -> None:
        kind = event["event"]
        if kind == "host":
            node.facts = event
            # Its answer was written between our request and now: only what lies outside is its clock's doing.
            node.clock_offset_s = max(0.0, event["time"] - time.time()) + min(
                0.0, event["time"] - node.asked_at
            )
        elif kind == "ready":
            node.ready = event
        elif kind == "refused":
            node.refused = event
        elif kind == "reached":
            node.answers = event["answers"]
        elif kind == "note":
            self._output.say(f"{node.label}: {event['text']}")
        elif kind == "failures":
            known = {field.name for field in fields(Failure)}
            node.failures = [
                Failure(**{k: v for k, v in one.items() if k in known}) for one in event["failures"]
            ]
        elif kind == "input-taken":
            self._input_free = self._output.has_input
        elif kind == "ended" and node.exit_code is None:
            node.exit_code = event["exit_code"]

    def _pass_input(self) -> None:
        data = self._output.read_input()
        if data is None:
            return
        self._input_free = False
        self._nodes[0].link.send_bytes("0", data)

    # ----------------------------------------------------------------- the end

    def _watch(self) -> None:
        """When one node has failed or is lost, the others end; when told to end, within a limit."""
        now = time.monotonic()
        failed = [node for node in self._nodes if node.lost or node.exit_code not in (None, 0, 75)]
        saved = [node for node in self._nodes if node.exit_code == 75]
        if self._end_at is None and (failed or saved) and self._ended_by is None:
            self._end_at = now + (_CAUSE_PATIENCE_S if failed else self._job.grace_s)
        if self._end_at is None or now < self._end_at:
            return
        if not self._told_to_end:
            self._told_to_end = True
            self._send_all({"order": "end", "after_s": _END_AFTER_S})
        if now > self._end_at + _END_PATIENCE_S:
            for node in self._nodes:
                if not node.is_over:
                    self._lose(node, "it did not end in time")

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGWINCH:
            self._nodes[0].link.send({"order": "size", "size": self._output.size or [24, 80]})
        elif signum in _PASSED_ON:
            self._send_all({"order": "signal", "signum": signum})
        elif signum == signal.SIGTSTP:
            self._suspend()
        elif self._ended_by is None:
            self._end_all(signum, signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
        elif signum == signal.SIGINT and self._interrupts.is_deliberate:
            self._send_all({"order": "signal", "signum": int(signal.SIGINT)})
            self._end_at = time.monotonic()

    def _end_all(self, reason: int, passed_on: int) -> None:
        self._ended_by = reason
        self._end_at = time.monotonic() + self._job.grace_s + 6.0
        if self._gone:
            self._send_all({"order": "signal", "signum": passed_on})

    def _suspend(self) -> None:
        self._send_all({"order": "suspend", "on": True})
        self._send_all({"order": "signal", "signum": int(signal.SIGTSTP)})
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send_all({"order": "signal", "signum": int(signal.SIGCONT)})
        self._send_all({"order": "suspend", "on": False})
        for node in self._nodes:
            node.link.heard_at = time.monotonic()

    def _send_all(self, message: Message) -> None:
        for node in self._nodes:
            if not node.is_over:
                node.link.send(message)

    def _say(self, verdict: Verdict) -> int:
        for text in verdict.texts:
            self._output.say(text)
        return verdict.exit_code


def _name(node: DriverNode) -> str:
    arguments = node.process.args
    word = arguments[0] if isinstance(arguments, (list, tuple)) else arguments
    return Path(str(word)).name


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def local_nodes(count: int) -> tuple[list[Host], Start]:
    """Nodes played by this machine, and what starts their programs."""

    def start(host: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(list(words), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    return [Host(name=f"n{number}") for number in range(count)], start

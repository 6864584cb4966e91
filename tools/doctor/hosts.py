"""Several hosts: each one's facts, whether each two reach each other, their clocks, and what their names mean."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.facts_json import from_json
from phalanx.tools.doctor.host_peer import MARK

#: Starts words on a host, with pipes at its standard streams: by srun, by ssh, or in a test as it likes.
Start = Callable[[str, Sequence[str]], "subprocess.Popen[bytes]"]
PEER = (sys.executable, "-m", "phalanx.tools.doctor.host_peer")
REACH_S = 3.0
_CLOCK_QUESTIONS = 3
_TICK_S = 0.1


@dataclass(kw_only=True)
class HostView:
    """What one host answered.

    Args:
        name: As it was given.
        problem: Why there are no answers; empty when there are.
        version: Its phalanx.
        machine: The same text for two names of one machine.
        addresses: Of its interfaces, without loopback.
        facts: What it gathered.
        clock_s: How far its clock is ahead of this process's, and how exactly that is known.
        listening: Whether it could listen on the port.
        reached: By the other's name: {"by": "name" or an address} or {"error": ...}.
        names: What each name means there: {"addresses": [...], "error": ...}.
    """

    name: str
    problem: str = ""
    version: str = ""
    machine: str = ""
    addresses: tuple[str, ...] = ()
    facts: Facts | None = None
    clock_s: tuple[float, float] | None = None
    listening: bool = False
    reached: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def examine(
    hosts: Sequence[str],
    start: Start,
    *,
    port: int,
    facts_question: Mapping[str, Any],
    timeout_s: float,
    words: Sequence[str] = PEER,
    waiting: Callable[[list[str]], None] | None = None,
) -> list[HostView]:
    """Ask every host at once; one that does not answer costs its own answers, and no more than the time.

    Args:
        hosts: Names, in the order of the job's nodes.
        start: Starts a program on a host.
        port: The rendezvous port to try between them.
        facts_question: What is wanted of the facts: job, output folder, whether torch is imported.
        timeout_s: For one round of questions.
        words: The program that answers.
        waiting: Called now and then with the hosts whose answers are outstanding.
    """
    with _Conversation(hosts, start, words, waiting) as talk:
        views = {name: HostView(name=name) for name in hosts}
        _greet(talk, views, timeout_s)
        _clocks(talk, views, timeout_s)
        question = {"ask": "facts", "timeout_s": timeout_s, "port": port, **facts_question}
        for name, answer in talk.ask(dict.fromkeys(talk.open, question), timeout_s + 10.0).items():
            views[name].facts = from_json(answer.get("facts"))
        _resolve(talk, views)
        _reach(talk, views, port)
        for name, problem in talk.problems.items():
            views[name].problem = problem
    return list(views.values())


def _greet(talk: _Conversation, views: Mapping[str, HostView], timeout_s: float) -> None:
    for name, answer in talk.ask({name: {"ask": "hello"} for name in talk.open}, timeout_s).items():
        view = views[name]
        view.version, view.machine = str(answer.get("version", "")), str(answer.get("machine", ""))
        by_interface = answer.get("addresses") or {}
        view.addresses = tuple(address for entries in by_interface.values() for address in entries)


def _clocks(talk: _Conversation, views: Mapping[str, HostView], timeout_s: float) -> None:
    """One host after the other: the answer's way must be short. The quickest of three counts."""
    for name in list(talk.open):
        best: tuple[float, float] | None = None
        for _ in range(_CLOCK_QUESTIONS):
            before = time.time()
            answer = talk.ask({name: {"ask": "time"}}, timeout_s).get(name)
            after = time.time()
            if answer is None or "time" not in answer:
                break
            uncertain = (after - before) / 2
            if best is None or uncertain < best[1]:
                best = (float(answer["time"]) - before - uncertain, uncertain)
        views[name].clock_s = best


def _resolve(talk: _Conversation, views: Mapping[str, HostView]) -> None:
    question = {"ask": "resolve", "names": list(views), "timeout_s": REACH_S}
    for name, answer in talk.ask(dict.fromkeys(talk.open, question), 2 * REACH_S).items():
        views[name].names = answer.get("names") or {}


def _reach(talk: _Conversation, views: Mapping[str, HostView], port: int) -> None:
    """Every host listens, then every host connects to all others. One machine with two names listens once."""
    listeners = {views[name].machine or name: name for name in reversed(list(talk.open))}
    question = {"ask": "listen", "port": port}
    for name, answer in talk.ask(dict.fromkeys(listeners.values(), question), REACH_S).items():
        views[name].listening = "listening" in answer
    heard = {views[name].machine or name for name in listeners.values() if views[name].listening}
    targets = [
        {"name": view.name, "addresses": list(view.addresses), "port": port}
        for view in views.values()
        if (view.machine or view.name) in heard
    ]
    questions = {}
    for name in talk.open:
        others = [target for target in targets if target["name"] != name]
        questions[name] = {"ask": "reach", "targets": others, "timeout_s": REACH_S}
    for name, answer in talk.ask(questions, 4 * REACH_S).items():
        views[name].reached = answer.get("reached") or {}


class _Conversation:
    """Pipes to a program on each host; questions go to many at once."""

    def __init__(
        self,
        hosts: Sequence[str],
        start: Start,
        words: Sequence[str],
        waiting: Callable[[list[str]], None] | None,
    ) -> None:
        self._waiting = waiting
        self.problems: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._errors: dict[str, bytearray] = {name: bytearray() for name in hosts}
        self._rest: dict[str, bytes] = dict.fromkeys(hosts, b"")
        for name in hosts:
            try:
                self._processes[name] = start(name, words)
            except OSError as error:
                self.problems[name] = f"{error.filename or words[0]}: {error.strerror}"

    @property
    def open(self) -> list[str]:
        """The hosts that have answered everything so far."""
        return [name for name in self._processes if name not in self.problems]

    def ask(self, questions: Mapping[str, Mapping[str, Any]], timeout_s: float) -> dict[str, dict[str, Any]]:
        """One answer for each host that gives one in time; the others are closed, and asked no more."""
        for name, question in questions.items():
            stdin = self._processes[name].stdin
            with contextlib.suppress(OSError):  # it has ended: its last words are read below
                assert stdin is not None
                stdin.write(json.dumps(question).encode() + b"\n")
                stdin.flush()
        answers: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for name in questions:
                self._watch(selector, name)
            while len(answers) + sum(name in self.problems for name in questions) < len(questions):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                if self._waiting is not None:
                    self._waiting([name for name in questions if name not in answers | self.problems])
                    left = min(left, _TICK_S)
                for key, _ in selector.select(left):
                    self._read(selector, key, answers)
        for name in questions:
            if name not in answers and name not in self.problems:
                self.problems[name] = self._last_words(name) or f"no answer within {timeout_s:g} s"
        return {name: answer for name, answer in answers.items() if name not in self.problems}

    def _watch(self, selector: selectors.BaseSelector, name: str) -> None:
        process = self._processes[name]
        for stream in (process.stdout, process.stderr):
            if stream is not None and not stream.closed:
                selector.register(stream, selectors.EVENT_READ, name)

    def _read(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey, answers: dict[str, dict[str, Any]]
    ) -> None:
        name, process = key.data, self._processes[key.data]
        data = os.read(key.fd, 65536)
        if process.stderr is not None and key.fd == process.stderr.fileno():
            self._errors[name] = (self._errors[name] + data)[-8192:]
            if not data:
                selector.unregister(key.fileobj)
            return
        if not data:
            selector.unregister(key.fileobj)
            self.problems[name] = self._ending(name)
            return
        *lines, self._rest[name] = (self._rest[name] + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                with contextlib.suppress(ValueError):
                    answers[name] = json.loads(text.removeprefix(MARK))

    def _ending(self, name: str) -> str:
        """Why a host's program has ended, by what it or ssh said last."""
        process = self._processes[name]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        if process.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                os.set_blocking(process.stderr.fileno(), False)
                self._errors[name] += process.stderr.read() or b""
        return self._last_words(name) or f"ended with exit code {process.poll()}"

    def _last_words(self, name: str) -> str:
        lines = bytes(self._errors[name]).decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:300] if said else ""

    def __enter__(self) -> _Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        for process in self._processes.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its questions have ended, so it ends; one that hangs is killed and not waited for."""
    for act in (process.terminate, process.kill, None):
        try:
            process.wait(2.0)
            return
        except subprocess.TimeoutExpired:
            if act is not None:
                act()


def pairs(views: Sequence[HostView]) -> Iterator[tuple[HostView, HostView, Mapping[str, Any]]]:
    """From, to, and what came of it, for each two hosts that were tried."""
    by_name = {view.name: view for view in views}
    for view in views:
        for other, outcome in view.reached.items():
            if other in by_name:
                yield view, by_name[other], outcome

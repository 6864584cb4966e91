"""`run`: one job on this node, from a checked `RunSpec` to an exit code."""

from __future__ import annotations

import gc
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.launch import processes
from phalanx.launch.explained import explain_run
from phalanx.launch.failures import Failure, failure_json, format_report, write_json
from phalanx.launch.guardian import GuardianHandle, fork_guardian
from phalanx.launch.interrupts import Interrupted, Interrupts
from phalanx.launch.output import Output, flush_standard_streams, open_missing_descriptors
from phalanx.launch.spec import RunSpec, WorkerMain
from phalanx.launch.worker import EXIT_SAVED, SignalState, WorkerPlan

if TYPE_CHECKING:
    from phalanx.launch.agent import Agent
    from phalanx.launch.driver_line import DriverLine

EXIT_FAILED, EXIT_USAGE, EXIT_OURS, EXIT_OUTPUT_CLOSED = 1, 2, 3, 141


def _say(text: str) -> None:
    """A line for the user while no rank is shown."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def _taken_port(spec: RunSpec) -> str | None:
    """A message if the port that was asked for cannot be had on this node."""
    if spec.master_port is None or (spec.nnodes_max > 1 and spec.node_rank != 0):
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
        try:
            probe.bind(("", spec.master_port))
        except OSError as error:
            return (
                f"--master-port {spec.master_port}: this port cannot be used ({error.strerror}).\n"
                "The ranks would wait there for a store that never answers, or join somebody else's job.\n"
                "Fix: leave --master-port out (a free port is then chosen), or give another."
            )
    return None


def _exit_code_of(signum: int) -> int:
    if signum == signal.SIGPIPE:
        return EXIT_OUTPUT_CLOSED
    return 130 if signum == signal.SIGINT else 143


def run(spec: RunSpec, line: DriverLine | None = None) -> int | WorkerMain:
    """Run a job's ranks on this node and return the command's exit code.

    The calling process must be the command itself: single-threaded, its main thread. Everything that
    descends from the ranks is ended before this returns, and also when this process is killed.

    In a process forked off for a rank this returns too: a function, to be called outside of every
    frame of the command line; it runs the rank's script and the process then ends as Python does.

    Returns:
        0 all ranks finished; 1 a rank failed (the report is on stderr and in ``failure.json``);
        2 a port that was asked for is taken, or the script did not take its arguments; 3 phalanx itself could not go on; 75 all ranks saved
        and left; 130 interrupted; 143 another signal asked for the end; 141 nobody reads our stdout.
    """
    launcher = os.getpid()
    try:
        return _Run(spec, line).go()
    except KeyboardInterrupt:
        if os.getpid() != launcher:
            raise
        _say("phalanx run: interrupted before the ranks started.")
        return 130
    except Exception as error:
        if os.getpid() != launcher:
            raise
        return _say_own_fault(error, _say if line is None else line.note)


def _say_own_fault(error: Exception, say: Callable[[str], None]) -> int:
    if os.environ.get("PHALANX_DEBUG") == "1":
        traceback.print_exc()
    is_expected = type(error).__name__ in ("LauncherError", "BoardError")
    what = str(error) if is_expected else f"internal error: {type(error).__name__}: {error}"
    say(f"phalanx run: {what}")
    if not is_expected and os.environ.get("PHALANX_DEBUG") != "1":
        say("Fix: run it again with PHALANX_DEBUG=1 for the traceback, and report it.")
    return EXIT_OURS


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing made during an import is garbage: without the collector it takes a third less time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


#: argparse's and click's own exceptions, which they turn into `sys.exit(2)`.
_REFUSED_ARGUMENTS = (
    "ArgumentError",
    "ArgumentTypeError",
    "BadArgumentUsage",
    "BadOptionUsage",
    "BadParameter",
    "MissingParameter",
    "NoSuchOption",
    "UsageError",
)


def refused_arguments(failures: Sequence[Failure]) -> bool:
    """Whether the script itself would not take its arguments, on every rank that got to say so.

    A rank that said so and was then ended because of another one has that signal as its end.
    """
    said = [f for f in failures if f.exit_code == EXIT_USAGE]
    return bool(said) and all(
        f.exception in _REFUSED_ARGUMENTS or (f.exception is None and f in said) for f in failures
    )


class _Run:
    """The steps of one run, and what has to be undone whatever happens."""

    def __init__(self, spec: RunSpec, line: DriverLine | None = None) -> None:
        self._spec = spec
        self._line = line
        self._started = time.time()
        self._log_dir: Path | None = None

    def go(self) -> int | WorkerMain:
        open_missing_descriptors()
        problem = _taken_port(self._spec)
        if problem is not None:
            _say(problem)
            return EXIT_USAGE
        self._make_log_dir()
        self._set_environ()
        if self._spec.preload and self._spec.target.kind != "command":
            self._preload()
        return self._launch()

    def _make_log_dir(self) -> None:
        try:
            self._spec.log_dir.mkdir(parents=True, exist_ok=True)
            self._log_dir = self._spec.log_dir
            self._write_run_json(None)
        except OSError as error:
            _say(
                f"phalanx run: warning: {self._spec.log_dir}: {error.strerror}; the run goes on, its logs may be missing."
            )

    def _set_environ(self) -> None:
        """What every rank inherits; OMP_NUM_THREADS must be there before torch is imported."""
        if self._spec.omp_num_threads is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(self._spec.omp_num_threads))
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(self._spec.signals_to_handle)

    def _preload(self) -> None:
        with _no_collection():
            import torch
            import torch.distributed  # noqa: F401

    def _launch(self) -> int | WorkerMain:
        spec = self._spec
        state = SignalState.current()
        asking = [signal.Signals[name.strip()] for name in spec.signals_to_handle]
        others = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTSTP]
        interrupts = Interrupts(list(dict.fromkeys([*asking, *others])))
        spared = processes.descendants(os.getpid())
        reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        reports.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        reports.bind("")  # the kernel chooses an abstract address
        plan = WorkerPlan(
            kind=spec.target.kind,
            name=spec.target.name,
            args=spec.args,
            run_path=spec.run_path,
            report_address=reports.getsockname()[1:].decode(),
        )

        def in_guardian() -> None:
            interrupts.abandon()
            reports.close()
            if self._line is not None:
                self._line.close()

        flush_standard_streams()
        processes.become_subreaper()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        forked = fork_guardian(
            plan, preload=spec.preload, signals=state, handled=interrupts.handled, in_child=in_guardian
        )
        if not isinstance(forked, GuardianHandle):
            return forked
        interrupts.install()
        signal.pthread_sigmask(signal.SIG_SETMASK, state.blocked)
        try:
            code = self._supervise(forked, interrupts, reports)
        finally:
            if not forked.close():
                processes.kill_descendants(lambda: _reap_except(spared), spare=spared)
            interrupts.remove()
            reports.close()
        self._finish(code)
        return code

    def _supervise(self, guardian: GuardianHandle, interrupts: Interrupts, reports: socket.socket) -> int:
        with _no_collection():
            from torch.distributed.elastic.agent.server.api import WorkerSpec
            from torch.distributed.elastic.rendezvous.api import RendezvousError

            from phalanx.launch.agent import Agent, LauncherError, Supervisor
            from phalanx.launch.evidence import Witness
            from phalanx.launch.node_group import NodeGroupAgent
            from phalanx.launch.rendezvous import make_rendezvous, quiet_torch, shut_down

        spec = self._spec
        quiet_torch()
        output = Output(
            self._log_dir,
            spec.nproc_per_node,
            show=spec.show,
            shown_only=spec.local_ranks_filter,
            warn=_say,
            node=None if self._line is None else self._line.node,
        )
        witness = Witness()
        make_supervisor = Supervisor
        if spec.hang_timeout_s is not None:
            from phalanx.launch.hangs import WatchingSupervisor

            make_supervisor = WatchingSupervisor
        supervisor = make_supervisor(spec, guardian, output, interrupts, reports, witness)
        try:
            handler = (
                interrupts.call(lambda: make_rendezvous(spec))
                if spec.nnodes_max > 1
                else make_rendezvous(spec)
            )
            worker_spec = WorkerSpec(
                role=spec.role,
                local_world_size=spec.nproc_per_node,
                rdzv_handler=handler,
                fn=None,
                entrypoint=spec.target.name,
                max_restarts=spec.max_restarts,
                monitor_interval=spec.monitor_interval_s,
            )
            make_agent = NodeGroupAgent if spec.nnodes_max > 1 else Agent
            agent = make_agent(worker_spec, spec, supervisor, interrupts)
            agent.run()
        except Interrupted as interrupted:
            output.say(f"phalanx run: ended by {interrupted} while waiting for other nodes.")
            supervisor.show_all()
            return _exit_code_of(interrupted.signum)
        except RendezvousError as error:
            where = spec.rdzv_endpoint or f"{spec.master_addr}:{spec.master_port}"
            cause = error.__cause__ or error
            raise LauncherError(
                f"the nodes did not meet at {where}: {type(error).__name__}: {cause}"
            ) from error
        finally:
            witness.close()
            output.drain(1.0 if sys.exc_info()[0] else 0.0)
        if supervisor.ended_by is None:
            shut_down(handler)
        code = self._judge(agent, supervisor.ended_by, supervisor.all_saved, output)
        supervisor.show_all()
        return code

    def _judge(self, agent: Agent, ended_by: int | None, all_saved: bool, output: Output) -> int:
        """The exit code, with what the user is told about it."""
        if self._line is not None:
            return self._judge_for_driver(agent, ended_by, all_saved, self._line)
        if agent.outcome == "finished":
            return 0
        if agent.outcome == "saved" or all_saved:
            return EXIT_SAVED
        if ended_by is not None and agent.outcome != "failed":
            name = (
                processes.signal_name(ended_by) if ended_by != signal.SIGPIPE else "the reader of its output"
            )
            output.say(f"phalanx run: ended by {name}; no rank is left. Logs: {self._log_dir}")
            return _exit_code_of(ended_by)
        failures = agent.failures
        if not failures:
            raise RuntimeError("the ranks ended without a result")
        if not agent.is_reporter:
            return self._judge_beside_reporter(failures, output)
        failure_file: Path | None = None
        refused = refused_arguments(failures)
        diagnoses, explanation = ([], "") if refused else explain_run(failures, self._log_dir)
        if self._log_dir is not None:
            failure_file = self._log_dir / "failure.json"
            try:
                write_json(failure_file, failure_json(failures, diagnoses))
            except OSError:
                failure_file = None
        if refused:
            # What argparse, click and our recipes do about arguments they cannot take; their message is shown.
            output.say(
                f"phalanx run: {self._spec.target.display} does not take these arguments (it ended with exit code 2, "
                f"its message is above). Logs: {self._log_dir}"
            )
            return EXIT_USAGE
        output.say(format_report(failures, attempts=agent.attempts, failure_file=failure_file))
        if explanation:
            output.say(explanation)
        return EXIT_FAILED

    def _judge_beside_reporter(self, failures: Sequence[Failure], output: Output) -> int:
        """The same exit code as the node that prints the report, and one line."""
        first = failures[0]
        output.say(f"phalanx run: first failure: {first.place}: {first.headline}; node 0 has the report.")
        return EXIT_USAGE if refused_arguments(failures) else EXIT_FAILED

    def _judge_for_driver(self, agent: Agent, ended_by: int | None, all_saved: bool, line: DriverLine) -> int:
        """This node's exit code; the driver, which hears of all nodes, says what it comes to."""
        if agent.outcome == "finished":
            return 0
        if agent.outcome == "saved" or all_saved:
            return EXIT_SAVED
        if ended_by is not None and agent.outcome != "failed":
            return _exit_code_of(ended_by)
        line.failures(agent.failures)
        return EXIT_FAILED

    def _finish(self, code: int) -> None:
        if self._log_dir is not None:
            try:
                self._write_run_json(code)
            except OSError as error:
                _say(f"phalanx run: warning: {self._log_dir}/run.json: {error.strerror}.")
        gc.freeze()  # the interpreter's own last collection would walk through all of torch

    def _write_run_json(self, code: int | None) -> None:
        from importlib import metadata

        assert self._log_dir is not None
        content: dict[str, Any] = {
            "schema": 1,
            "spec": {**asdict(self._spec), "log_dir": str(self._spec.log_dir)},
            "versions": {
                "phalanx": _version(metadata, "phalanx"),
                "torch": _version(metadata, "torch"),
                "python": platform.python_version(),
            },
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": self._started,
            "ended": None if code is None else time.time(),
            "exit_code": code,
        }
        write_json(self._log_dir / "run.json", content)


def _version(metadata: Any, name: str) -> str | None:
    try:
        return str(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None


def _reap_except(spared: list[int]) -> bool:
    """Collect our ended children other than ``spared``; returns whether one is left."""
    own, left = os.getpid(), False
    for pid, parent in processes.parents().items():
        if parent == own and pid not in spared:
            try:
                left |= os.waitpid(pid, os.WNOHANG)[0] == 0
            except ChildProcessError:
                continue
    return left

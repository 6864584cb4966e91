"""One rank: a process that looks to its script as if Python had just been started for it.

A rank comes into being in one of two ways. Forked by the guardian, it inherits torch, imported
once, and `become_worker` gives it a session, standard streams, environment and signals of its own;
`main` then replaces what a fork leaves shared (random generators, ``__main__``, ``sys.argv``).
With ``--no-preload`` it is ``python -u -m phalanx.launch.worker`` and only `main` runs.

Either way an uncaught exception is told to the launcher at the moment it happens, so that the first
failing rank is known even though several fail within milliseconds.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NoReturn, TextIO, cast

from phalanx.launch import processes

#: How `python -m phalanx.launch.worker` is told what to run.
PLAN_VARIABLE = "PHALANX_WORKER_PLAN"
#: Exit code of a rank that saved its state because a signal asked it to stop.
EXIT_SAVED = 75
#: A rank that gets this signal adds its stack to the file that this variable names.
STACK_SIGNAL = signal.SIGRTMIN + 9
STACKS_VARIABLE = "PHALANX_STACKS_FILE"
_MESSAGE_LIMIT = 8_000
_TRACEBACK_LIMIT = 64_000


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What one rank runs, and where it reports an exception."""

    kind: Literal["script", "module", "command"]
    name: str
    args: tuple[str, ...]
    run_path: bool = False
    report_address: str = ""  # abstract unix socket, without its leading zero byte; "" reports nothing

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerPlan:
        values = json.loads(text)
        values["args"] = tuple(values["args"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class SignalState:
    """Dispositions and mask as they were when the command started; every rank starts with them."""

    ignored: frozenset[int]
    blocked: frozenset[int]

    @classmethod
    def current(cls) -> SignalState:
        ignored = {s for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN}
        return cls(
            ignored=frozenset(int(s) for s in ignored),
            blocked=frozenset(int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        )

    def restore(self, handled: Sequence[int]) -> None:
        """Undo the handlers set for ``handled`` and put the mask back."""
        for signum in handled:
            if signum in self.ignored:
                signal.signal(signum, signal.SIG_IGN)
            elif signum == signal.SIGINT:
                signal.signal(signum, signal.default_int_handler)
            else:
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def become_worker(
    guardian: int,
    streams: Sequence[int],
    private: Sequence[int],
    environ: Mapping[str, str],
    signals: SignalState,
    handled: Sequence[int],
) -> None:
    """Turn a fresh fork of the guardian into a rank's process. Called with every signal blocked.

    Args:
        guardian: Process id of the guardian; this process ends with it.
        streams: Descriptors to become 0, 1 and 2.
        private: The guardian's own descriptors, closed here.
        environ: Variables to set.
        signals: What to restore.
        handled: Signals with a handler of the guardian's or the launcher's.
    """
    os.setsid()
    processes.die_with_parent(guardian)
    signal.set_wakeup_fd(-1)
    spare = [os.dup(fd) for fd in streams]  # none of them may be overwritten below
    for target, fd in enumerate(spare):
        os.dup2(fd, target, inheritable=True)
    for fd in {*streams, *spare, *private} - {0, 1, 2}:
        os.close(fd)
    os.environ.update(environ)
    signals.restore(handled)


def exec_worker(plan: WorkerPlan) -> NoReturn:
    """Replace this process by the rank's own program: a fresh Python, or the user's command."""
    # Python ignores these two for itself; a new program expects them as they were.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    if plan.kind == "command":
        command = [plan.name, *plan.args]
    else:
        os.environ[PLAN_VARIABLE] = plan.to_json()
        command = [os.environ.get("PYTHON_EXEC", sys.executable), "-u", "-m", "phalanx.launch.worker"]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"phalanx: cannot run {command[0]!r}: {error.strerror}.\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


class _LiveWriter(io.BufferedWriter):
    """Passes every write on at once, whole: a bare FileIO (``python -u``) may lose the end of one.

    A signal during a long write to a pipe makes ``write`` return early, and the text layer above
    drops what is left; a buffered writer goes on with it.
    """

    def write(self, data: object) -> int:
        count = super().write(cast(bytes, data))
        self.flush()
        return count


def _open_stream(fd: int, name: str, mode: Literal["r", "w"], like: TextIO | None) -> TextIO | None:
    try:
        raw = io.FileIO(fd, mode, closefd=False)
    except OSError:
        return None
    raw.name = name  # as Python's own start-up does
    buffer = io.BufferedReader(raw) if mode == "r" else _LiveWriter(raw)
    stream = io.TextIOWrapper(
        buffer,
        encoding=like.encoding if like else "utf-8",
        errors=like.errors if like else ("backslashreplace" if fd == 2 else "strict"),
        newline="\n",
        line_buffering=mode == "w",
        write_through=mode == "w",
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


def _open_streams() -> None:
    """New ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` for descriptors 0, 1 and 2."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        like = getattr(sys, f"__{name}__")
        stream = _open_stream(fd, f"<{name}>", cast(Literal["r", "w"], mode), like)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _forget_parent() -> None:
    """What a fork shares and a fresh process would have of its own: generators, keys, gc."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"]
        process.current_process().authkey = os.urandom(32)
    # What was frozen stays so: without it the collector would touch, and so copy, every shared page.
    gc.enable()


class Reporter:
    """Sends a record of an uncaught exception to the launcher, by one datagram."""

    def __init__(self, address: str) -> None:
        self._address = b"\0" + address.encode() if address else b""
        self._pid = os.getpid()

    def send(self, error: BaseException, trace: types.TracebackType | None, *, origin: str) -> None:
        """``origin`` is "main", "thread" or "exit" (an exception that the script turned into an exit)."""
        if not self._address or os.getpid() != self._pid:  # a fork of the script's own
            return
        now, now_ns = time.time(), time.monotonic_ns()
        try:
            text = "".join(traceback.format_exception(type(error), error, trace))
            message = str(error)
        except Exception as formatting_error:
            text, message = "", f"(its message could not be formatted: {formatting_error!r})"
        record = {
            "origin": origin,
            "exception": type(error).__qualname__,
            "module": type(error).__module__,
            "message": message[:_MESSAGE_LIMIT],
            "traceback": text[-_TRACEBACK_LIMIT:],
            "time": now,
            "monotonic_ns": now_ns,
        }
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(2.0)
                sender.sendto(json.dumps(record).encode(), self._address)
        except OSError:  # the launcher is gone; the traceback on stderr is all there will be
            return

    def watch_threads(self) -> None:
        """Report exceptions that end a thread too; the process itself goes on, as in plain Python."""
        shown = threading.excepthook

        def hook(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
                self.send(args.exc_value, args.exc_traceback, origin="thread")
            shown(args)

        threading.excepthook = hook


def _script_folder(path: str) -> str:
    """``sys.path[0]`` of ``python path``: the folder of the script, a symbolic link followed."""
    if os.path.islink(path):
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return os.path.dirname(os.path.realpath(path))


def _set_first_path(folder: str) -> None:
    """Replace the entry that Python itself put first when the command was started."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return
    sys.path[:1] = [folder]


def _fresh_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        module.__dict__.update(__annotations__={})
    sys.modules["__main__"] = module
    return module


def _run_script(path: str, args: Sequence[str]) -> None:
    sys.argv = [path, *args]
    module = _fresh_main()
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):  # as `python folder` does
        _set_first_path(os.path.abspath(path))
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _set_first_path(_script_folder(path))
    full_path = os.path.join(os.getcwd(), path)  # not normalised, as in Python
    loader: importlib.machinery.SourceFileLoader | importlib.machinery.SourcelessFileLoader
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", full_path)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", full_path)
        try:
            source = loader.get_data(full_path)
        except OSError as error:
            sys.stderr.write(
                f"{sys.executable}: can't open file {full_path!r}: [Errno {error.errno}] {error.strerror}\n"
            )
            raise SystemExit(2) from None
        code = compile(source, full_path, "exec", dont_inherit=True)
    assert code is not None
    module.__dict__.update(__file__=full_path, __loader__=loader, __cached__=None)
    exec(code, module.__dict__)


def _run_target(plan: WorkerPlan) -> None:
    if plan.kind == "module":
        sys.argv = ["-m", *plan.args]
        _fresh_main()
        _set_first_path(os.getcwd())
        runpy._run_module_as_main(plan.name, alter_argv=True)  # type: ignore[attr-defined]
    elif plan.run_path:
        sys.argv = [plan.name, *plan.args]
        _fresh_main()
        runpy.run_path(plan.name, run_name="__main__")
    else:
        _run_script(plan.name, plan.args)


def _watch_steps() -> None:
    """For `phalanx bisect`: write down what the script's first steps compute, whatever it is written with."""
    if os.environ.get("PHALANX_BISECT_FOLDER"):
        from phalanx.dist.step_recorder import record_if_asked

        record_if_asked()


def _show_stack_when_asked() -> None:
    """For `--hang-timeout-s`: this process, and those that it forks, can be asked where they stand."""
    path = os.environ.pop(STACKS_VARIABLE, "")
    if path:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=False)


def _own_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of this file and of runpy, which plain Python would not have."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _report_exit(reporter: Reporter, error: SystemExit) -> None:
    """An exit that says failure, together with the exception that led to it if the script caught one."""
    if error.code in (None, 0, EXIT_SAVED):
        return
    cause = error.__cause__ or error.__context__
    while isinstance(cause, SystemExit):
        cause = cause.__cause__ or cause.__context__
    if cause is not None and not isinstance(cause, GeneratorExit):
        reporter.send(cause, cause.__traceback__, origin="exit")
    elif isinstance(error.code, str):
        reporter.send(error, None, origin="exit")


def _show(error: BaseException, trace: types.TracebackType | None) -> int:
    """Print an uncaught exception as the interpreter does; return the exit code."""
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as asked:
        return asked.code if isinstance(asked.code, int) else 1
    except BaseException:
        kind, raised, inner = sys.exc_info()
        assert kind is not None
        assert raised is not None
        sys.__excepthook__(kind, raised, inner)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def main(plan: WorkerPlan) -> None:
    """Run the plan's script or module; ends by returning or by SystemExit.

    To be called outside every other frame that matters: what follows is the interpreter's own end
    (threads joined, atexit, objects released).
    """
    _open_streams()
    _forget_parent()
    if not faulthandler.is_enabled() and sys.stderr is not None:
        faulthandler.enable()  # a crash in native code then says where Python stood
    reporter = Reporter(plan.report_address)
    reporter.watch_threads()
    _show_stack_when_asked()
    try:
        _watch_steps()
        _run_target(plan)
        return
    except SystemExit as error:
        _report_exit(reporter, error)
        raise
    except BaseException as error:
        trace = _own_part(error.__traceback__)
        error.__traceback__ = trace
        reporter.send(error, trace, origin="main")
        code = _show(error, trace)
    sys.exit(code)


if __name__ == "__main__":
    main(WorkerPlan.from_json(os.environ.pop(PLAN_VARIABLE)))

"""What ranks print: whole in the logs, shown in lines or as on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.output import LineAssembler, Output, Sink
from tests.launch.launching import Launcher, wait_until

# --------------------------------------------------------------------------- lines


@given(
    st.binary(max_size=200).map(lambda b: b.replace(b"\r", b"")), st.lists(st.integers(1, 50), max_size=20)
)
def test_lines_come_out_whole_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    lines, shown, position = LineAssembler(b"> "), b"", 0
    for size in [*cuts, len(data)]:
        piece = lines.feed(data[position : position + size], 0.0)
        assert piece == b"" or piece.endswith(b"\n")
        shown, position = shown + piece, position + size
    shown += lines.finish()
    expected = b"".join(b"> " + line + b"\n" for line in data.split(b"\n")[:-1])
    rest = data.split(b"\n")[-1]
    assert shown == expected + (b"> " + rest + b"\n" if rest else b"")


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    lines = LineAssembler(b"> ")
    assert lines.feed(b"\r 10%", 0.0) == b""
    assert lines.feed(b"\r 20%", 5.0) == b""
    assert lines.feed(b"\r 30%", 11.0) == b"> 30%\n".replace(b"30%", b" 30%")
    assert lines.feed(b"\r 40%", 12.0) == b""
    assert lines.feed(b"\r100%\n", 13.0) == b"> 100%\n"


def test_windows_line_ends_are_line_ends() -> None:
    assert LineAssembler(b"> ").feed(b"a\r\nb\r\n", 0.0) == b"> a\n> b\n"


def test_a_bar_does_not_pile_up_in_memory() -> None:
    lines = LineAssembler(b"")
    for number in range(100_000):
        lines.feed(b"\r%d" % number, 0.0)
    assert lines.finish() == b"99999\n"


def test_a_line_without_end_is_shown_in_pieces() -> None:
    lines = LineAssembler(b"> ")
    shown = b"".join(lines.feed(b"x" * 65536, 0.0) for _ in range(100)) + lines.finish()
    assert shown.replace(b"> ", b"").replace(b"\n", b"") == b"x" * 6_553_600
    assert len(shown.splitlines()) < 10


# --------------------------------------------------------------------------- our own stdout


def test_a_sink_never_waits_for_its_reader() -> None:
    read, write = os.pipe()
    sink = Sink(write)
    data = os.urandom(1 << 20)
    sink.write(data, whole_lines=False)  # returns, though nobody reads
    assert 0 < sink.pending_bytes < len(data)
    got = b""
    while len(got) < len(data):
        got += os.read(read, 1 << 16)
        sink.flush()
    assert (got, sink.pending_bytes) == (data, 0)
    os.close(read)
    sink.write(b"x", whole_lines=False)
    assert (sink.is_open, sink.closed_by_reader) == (False, True)
    os.close(write)


def test_a_full_disk_costs_one_warning_and_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    shown_read, shown_write = os.pipe()
    monkeypatch.setattr("phalanx.launch.output._is_terminal", lambda fd: False)
    output = Output(tmp_path, 1, show="auto", shown_only=None, warn=warnings.append)
    output._stdout = Sink(shown_write)
    streams = output.open_rank(1, 0, 0, 1)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, output._logs[0].fd)
    os.close(full)
    for _ in range(3):
        os.write(streams[1], b"text\n")
        (readable,) = [fd for fd in output.interests() if select.select([fd], [], [], 0)[0]]
        output.handle(readable)
    assert os.read(shown_read, 100) == b"text\n" * 3
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert output.tail(0) == "text\n" * 3
    output.close_rank_streams()
    for fd in (*streams, shown_read, shown_write):
        os.close(fd)


# --------------------------------------------------------------------------- runs in a pipe


def test_ranks_in_a_pipe_are_shown_as_whole_prefixed_lines(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        rank = os.environ["RANK"]
        for number in range(20):
            sys.stdout.write(f"line {number} of ")
            sys.stdout.flush()
            time.sleep(0.005)
            sys.stdout.write(f"{rank}\\n")
        print("to stderr", rank, file=sys.stderr)
        sys.stdout.buffer.write(b"\\xff\\x00 binary, no newline")
        """
    )
    done = launcher.start(script)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0
    for rank in (0, 1):
        own = [line for line in out.splitlines() if line.startswith(b"[rank %d] " % rank)]
        expected = [b"[rank %d] line %d of %d" % (rank, number, rank) for number in range(20)]
        assert own == [*expected, b"[rank %d] \xff\x00 binary, no newline" % rank]
        assert f"[rank {rank}] to stderr {rank}\n".encode() in err
        log = (launcher.logs / f"rank-{rank}.log").read_bytes()
        assert log.startswith(b"line 0 of %d\nline 1 of %d\n" % (rank, rank))
        assert log.count(b"\n") == 21
        assert b"\xff\x00 binary, no newline" in log
        assert (launcher.logs / "attempt-1" / f"rank-{rank}.log").read_bytes() == log
    assert len(out.splitlines()) == 42


def test_one_rank_is_shown_as_it_is_at_once_and_gets_our_stdin(launcher: Launcher) -> None:
    script = launcher.script(
        "name = input('Name? ')\nprint('hello', name, end='')\nimport sys\nassert sys.stdin.read() == 'rest'"
    )
    process = launcher.start(script, ranks=1, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.read(6) == b"Name? "  # though there is no newline
    out, err = process.communicate(b"Ada\nrest", timeout=30)
    assert (process.returncode, out) == (0, b"hello Ada"), err


def test_stdin_belongs_to_rank_0(launcher: Launcher) -> None:
    script = launcher.script("import os, sys\nprint(os.environ['RANK'], repr(sys.stdin.read()))")
    done = launcher.run(script, input=b"data\n")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 'data\\n'", "[rank 1] 1 ''"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--show", "rank0"], ["0"]),
        (["--local-ranks-filter", "1"], ["[rank 1] 1"]),
    ],
)
def test_which_ranks_are_shown(launcher: Launcher, options: list[str], expected: list[str]) -> None:
    done = launcher.run(*options, launcher.script("import os; print(os.environ['RANK'])"))
    assert done.stdout.splitlines() == expected
    assert (launcher.logs / "rank-0.log").read_text() + (launcher.logs / "rank-1.log").read_text() == "0\n1\n"


def test_a_hundred_megabytes_arrive_whole(launcher: Launcher) -> None:
    script = launcher.script(
        "import sys\nfor i in range(100):\n    sys.stdout.write(('%099d\\n' % i) * 10_000)"
    )
    with (launcher.folder / "out").open("wb") as out:
        process = launcher.start(script, ranks=1, stdout=out)
        assert process.wait(timeout=100) == 0
    expected = b"".join((b"%099d\n" % i) * 10_000 for i in range(100))
    assert (launcher.folder / "out").read_bytes() == expected
    assert (launcher.logs / "rank-0.log").read_bytes() == expected


def test_a_slow_reader_slows_the_ranks_and_loses_nothing(launcher: Launcher) -> None:
    """Also when the ranks fail meanwhile: the report comes last."""
    script = launcher.script(
        "import sys\nsys.stdout.write('x' * 99 + '\\n')\nfor i in range(30000): print('y' * 99)\n1 / 0"
    )
    process = launcher.start(script, ranks=1, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    got = b""
    while True:
        piece = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
        if not piece:
            break
        got += piece
        time.sleep(0.01)
    assert process.wait() == 1
    assert got.count(b"y" * 99 + b"\n") == 30_000
    assert got.index(b"First failure") > got.rindex(b"yyy")


def test_a_daemon_that_holds_the_pipe_does_not_hold_the_run(launcher: Launcher) -> None:
    script = launcher.script(
        "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('done')"
    )
    began = time.monotonic()
    done = launcher.run(script)
    assert done.returncode == 0
    assert time.monotonic() - began < 30
    assert launcher.left() == {}


def test_a_log_folder_that_cannot_be_made_costs_one_warning(launcher: Launcher) -> None:
    launcher.script("print('fine')")
    driver = launcher.script(
        """
        import sys
        from pathlib import Path
        from phalanx.launch.run import run
        from phalanx.launch.spec import RunSpec, Target
        target = Target(kind="script", name="script.py", display="script")
        outcome = run(RunSpec(target=target, nproc_per_node=1, log_dir=Path("/proc/no-such-folder/logs")))
        outcome() if callable(outcome) else sys.exit(outcome)
        """,
        "driver.py",
    )
    done = subprocess.run(
        [sys.executable, driver], cwd=launcher.folder, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert "the run goes on" in done.stderr


# --------------------------------------------------------------------------- runs on a terminal


class Terminal:
    """A run on a pseudo-terminal: what a user would type and see."""

    def __init__(
        self, launcher: Launcher, words: Sequence[object], *, ranks: int = 2, stdin: int | None = None
    ) -> None:
        self._launcher = launcher
        self.seen = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(launcher.folder)
            if stdin is not None:
                os.dup2(stdin, 0)
            command = launcher.command(*words, ranks=ranks)
            os.execve(command[0], command, launcher.environ)
        self.resize(31, 97)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def read(self) -> bool:
        """Read a piece; False at the end."""
        try:
            if select.select([self.fd], [], [], 0.05)[0]:
                self.seen += os.read(self.fd, 1 << 16)
        except OSError:
            return False
        return True

    def expect(self, text: str) -> None:
        wait_until(lambda: text.encode() in self.seen or not self.read(), f"{text!r} on the terminal")
        assert text.encode() in self.seen, self.seen.decode(errors="replace")

    def finish(self) -> int:
        wait_until(lambda: not self.read(), "end of the terminal's output")
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_rank_0_has_a_terminal_of_the_right_size(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, signal, sys
        if os.environ["RANK"] != "0":
            sys.exit(print("hidden"))
        size = os.get_terminal_size()
        print(os.environ["RANK"], sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.isatty(), size.columns, size.lines)
        sys.stdout.write("10%\\r20%\\r")
        def resized(*_):
            print("now", os.get_terminal_size().columns)
            sys.exit()
        signal.signal(signal.SIGWINCH, resized)
        print("waiting", file=sys.stderr)
        signal.pause()
        """
    )
    terminal = Terminal(launcher, [script])
    terminal.expect("waiting")
    terminal.resize(40, 123)
    assert terminal.finish() == 0
    seen = terminal.seen.decode()
    assert "0 True True True 97 31\r\n10%\r20%\rwaiting\r\nnow 123\r\n" in seen
    assert "hidden" not in seen
    assert (launcher.logs / "rank-1.log").read_text() == "hidden\n"
    assert "97 31\n10%\r20%\rwaiting\nnow 123\n" in (launcher.logs / "rank-0.log").read_bytes().decode()


def test_breakpoint_works_in_rank_0(launcher: Launcher) -> None:
    script = launcher.script("x = 20\nbreakpoint()\nprint('x is', x)\n")
    terminal = Terminal(launcher, [script], ranks=1)
    terminal.expect("(Pdb) ")
    terminal.type("p 1+x\n")
    terminal.expect("21\r\n")
    terminal.type("c\n")
    assert terminal.finish() == 0, terminal.seen
    assert b"x is 20\r\n" in terminal.seen


def test_ctrl_c_on_a_terminal_interrupts_every_rank_once(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, time
        rank = os.environ["RANK"]
        try:
            open(f"ready-{rank}", "w").close()
            time.sleep(600)
        except KeyboardInterrupt:
            with open(f"interrupted-{rank}", "a") as file:
                file.write("x")
            raise
        """
    )
    terminal = Terminal(launcher, [script])
    wait_until(lambda: len(list(launcher.folder.glob("ready-*"))) == 2, "ranks")
    terminal.type("\x03")
    assert terminal.finish() == 130
    assert [(launcher.folder / f"interrupted-{rank}").read_text() for rank in (0, 1)] == ["x", "x"]
    assert b"ended by SIGINT" in terminal.seen


def test_the_terminal_is_put_back_when_a_rank_ends_in_the_debugger(launcher: Launcher) -> None:
    terminal = Terminal(launcher, [launcher.script("import readline\nbreakpoint()\nx = 1")], ranks=1)
    before = termios.tcgetattr(terminal.fd)
    terminal.expect("(Pdb) ")
    assert termios.tcgetattr(terminal.fd)[3] & termios.ECHO == 0  # readline echoes by itself
    os.kill(terminal.pid, signal.SIGTERM)
    wait_until(lambda: not launcher.left(), "end of all processes")
    assert termios.tcgetattr(terminal.fd) == before
    assert terminal.finish() == 143


def test_show_all_on_a_terminal_prefixes_the_other_ranks(launcher: Launcher) -> None:
    script = launcher.script("import os; print('I am', os.environ['RANK'])")
    terminal = Terminal(launcher, ["--show", "all", script])
    assert terminal.finish() == 0
    assert re.search(rb"^I am 0\r$", terminal.seen, re.MULTILINE)
    assert re.search(rb"^\[rank 1\] I am 1\r$", terminal.seen, re.MULTILINE)


def test_piped_stdin_reaches_rank_0_on_a_terminal(launcher: Launcher) -> None:
    read, write = os.pipe()
    os.write(write, b"from the pipe\n")
    os.close(write)
    script = launcher.script("import sys\nprint(sys.stdout.isatty(), sys.stdin.isatty(), input())")
    terminal = Terminal(launcher, [script], ranks=1, stdin=read)
    os.close(read)
    assert terminal.finish() == 0
    assert b"True False from the pipe\r\n" in terminal.seen

"""However a run ends, no process of it is left."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.launching import Launcher, wait_until

#: How long the last process may live after the launcher has ended.
PATIENCE_S = 5.0

#: Says that a rank is up, then does what the test wants.
PREAMBLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
def ready():
    Path(f"ready-{os.environ['RANK']}").write_text(str(os.getpid()))
def wait_forever():
    ready()
    while True:
        time.sleep(1)
"""


def _start(launcher: Launcher, body: str, *options: object, ranks: int = 2) -> subprocess.Popen[bytes]:
    script = launcher.script(PREAMBLE + body)
    return launcher.start("--grace-s", "1", *options, script, ranks=ranks)


def _rank_pids(launcher: Launcher, ranks: int = 2) -> list[int]:
    """Process ids of the ranks, once all are up."""
    files = [launcher.folder / f"ready-{rank}" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), "ranks that are up")
    return [int(file.read_text()) for file in files]


def _assert_nothing_left(launcher: Launcher) -> None:
    wait_until(lambda: not launcher.left(), f"end of {launcher.left()}", PATIENCE_S)


#: Script body -> exit code of the run. The ranks end by themselves.
ENDINGS = {
    "finish": ("pass", 0),
    "exception": ("raise ValueError('x')", 1),
    "exit-code": ("sys.exit(3)", 1),
    "os-exit": ("os._exit(7)", 1),
    "segfault": ("os.kill(os.getpid(), signal.SIGSEGV)", 1),
    "killed-rank": (
        "os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else wait_forever()",
        1,
    ),
    "setsid-grandchild": ("subprocess.Popen(['sleep', '600'], start_new_session=True)", 0),
    "daemon": (
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
""",
        0,
    ),
    "grandchild-deaf-to-sigterm": (
        """
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout.readline()
raise ValueError("x")
""",
        1,
    ),
    "loader-workers": (
        """
import torch
loader = torch.utils.data.DataLoader(list(range(1000)), num_workers=2)
for item in loader:
    os._exit(5)
""",
        1,
    ),
    "spawned-children": (
        """
def child(index):
    time.sleep(600)
if __name__ == "__main__":
    import torch.multiprocessing as mp
    context = mp.spawn(child, nprocs=2, join=False)
    if os.environ["RANK"] == "1":
        os._exit(9)
    context.join()
""",
        1,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_when_the_ranks_end(launcher: Launcher, ending: str) -> None:
    body, code = ENDINGS[ending]
    process = _start(launcher, body)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (out, err)
    assert launcher.left() == {}  # at once: the launcher ends after everything else


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGQUIT, 143), (signal.SIGHUP, 143)],
)
def test_nothing_is_left_after_a_signal(launcher: Launcher, signum: int, code: int) -> None:
    """Also with a rank that ignores it and one with a daemon of its own."""
    body = """
if os.environ["RANK"] == "0":
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, signal.SIG_IGN)
else:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
wait_forever()
"""
    process = _start(launcher, body)
    _rank_pids(launcher)
    process.send_signal(signum)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert launcher.left() == {}


@pytest.mark.parametrize("options", [[], ["--no-preload"]], ids=["forked", "no-preload"])
def test_nothing_is_left_when_the_launcher_is_killed(launcher: Launcher, options: list[str]) -> None:
    process = _start(
        launcher, "subprocess.Popen(['sleep', '600'], start_new_session=True)\nwait_forever()", *options
    )
    _rank_pids(launcher)
    process.kill()
    process.wait()
    _assert_nothing_left(launcher)


def test_nothing_is_left_when_the_guardian_is_killed(launcher: Launcher) -> None:
    process = _start(launcher, "subprocess.Popen(['sleep', '600'], start_new_session=True)\nwait_forever()")
    ranks = _rank_pids(launcher)
    guardian = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guardian, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3
    assert b"guardian" in err
    assert launcher.left() == {}


def test_nothing_is_left_when_a_command_is_killed(launcher: Launcher) -> None:
    """`--no-python` with a shell that waits for a child."""
    launcher.script("touch ready-$RANK; sleep 600; echo never", "job.sh")
    process = launcher.start("--grace-s", "1", "--no-python", "sh", launcher.folder / "job.sh")
    wait_until(lambda: all((launcher.folder / f"ready-{rank}").exists() for rank in range(2)), "ranks")
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, b"")
    assert launcher.left() == {}


def test_nothing_is_left_when_the_reader_of_stdout_goes(launcher: Launcher) -> None:
    """`phalanx run ... | head -1`."""
    process = _start(launcher, "ready()\nwhile True:\n    print('line', flush=True)\n    time.sleep(0.01)")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert launcher.left() == {}


def test_nothing_is_left_when_the_terminal_closes(launcher: Launcher) -> None:
    script = launcher.script(PREAMBLE + "wait_forever()")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(launcher.folder)
        words = launcher.command("--grace-s", "1", script)
        os.execve(words[0], words, launcher.environ)
    try:
        _rank_pids(launcher)
    finally:
        os.close(terminal)
    deadline = time.monotonic() + 20
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        assert time.monotonic() < deadline, "the launcher goes on without its terminal"
        time.sleep(0.02)
    assert launcher.left() == {}


def test_a_run_goes_on_when_the_launchers_parent_is_killed(launcher: Launcher) -> None:
    script = launcher.script(
        PREAMBLE + "ready()\ntime.sleep(1)\nPath(f'done-{os.environ[\"RANK\"]}').touch()"
    )
    shell = subprocess.Popen(
        ["sh", "-c", '"$@" & wait', "sh", *launcher.command(script)],
        cwd=launcher.folder,
        env=launcher.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _rank_pids(launcher)
    finally:
        shell.kill()
        shell.wait()
    wait_until(
        lambda: all((launcher.folder / f"done-{rank}").exists() for rank in range(2)), "end of the ranks"
    )
    _assert_nothing_left(launcher)

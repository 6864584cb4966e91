"""`phalanx run --gpus auto:N --wait`: idle GPUs in turn, among jobs of several users."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.launch.options import Given
from phalanx.launch.waiting import check
from phalanx.tools.usage import UsageMistake
from tests.launch.launching import wait_until
from tests.nvml.machine import GIB, Machine, StandInGpu, build_libraries, uuid_of

A, B = uuid_of("a"), uuid_of("b")
NOBODY = 65534

#: Takes the user's id, the folder of the locks and a GPU; imports come first, since others may not read them.
HOLDER = """
import os, sys
from pathlib import Path
from phalanx.dist import gpu_locks
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
assert gpu_locks.hold(sys.argv[3], Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""
#: Waits in the queue as another user until its standard input ends.
WAITER = """
import os, sys
from pathlib import Path
from phalanx.launch.options import Given
from phalanx.launch.waiting import Waiting
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
with Waiting({"gpus": Given("auto:2", "--gpus"), "wait": Given("", "--wait")}, Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libraries(tmp_path_factory.mktemp("nvml"))


class Node:
    """A machine of two GPUs with lock files of its own."""

    def __init__(self, libraries: Path, folder: Path) -> None:
        self.folder = folder
        # pytest's own folders are closed to other users.
        self._temporary = Path(tempfile.mkdtemp(prefix="phalanx-test-"))
        self._temporary.chmod(0o1777)
        self.locks = self._temporary / "phalanx-gpus"
        self.machine = Machine(libraries, folder, [StandInGpu(uuid=A), StandInGpu(uuid=B)])
        self._processes: list[subprocess.Popen[str]] = []
        (folder / "job.py").write_text(
            "import os, sys\n"
            "with open(sys.argv[1], 'a') as out:\n"
            "    out.write(os.environ['RANK'] + ' of ' + os.environ['WORLD_SIZE'] + '\\n')\n"
        )

    def start(self, *words: object) -> tuple[subprocess.Popen[str], Callable[[], str]]:
        """A `phalanx run` here, and what it has said so far."""
        said = self.folder / f"said-{len(self._processes)}"
        environ = self.machine.environ(TMPDIR=str(self._temporary))
        with said.open("w") as out:
            command = [sys.executable, "-m", "phalanx", "run", *map(str, words), "job.py", f"{said}.ranks"]
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                text=True,
            )
        self._processes.append(process)
        return process, said.read_text

    def other(self, code: str, user: int, *args: str) -> subprocess.Popen[str]:
        """A process of a user, once it holds what it is to hold."""
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(user), str(self.locks), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        shutil.rmtree(self._temporary)


@pytest.fixture
def node(libraries: Path, tmp_path: Path) -> Iterator[Node]:
    made = Node(libraries, tmp_path)
    yield made
    made.end()


def _given(**values: str) -> dict[str, Given]:
    return {key: Given(text, "--" + key.replace("_", "-")) for key, text in values.items()}


def _done(process: subprocess.Popen[str], said: Callable[[], str]) -> int:
    try:
        return process.wait(120)
    except subprocess.TimeoutExpired:
        raise AssertionError(said()) from None


def test_waits_for_a_process_and_names_it(node: Node) -> None:
    node.machine.describe([StandInGpu(uuid=A), StandInGpu(uuid=B, compute={os.getpid(): 2 * GIB})])
    process, said = node.start("--gpus", "auto:2", "--wait")
    wait_until(lambda: "waiting for" in said(), "job in the queue", 90)
    line = next(line for line in said().splitlines() if "waiting for" in line)
    assert line.startswith("phalanx run: waiting for 2 idle GPUs: 1 of 2 idle, in use: GPU 1 by ")
    assert f"(pid {os.getpid()}, " in line
    assert ", since 20" in line
    assert process.poll() is None
    node.machine.describe([StandInGpu(uuid=A), StandInGpu(uuid=B)])
    assert _done(process, said) == 0, said()
    assert said().count("waiting for") == 1
    ranks = (node.folder / "said-0.ranks").read_text().splitlines()
    assert sorted(ranks) == ["0 of 2", "1 of 2"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_waits_for_the_lock_and_the_turn_of_another_user(node: Node) -> None:
    holder = node.other(HOLDER, NOBODY, A)
    ahead = node.other(WAITER, NOBODY)
    process, said = node.start("--gpus", "auto:2", "--wait")
    wait_until(lambda: "waiting for" in said(), "job in the queue", 90)
    assert "1 of 2 idle, in use: GPU 0 by another job (" in said()
    assert f"(pid {holder.pid}, nobody, since 20" in said()
    assert "; 1 job came first." in said()
    ahead.kill()  # its file stays, its place does not
    ahead.wait()
    assert list(node.locks.glob("waiting-*1.lock"))
    assert process.poll() is None
    holder.kill()
    assert _done(process, said) == 0, said()
    assert not list(node.locks.glob("waiting-*2.lock"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_idle_gpus_are_left_to_who_came_first(node: Node) -> None:
    node.other(WAITER, NOBODY)
    process, said = node.start("--gpus", "auto:1", "--wait", "--wait-timeout-s", 1)
    assert _done(process, said) == 3
    assert "no 1 idle GPU within 1 s: 2 of 2 idle; 1 job came first.\nFix: a longer" in said()


def test_ctrl_c_ends_the_wait_and_leaves_the_queue(node: Node) -> None:
    node.other(HOLDER, os.getuid(), A)
    process, said = node.start("--gpus", "auto:2", "--wait")
    wait_until(lambda: "waiting for" in said(), "job in the queue", 90)
    process.send_signal(signal.SIGINT)
    assert _done(process, said) == 130
    assert "Traceback" not in said()
    assert not list(node.locks.glob("waiting-*"))


def test_more_than_the_node_has_is_refused_at_once(node: Node) -> None:
    process, said = node.start("--gpus", "auto:3", "--wait")
    assert _done(process, said) == 2
    assert "2 GPUs are visible here, so the wait would never end.\nFix: --gpus auto:2 --wait" in said()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"wait": ""}, "--wait without --gpus: only idle GPUs"),
        ({"wait": "", "gpus": "0,1"}, "only idle GPUs are waited for"),
        ({"wait_timeout_s": "5", "gpus": "auto:2"}, "without --wait"),
        ({"wait": "", "gpus": "auto:2", "nnodes": "2"}, "each node would hold its GPUs"),
        ({"wait": "", "gpus": "auto:2", "hosts": "a,b"}, "of this node only"),
        ({"wait": "", "gpus": "auto:2", "emit": "slurm"}, "of this node only"),
    ],
)
def test_where_it_cannot_work_it_is_refused(values: dict[str, str], told: str) -> None:
    with pytest.raises(UsageMistake, match=told) as caught:
        check(_given(**values))
    assert str(caught.value).count("Fix: ") == 1

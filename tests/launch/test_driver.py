"""`--local-nodes`: several node agents on this machine, one driver."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import Launcher, wait_until

_ALL_REDUCE = """
    import os, sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    print(int(total), *(os.environ[name] for name in names), *sys.argv[1:], flush=True)
    dist.barrier()
"""

_WAIT = """
    import os, signal, sys, time
    from pathlib import Path
    rank = os.environ["RANK"]
    if "deaf" in sys.argv:
        signal.signal(signal.SIGINT, lambda *_: Path(f"heard-{rank}").touch())
    Path(f"waiting-{rank}").touch()
    while True:
        time.sleep(0.05)
"""


def nodes(launcher: Launcher, count: int, *words: object, ranks: int = 1, **options: Any) -> Any:
    return launcher.run("--local-nodes", count, *words, ranks=ranks, timeout_s=300.0, **options)


def start_waiting(launcher: Launcher, count: int, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    script = launcher.script(_WAIT)
    process = launcher.start("--local-nodes", count, "--grace-s", 2, script, *words, ranks=1, **options)
    wait_until(
        lambda: len(list(launcher.folder.glob("waiting-*"))) == count, "ranks on all nodes", timeout_s=180
    )
    return process


def test_four_nodes_have_one_world_and_one_exit_code(launcher: Launcher) -> None:
    done = nodes(launcher, 4, launcher.script(_ALL_REDUCE), "--x", "a b", ranks=2)
    assert done.returncode == 0, done.stderr
    shown = sorted(done.stdout.splitlines())
    expected = [
        f"[n{r // 2} rank {r}] 8 {r} {r % 2} {r // 2} 2 4 8 --x a b"
        for r in range(8)
    ]  # fmt: skip
    assert shown == expected
    assert "8 ranks on 4 nodes (2 on each); node 0 at 127.0.0.1:" in done.stderr
    for rank in range(8):
        own = launcher.logs / f"node-{rank // 2}" / f"rank-{rank}.log"
        assert own.read_text() == (launcher.logs / f"rank-{rank}.log").read_text()
    run = json.loads((launcher.logs / "run.json").read_text())
    assert run["exit_code"] == 0
    assert [node["nproc_per_node"] for node in run["nodes"]] == [2] * 4
    assert not launcher.left()
    assert not list(launcher.folder.glob(".phalanx-*"))


def test_rank_0_alone_is_shown_as_it_is_and_reads_our_stdin(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys
        if os.environ["RANK"] == "0":
            print(len(sys.stdin.buffer.read()), end="", flush=True)
        else:
            print("hidden", sys.stdin.read() == "")
        """
    )
    done = nodes(launcher, 2, "--show", "rank0", script, input=b"x" * 3_000_000)
    assert (done.returncode, done.stdout) == (0, "3000000")
    assert (launcher.logs / "rank-1.log").read_text() == "hidden True\n"


def test_on_a_terminal_rank_0_has_a_terminal(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys
        print(os.environ["RANK"], sys.stdout.isatty(), os.get_terminal_size().columns if sys.stdout.isatty() else 0)
        """
    )
    master, slave = pty.openpty()
    subprocess.run(["stty", "cols", "97", "rows", "31"], stdin=slave, check=True)
    process = launcher.start("--local-nodes", 2, script, ranks=1, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while select.select([master], [], [], 180.0)[0]:
        try:
            data = os.read(master, 4096)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(master)
    assert process.wait(60) == 0
    assert b"\n0 True 97\r\n" in shown
    assert b"1 False" not in shown


def test_the_rank_that_failed_first_is_named_with_its_node(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "2":
            raise ValueError("no such colour")
        dist.barrier()
        """
    )
    done = nodes(launcher, 3, script)
    assert done.returncode == 1
    assert "First failure: rank 2 (local rank 0" in done.stderr
    assert done.stderr.count("First failure") == 1
    first = launcher.failure()["first"]
    assert (first["rank"], first["node"], first["exception"]) == (2, 2, "ValueError")
    assert not launcher.left()


def test_a_failure_ends_nodes_whose_ranks_would_go_on(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(600)
        """
    )
    done = nodes(launcher, 3, script)
    assert done.returncode == 1
    assert "First failure: rank 1" in done.stderr
    assert "exit code 7" in done.stderr
    assert not launcher.left()


def test_arguments_that_the_script_refuses_are_exit_code_2(launcher: Launcher) -> None:
    script = launcher.script("import argparse; argparse.ArgumentParser().parse_args()")
    done = nodes(launcher, 2, script, "--nonsense")
    assert done.returncode == 2
    assert "does not take these arguments" in done.stderr


def test_all_saved_is_exit_code_75(launcher: Launcher) -> None:
    script = launcher.script("import sys; sys.exit(75)")
    assert nodes(launcher, 2, script).returncode == 75


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_node(launcher: Launcher, signum: int, code: int) -> None:
    process = start_waiting(launcher, 3)
    process.send_signal(signum)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert f"ended by {signal.Signals(signum).name}; no rank is left".encode() in err
    assert not launcher.left()


def test_one_ctrl_c_is_forwarded_and_a_second_one_kills(launcher: Launcher) -> None:
    script = launcher.script(_WAIT)
    process = launcher.start("--local-nodes", 2, "--grace-s", 600, script, "deaf", ranks=1)
    wait_until(lambda: len(list(launcher.folder.glob("waiting-*"))) == 2, "ranks", timeout_s=180)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: len(list(launcher.folder.glob("heard-*"))) == 2, "the interrupt in all ranks")
    assert process.poll() is None
    time.sleep(0.3)  # a second keystroke, not an echo of the first
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert not launcher.left()


@pytest.mark.parametrize("victim", ["driver", "relay", "agent"])
def test_nothing_outlives_a_killed_part(launcher: Launcher, victim: str) -> None:
    process = start_waiting(launcher, 2)
    marks = {"relay": "phalanx.launch.node ", "agent": "phalanx.launch.node_agent "}
    if victim == "driver":
        process.kill()
    else:
        found = [pid for pid, words in launcher.left().items() if marks[victim] in words]
        os.kill(min(found), signal.SIGKILL)
    process.communicate(timeout=120)
    wait_until(lambda: not launcher.left(), "end of every process", timeout_s=60)
    if victim != "driver":
        assert process.returncode == 1


def test_restarts_are_those_of_all_nodes(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0" and os.environ["RANK"] == "1":
            raise ValueError("once")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("attempt", attempt, int(total), flush=True)
        """
    )
    done = nodes(launcher, 2, "--max-restarts", 1, script)
    assert done.returncode == 0, done.stderr
    assert "[n0 rank 0] attempt 1 2" in done.stdout
    assert "[n1 rank 1] attempt 1 2" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--local-nodes", "0"], "--local-nodes 0: must be 1 to 64"),
        (["--local-nodes", "two"], "--local-nodes two: not a whole number"),
        (["--local-nodes", "2", "--hosts", "a,b"], "both say which nodes"),
        (["--local-nodes", "2", "--nnodes", "3"], "--nnodes 3 with --local-nodes 2"),
        (["--local-nodes", "2", "--node-rank", "0"], "--node-rank 0 with --local-nodes 2"),
        (["--local-nodes", "2", "--rdzv-endpoint", "a:1"], "leave --rdzv-endpoint out"),
        (["--local-nodes", "2", "--gpus", "97"], "97"),
    ],
)
def test_wrong_words_start_nothing(launcher: Launcher, words: list[str], message: str) -> None:
    done = launcher.run(*words, launcher.script("print('ran')"), ranks=1, timeout_s=180)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "ran" not in done.stdout


def test_dry_run_says_what_every_node_gets(launcher: Launcher) -> None:
    done = launcher.run("--local-nodes", 3, "--dry-run", launcher.script("print('ran')"))
    assert done.returncode == 0
    assert "a node agent on 3 nodes" in done.stdout
    assert "node 2       this machine" in done.stdout
    assert not Path(launcher.logs).exists()

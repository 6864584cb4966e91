"""Restarts, signals and exit codes of whole runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.launching import Launcher, wait_until

READY = """
import os, signal, sys, time
rank = os.environ["RANK"]
def ready():
    # Renamed at the end: a signal during the implicit close of a file would be lost with its exception.
    with open(f".ready-{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f".ready-{rank}", f"ready-{rank}")
"""


def _start_ready(launcher: Launcher, body: str, *options: object) -> subprocess.Popen[bytes]:
    process = launcher.start(*options, launcher.script(READY + body))
    files = [launcher.folder / f"ready-{rank}" for rank in (0, 1)]
    wait_until(
        lambda: process.poll() is not None or all(f.exists() and f.read_text() for f in files), "ranks"
    )
    assert process.poll() is None, process.communicate()
    return process


def test_every_restart_is_clean(launcher: Launcher) -> None:
    """Each attempt meets on a store of its own, on which nothing of the one before is left."""
    script = launcher.script(
        """
        import os
        import torch, torch.distributed as dist
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.init_process_group("gloo")
        numbers = torch.ones(1)
        dist.all_reduce(numbers)
        with open(f"attempts-{dist.get_rank()}", "a") as file:
            file.write(f"{attempt} {int(numbers)} {os.environ['MASTER_PORT']}\\n")
        dist.barrier()
        if attempt < 15 and dist.get_rank() == attempt % 2:
            os._exit(1)
        dist.barrier()
        """
    )
    done = launcher.run("--max-restarts", 15, script, timeout_s=120)
    assert done.returncode == 0, done.stderr
    rows = [(launcher.folder / f"attempts-{rank}").read_text().split("\n")[:-1] for rank in (0, 1)]
    assert rows[0] == rows[1]
    assert [row.split()[:2] for row in rows[0]] == [[str(attempt), "2"] for attempt in range(16)]
    assert len({row.split()[2] for row in rows[0]}) > 1
    assert {path.name for path in launcher.logs.glob("attempt-*")} == {f"attempt-{k}" for k in range(1, 17)}
    assert os.readlink(launcher.logs / "rank-0.log") == "attempt-16/rank-0.log"
    assert not (launcher.logs / "failure.json").exists()


@pytest.mark.parametrize(
    ("signum", "rank_codes", "code"),
    [
        (signal.SIGTERM, "75", 75),
        (signal.SIGTERM, "0", 143),
        (signal.SIGINT, "130", 130),
    ],
)
def test_a_signal_reaches_every_rank_as_itself(
    launcher: Launcher, signum: int, rank_codes: str, code: int
) -> None:
    """And is no reason for a restart."""
    body = f"""
def stop(signum, frame):
    with open(f"stopped-{{rank}}", "a") as file:
        file.write(f"{{signum}} ")
    sys.exit({rank_codes})
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
ready()
time.sleep(600)
"""
    process = _start_ready(launcher, body, "--max-restarts", 3)
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert [(launcher.folder / f"stopped-{rank}").read_text() for rank in (0, 1)] == [f"{int(signum)} "] * 2
    assert b"First failure" not in err
    assert json.loads((launcher.logs / "run.json").read_text())["exit_code"] == code


def test_ranks_that_save_and_leave_are_not_restarted(launcher: Launcher) -> None:
    body = "open('count', 'a').write('x')\ntime.sleep(0.3 * int(rank))\nsys.exit(75)"
    done = launcher.run("--max-restarts", 3, launcher.script(READY + body))
    assert (done.returncode, done.stderr.count("attempt")) == (75, 0)
    assert (launcher.folder / "count").read_text() == "xx"


def test_a_second_ctrl_c_kills_at_once(launcher: Launcher) -> None:
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(600)"
    process = _start_ready(launcher, body, "--grace-s", "300")
    process.send_signal(signal.SIGINT)
    time.sleep(0.4)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_the_grace_period_ends(launcher: Launcher) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(600)"
    process = _start_ready(launcher, body, "--grace-s", "0.5")
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_sigusr1_reaches_ranks_that_expect_it_and_spares_the_others(launcher: Launcher) -> None:
    """Slurm's --signal: a rank without a handler would be ended by it."""
    body = """
if rank == "1":
    signal.signal(signal.SIGUSR1, lambda *a: (open("heard", "w").close(), sys.exit(0)))
ready()
while not os.path.exists("heard"):
    time.sleep(0.01)
"""
    process = _start_ready(launcher, body)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"SIGUSR1 was not passed on to rank 0" in err


def test_a_hangup_ignored_at_the_start_stays_ignored(launcher: Launcher) -> None:
    """`nohup`: for the launcher and for the ranks."""
    script = launcher.script(
        READY
        + "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\nready()\nwhile not os.path.exists('go'): time.sleep(0.01)"
    )
    process = launcher.start(script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_until(lambda: len(list(launcher.folder.glob("ready-*"))) == 2 or process.poll() is not None, "ranks")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    (launcher.folder / "go").touch()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err


def test_a_stopped_run_pauses_its_ranks(launcher: Launcher) -> None:
    """Ctrl-Z and fg."""
    body = "ready()\nwhile not os.path.exists('go'): time.sleep(0.01)"
    process = _start_ready(launcher, body)
    rank = int((launcher.folder / "ready-1").read_text())

    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: state(process.pid) == "T" and state(rank) == "T", "stopped processes")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: state(rank) != "T", "rank that goes on")
    (launcher.folder / "go").touch()
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_port_that_is_taken_is_named_before_anything_starts(launcher: Launcher) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launcher.run("--master-port", port, launcher.script("print('started')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--master-port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_free_is_used_in_every_attempt(launcher: Launcher) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    script = launcher.script(
        """
        import os
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print("port", os.environ["MASTER_PORT"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
        """
    )
    done = launcher.run("--master-port", port, "--max-restarts", 1, script)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) >= {"port", str(port)}


def test_two_runs_started_together_both_finish(launcher: Launcher) -> None:
    script = launcher.script(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()"
    )
    first = launcher.start(script)
    launcher.logs = launcher.folder / "other"
    second = launcher.start(script)
    for process in (first, second):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


ENVIRONMENT = """
import json, os
open(f"environment-{os.environ['RANK']}", "w").write(json.dumps(dict(os.environ)))
"""


def test_ranks_find_what_torchrun_sets(launcher: Launcher) -> None:
    script = launcher.script(ENVIRONMENT)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script],
        cwd=launcher.folder,
        env=launcher.environ,
        capture_output=True,
        timeout=60,
        check=True,
    )
    files = [launcher.folder / f"environment-{rank}" for rank in (0, 1)]
    expected = [json.loads(file.read_text()) for file in files]
    assert launcher.run(script).returncode == 0
    for file, theirs in zip(files, expected, strict=True):
        ours = json.loads(file.read_text())
        assert set(theirs) - set(ours) == set()
        assert {name for name in set(ours) - set(theirs) if not name.startswith("PHALANX")} == set()
        own = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        differing = {name for name in theirs if theirs[name] != ours[name]} - own
        assert differing == set()


def test_a_script_that_spawns_its_own_workers_runs_unchanged(launcher: Launcher) -> None:
    """It chooses MASTER_PORT itself; under torchrun its ranks would wait for the agent's store there."""
    script = launcher.script(
        """
        import os, socket
        import torch, torch.distributed as dist, torch.multiprocessing as mp
        def worker(rank, port):
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
            dist.init_process_group("gloo", rank=rank, world_size=2)
            numbers = torch.ones(1)
            dist.all_reduce(numbers)
            assert numbers.item() == 2
            dist.destroy_process_group()
        if __name__ == "__main__":
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            mp.spawn(worker, args=(port,), nprocs=2)
        """
    )
    done = launcher.run(script, ranks=1, timeout_s=60)
    assert done.returncode == 0, done.stderr


def test_an_error_of_our_own_is_one_message_and_code_3(launcher: Launcher) -> None:
    driver = launcher.script(
        """
        import sys
        from pathlib import Path
        from phalanx.launch import run as module
        from phalanx.launch.spec import RunSpec, Target
        def broken(self):
            raise KeyError("inner")
        module._Run._set_environ = broken
        spec = RunSpec(target=Target(kind="script", name="x.py", display="x"), nproc_per_node=1, log_dir=Path("logs"))
        sys.exit(module.run(spec))
        """
    )
    done = subprocess.run(
        [sys.executable, driver], cwd=launcher.folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert done.stderr.startswith("phalanx run: internal error: KeyError: 'inner'\n")
    assert "Traceback" not in done.stderr


def test_two_agents_meet_on_one_machine(launcher: Launcher) -> None:
    """Two nodes' worth of ranks through torch's c10d rendezvous, each attempt on a new store."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    script = launcher.script(
        """
        import os
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        numbers = torch.ones(1)
        dist.all_reduce(numbers)
        print("sum", int(numbers), "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        """
    )
    where = [
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "job",
    ]
    agents = []
    for node in range(2):
        launcher.logs = launcher.folder / f"logs-{node}"
        agents.append(launcher.start(*where, "--node-rank", node, script, ranks=1))
    texts = [agent.communicate(timeout=90) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], texts
    assert all(b"sum 2 attempt 0" in out for out, _ in texts)


def test_a_run_that_waits_for_other_nodes_can_be_interrupted(launcher: Launcher) -> None:
    """torch's store waits outside of Python, where a handler alone would not be heard."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    where = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
    process = launcher.start(*where, launcher.script("pass"), ranks=1)

    def is_listening() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_listening, "store that waits for the other node")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"while waiting for other nodes" in err
    assert launcher.left() == {}

"""`phalanx gpus` as a user types it, on machines played by the stand-in NVML."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch import host_outputs
from phalanx.launch.host_choice import starter
from phalanx.launch.host_outputs import HostOutputs, hosts_named, other_nodes_of_allocation
from phalanx.tools.usage import UsageMistake
from tests.launch.launching import Launcher, wait_until
from tests.nvml.machine import GIB, GPU_IS_LOST, Machine, StandInGpu, build_libraries, uuid_of

A, B = uuid_of("a"), uuid_of("b")
PHALANX = [sys.executable, "-m", "phalanx"]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libraries(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(libraries: Path, tmp_path: Path) -> Callable[..., Machine]:
    def make(*gpus: StandInGpu, **settings: object) -> Machine:
        return Machine(libraries, tmp_path, gpus, **settings)

    return make


def run(machine: Machine, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PHALANX, "gpus", *words],
        env=machine.environ(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def report(machine: Machine, *words: str, **environ: str) -> Any:
    done = run(machine, "--json", *words, **environ)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_contract_of_the_json(machine: Callable[..., Machine]) -> None:
    found = report(
        machine(StandInGpu(uuid=A, used_bytes=2 * GIB, compute={os.getpid(): 2 * GIB}, utilization=(33, 1)))
    )
    (gpu,) = found["gpus"]
    assert (found["schema"], found["driver_version"]) == (1, "535.104.05")
    assert {name: gpu[name] for name in ("index", "cuda_ordinal", "uuid", "name")} == {
        "index": 0,
        "cuda_ordinal": 0,
        "uuid": A,
        "name": "NVIDIA H100 80GB HBM3",
    }
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (80 * GIB, 2 * GIB)
    assert (gpu["utilization_percent"], gpu["temperature_c"], gpu["power_w"]) == (33, 35, 70.0)
    assert (gpu["processes"][0]["pid"], gpu["processes"][0]["rank"]) == (os.getpid(), None)


@pytest.mark.parametrize("options", [[], ["--no-preload"]], ids=["forked", "started"])
def test_ranks_of_phalanx_run_and_the_gpus_they_hold(
    machine: Callable[..., Machine], tmp_path: Path, options: list[str]
) -> None:
    """Real ranks on two stand-in GPUs, held by their launcher; both are free once it has ended."""
    folder = tmp_path / "job"
    folder.mkdir()
    locks = tmp_path / "tmp"
    locks.mkdir()
    described = machine(StandInGpu(uuid=A), StandInGpu(uuid=B), StandInGpu(uuid=uuid_of("c")))
    launcher = Launcher(folder)
    launcher.environ = {
        **described.environ(TMPDIR=str(locks)),
        **{k: v for k, v in launcher.environ.items() if "MARKER" in k},
    }
    script = launcher.script("""
        import os, pathlib, time
        rank = os.environ["RANK"]
        pathlib.Path(f"pid-{rank}.part").write_text(str(os.getpid()))
        os.rename(f"pid-{rank}.part", f"pid-{rank}")
        while not os.path.exists("stop"):
            time.sleep(0.02)
    """)
    process = launcher.start("--gpus", f"{A},{B}", *options, script, ranks=2)
    try:
        pids = [
            int(
                wait_until(
                    lambda rank=rank: (
                        (folder / f"pid-{rank}").exists() and (folder / f"pid-{rank}").read_text()
                    ),
                    "a rank",
                )
            )  # type: ignore[misc]
            for rank in (0, 1)
        ]
        used = [
            StandInGpu(uuid=uuid, used_bytes=3 * GIB, compute={pid: 3 * GIB})
            for uuid, pid in zip((A, B), pids, strict=True)
        ]
        described.describe([*used, StandInGpu(uuid=uuid_of("c"))])
        found = report(described, TMPDIR=str(locks))["gpus"]
        for rank, gpu in enumerate(found[:2]):
            (one,) = gpu["processes"]
            assert (one["rank"], one["local_rank"], one["world_size"], one["job"]) == (rank, rank, 2, "logs")
            assert (gpu["held_by"]["pid"], gpu["held_by"]["job"]) == (process.pid, "logs")
        assert (found[2]["held_by"], found[2]["idle"]) == (None, True)
        text = run(described, TMPDIR=str(locks)).stdout
        assert text.count(f"held by logs (pid {process.pid})") == 2
        (folder / "stop").touch()
        process.communicate(timeout=60)
        assert process.returncode == 0
        described.describe([StandInGpu(uuid=A), StandInGpu(uuid=B)])
        assert [gpu["held_by"] for gpu in report(described, TMPDIR=str(locks))["gpus"]] == [None, None]
    finally:
        launcher.clean_up()


def test_a_lost_gpu_is_exit_code_one(machine: Callable[..., Machine]) -> None:
    done = run(machine(StandInGpu(uuid=A), StandInGpu(uuid=B, fails={"all": GPU_IS_LOST})))
    assert done.returncode == 1
    assert "1 not usable" in done.stdout


def test_without_a_gpu_one_line_and_the_computer(machine: Callable[..., Machine]) -> None:
    done = run(machine(init=9))
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.endswith("no NVIDIA GPU (Driver Not Loaded).")
    assert second.startswith("CPU load ")


def fake_torch(folder: Path) -> str:
    """A torch that is imported at once; the PYTHONPATH for it."""
    build = "version = type('v', (), {'cuda': '13.0'}); _C = type('c', (), {'_cuda_getArchFlags': lambda: 'sm_90'})"
    (folder / "fake").mkdir()
    (folder / "fake/torch.py").write_text(f"__version__ = '2.9.1'; {build}")
    return str(folder / "fake")


def test_torch_is_asked_in_a_process_of_its_own(machine: Callable[..., Machine], tmp_path: Path) -> None:
    described = machine(StandInGpu(uuid=A, capability=(3, 5), name="Tesla K40c"), driver="580.82.07")
    path = fake_torch(tmp_path)
    found = report(described, "--capability", "--topology", PYTHONPATH=path)
    (host,) = found["hosts"]
    assert host["torch"] == {
        "version": "2.9.1",
        "cuda": "13.0",
        "hip": None,
        "architectures": ["sm_90"],
        "error": "",
    }
    assert host["capabilities"][0]["torch_runs"] is False
    assert host["topology"]["links"] == [["X"]]
    assert run(described, "--capability", PYTHONPATH=path).returncode == 1
    (tmp_path / "fake/torch.py").write_text("raise ImportError('broken on purpose')")
    done = run(described, "--capability", PYTHONPATH=path)
    assert "ImportError: broken on purpose" in done.stdout
    assert done.returncode == 0


def test_nothing_heavy_is_imported(machine: Callable[..., Machine]) -> None:
    code = (
        "import sys; from phalanx.launch.entry import command; command(['gpus']);"
        "heavy = {'torch', 'numpy', 'rich', 'psutil', 'json', 'socket', 'phalanx.launch.options'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    machine(StandInGpu(uuid=A)).run(code)


def test_a_closed_output_is_no_error(machine: Callable[..., Machine]) -> None:
    described = machine(StandInGpu(uuid=A))
    words = shlex.join([*PHALANX, "gpus"])
    for ending in (">&-", "| true"):
        done = subprocess.run(
            ["sh", "-c", f"{words} {ending}"],
            env=described.environ(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_watch_goes_on_until_ctrl_c(machine: Callable[..., Machine]) -> None:
    described = machine(StandInGpu(uuid=A))
    process = subprocess.Popen(
        [*PHALANX, "gpus", "--watch", "0.05"],
        env=described.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        seen: list[str] = []
        while sum("idle" in line for line in seen) < 4:
            line = process.stdout.readline()
            assert line, process.communicate()
            seen.append(line)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")


def test_a_name_that_the_terminal_cannot_show(machine: Callable[..., Machine]) -> None:
    process = subprocess.Popen(
        ["python3", "-c", "input()", "Übung\033[2J"], executable=sys.executable, stdin=subprocess.PIPE
    )
    try:
        described = machine(StandInGpu(uuid=A, compute={process.pid: GIB}))
        done = run(described, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert (done.returncode, done.stderr) == (0, "")
        assert "?bung?[2J" in done.stdout
    finally:
        process.communicate(b"\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--watch", "x"], "--watch x: a number of seconds"),
        (["--watch=0"], "--watch 0: a number of seconds"),
        (["--watch=nan"], "--watch nan: a number of seconds"),
        (["--watch", "--json"], "--watch and --json"),
        (["--hosts", "a", "--local"], "--local with --hosts"),
        (["--hosts", "a", "--hostfile", "b"], "both name hosts"),
        (["--hosts", "-oProxyCommand=x"], "is no host name"),
        (["--hosts", "node[1-"], "a bracket is not closed"),
        (["--hosts", ""], "there is an empty name"),
        (["--hosts", "a,a"], "a is on line 1 already"),
        (["--hostfile", "nowhere"], "it cannot be read (No such file"),
        (["--hosts", "a", "--ssh-port", "70000"], "a port is 1 to 65535"),
        (["--ssh-port", "22"], "--ssh-port without hosts"),
        (["--timeout-s", "-1"], "--timeout-s -1: a number of seconds"),
        (["--wtach"], "Fix: did you mean --watch?"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_mistakes(
    machine: Callable[..., Machine], capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    from phalanx.launch import entry

    assert entry.command(["gpus", *words]) == 2
    out, err = capfd.readouterr()
    assert message in err
    assert "Fix: " in err
    assert out == ""


# ------------------------------------------------------------------------------------------------ several hosts

SSH = """#!/bin/sh
# A stand-in for ssh: hosts are machines described in files, "down" refuses.
while [ "$1" != -- ]; do shift; done
case "$2" in
    down) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255 ;;
    strange) echo "Welcome to this cluster"; exit 0 ;;
esac
echo "Last login: today"
STAND_IN_NVML=$FOLDER/$2.txt exec sh -c "$3"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755 | stat.S_IXUSR)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "FOLDER": str(tmp_path)}


def test_several_hosts_by_ssh(machine: Callable[..., Machine], tmp_path: Path, ssh: dict[str, str]) -> None:
    described = machine(StandInGpu(uuid=A))
    (tmp_path / "one.txt").write_text((tmp_path / "machine.txt").read_text())
    described.describe([StandInGpu(uuid=B, used_bytes=5 * GIB)], driver="550.54.14")
    (tmp_path / "two.txt").write_text((tmp_path / "machine.txt").read_text())
    done = run(described, "--hosts", "two,one,down,strange", "--json", **ssh)
    found = json.loads(done.stdout)
    assert done.returncode == 1  # not all have answered
    assert [(gpu["host"], gpu["uuid"]) for gpu in found["gpus"]] == [("two", B), ("one", A)]
    assert found["driver_version"] is None  # they differ
    errors = {host["host"]: host["error"] for host in found["hosts"]}
    assert errors == {
        "two": "",
        "one": "",
        "down": "phalanx gpus ended with exit code 255: ssh: connect to host down port 22: Connection refused",
        "strange": "its answer cannot be read: 'Welcome to this cluster'",
    }
    path = fake_torch(tmp_path)
    text = run(described, "--hosts", "one,two", "--capability", "--topology", **ssh, PYTHONPATH=path).stdout
    assert text.count("THIS TORCH") == 2
    assert text.count("GPU 0  X") == 2


def test_a_slurm_allocation_is_the_nodes_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    assert other_nodes_of_allocation(job, "login") == ["node1", "node2"]
    assert other_nodes_of_allocation({**job, "SLURM_JOB_NODELIST": "node1"}, "login") == ["node1"]
    assert other_nodes_of_allocation({**job, "SLURM_JOB_NODELIST": "node1"}, "node1") == []
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    assert other_nodes_of_allocation({**job, **step}, "node1") == []  # one task shows its own node
    assert other_nodes_of_allocation({}, "node1") == []
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        host_outputs,
        "HostOutputs",
        lambda hosts, start, timeout_s: started.append((type(start).__name__, list(hosts))),
    )
    monkeypatch.setattr("phalanx.launch.host_choice.HostOutputs", host_outputs.HostOutputs)
    starter(None, None, None, 1.0)
    starter("node2", None, None, 1.0)
    starter("elsewhere", None, None, 1.0)
    assert started == [("BySlurm", ["node1", "node2"]), ("BySlurm", ["node2"]), ("BySsh", ["elsewhere"])]


def test_hosts_as_they_are_typed() -> None:
    hosts = hosts_named("me@node[01-02],other", "--hosts")
    assert [(host.user, host.name) for host in hosts] == [("me", "node01"), ("me", "node02"), (None, "other")]
    with pytest.raises(UsageMistake):
        hosts_named("a;b", "--hosts")


def test_a_host_that_never_answers_is_given_up() -> None:
    def start(host: str, words: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["sh", "-c", "echo half; sleep 600 & wait"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    (output,) = HostOutputs(["a"], start, 0.2)(["gpus"]).values()
    assert (output.exit_code, output.stdout) == (None, "half\n")
    assert "no answer within 0.2 s" in output.stderr


def test_a_program_that_cannot_be_started_is_that_hosts_answer() -> None:
    def start(host: str, words: Any) -> Any:
        return subprocess.Popen(["/nonexistent/ssh"])

    (output,) = HostOutputs(["a"], start, 1.0)(["gpus"]).values()
    assert output.exit_code is None
    assert output.stderr == "/nonexistent/ssh: No such file or directory"

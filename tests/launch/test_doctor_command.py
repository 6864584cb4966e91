"""`phalanx doctor` from the command line: options, outputs, exit codes, prologs."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.tools.doctor.ids import KNOWN_IDS
from tests.conftest import ROOT
from tests.launch.slurm_lab import missing, slurm_lab
from tests.tools.doctor.live import Doctor, quick_torch

_WHY_NOT = missing()
OLD_DRIVER = "PyTorch version: 1.6.0\nCUDA used to build PyTorch: 10.2\nNvidia driver version: 418.67\nIs CUDA available: False\n"
HEALTHY = "PyTorch version: 2.6.0+cpu\nPython version: 3.11.7\n"


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


# usage


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--timeout-s", "0"], "--timeout-s 0: seconds"),
        (["--timeout-s", "nan"], "--timeout-s nan: seconds"),
        (["--timeout-s", "1e9"], "--timeout-s 1e9: seconds"),
        (["--nnodes", "two"], "--nnodes two: a whole number"),
        (["--nnodes", "0"], "--nnodes 0: a whole number"),
        (["--loader-workers", "-1"], "--loader-workers -1: a whole number"),
        (["--port", "70000"], "--port 70000: a whole number of 1 to 65535"),
        (["--fail-on", "error"], "--fail-on error: warn or fail"),
        (["--json", "--markdown"], "two different outputs"),
        (["--node", "--report", "x"], "--report and --node are two different questions"),
        (["--report", "/no/such/file"], "--report /no/such/file: No such file or directory"),
        (["--report", "/"], "--report /: Is a directory"),
        (["--hosts", "a,,b"], "there is an empty name"),
        (["--hosts", "-oProxyCommand=x"], "is no host name"),
        (["--hosts", "n[2-1]"], "runs backwards"),
        (["--hosts", "all"], "the nodes of a Slurm job, but this is in none"),
        (["--hosts", "a,a"], "is on line"),
        (["--hostfile", "/no/such/file"], "--hostfile /no/such/file: No such file"),
        (["--hosts", "a", "--hostfile", "b"], "one of them names the hosts"),
        (["extra"], "unexpected extra argument"),
        (["--skip", "shm-too-smal"], "Fix: --skip shm-too-small"),
        (["--skip", "zzz"], "no finding has that id"),
        (["--repot", "x"], "did you mean --report"),
    ],
)
def test_wrong_words(doctor: Doctor, words: list[str], said: str) -> None:
    done = doctor.run(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Fix: " in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_variables_are_options(doctor: Doctor) -> None:
    done = doctor.run(environ={"PHALANX_DOCTOR_TIMEOUT_S": "x"})
    assert (done.returncode, "--timeout-s x" in done.stderr) == (2, True)


def test_help_has_a_line_for_every_option(doctor: Doctor) -> None:
    from phalanx.launch.doctor_command import doctor_command

    done = doctor.run("--help")
    assert done.returncode == 0
    for option in doctor_command.params:
        text = getattr(option, "help", "") or ""
        assert option.opts[0] in done.stdout
        assert "." in text, option.name
        assert option.envvar == "PHALANX_DOCTOR_" + option.opts[0][2:].replace("-", "_").upper()


def test_torch_is_not_imported_by_the_command_itself(tmp_path: Path) -> None:
    """Neither a report nor a node's check, nor the help, ever touches it."""
    (tmp_path / "torch.py").write_text("import os; os._exit(99)")
    report = tmp_path / "report.txt"
    report.write_text(HEALTHY)
    doctor = Doctor(tmp_path)
    for words in (["--help"], ["--report", str(report)], ["--node"]):
        done = doctor.run(*words, environ={"PYTHONPATH": str(tmp_path)})
        assert done.returncode in (0, 1), (words, done.stderr)


# a report


def test_a_report_from_stdin(doctor: Doctor) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", "--report", "-", "--json"],
        input=OLD_DRIVER,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert (report["schema"], report["verdict"]) == (1, "fail")
    assert report["findings"][0]["id"] == "driver-too-old"
    assert set(report["findings"][0]) == {"id", "status", "title", "evidence", "fix"}
    assert report["facts"]["driver"]["version"] == "418.67"
    assert "NVIDIA driver" in report["found"]
    assert "packages" in report["lacked"]


def write(folder: Path, text: str) -> str:
    path = folder / "report.txt"
    path.write_text(text)
    return str(path)


def test_the_exit_code_follows_fail_on(doctor: Doctor, tmp_path: Path) -> None:
    text = HEALTHY + "numpy==2.1.0\nNCLL_DEBUG=INFO\n"
    assert doctor.run("--report", write(tmp_path, text), "--fail-on", "fail").returncode == 0
    done = doctor.run("--report", write(tmp_path, OLD_DRIVER), "--skip", "driver-too-old")
    assert "driver-too-old" not in done.stdout


def test_markdown_masks_names(doctor: Doctor, tmp_path: Path) -> None:
    text = (
        OLD_DRIVER
        + "File /home/ada/train.py line 3 in main\nRuntimeError: The NVIDIA driver on your system is too old\n"
    )
    done = doctor.run("--report", write(tmp_path, text), "--markdown")
    assert done.returncode == 1
    assert "### phalanx doctor: fail" in done.stdout
    assert "ada" not in done.stdout


@pytest.mark.parametrize("text", ["", "\0\0\0", "{", "[]", "null", '{"schema": 1}', "\ufeff", "é" * 1000])
def test_a_report_of_nothing(doctor: Doctor, tmp_path: Path, text: str) -> None:
    done = doctor.run("--report", write(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_our_own_json_is_read_again(doctor: Doctor, tmp_path: Path) -> None:
    first = doctor.run("--node", "--json")
    path = write(tmp_path, first.stdout)
    again = json.loads(doctor.run("--report", path, "--json").stdout)
    assert again["facts"]["platform"] == json.loads(first.stdout)["facts"]["platform"]


# output


def test_text_of_this_machine(doctor: Doctor, tmp_path: Path) -> None:
    done = doctor.run("--no-self-test", environ={**quick_torch(tmp_path), "NCLL_DEBUG": "INFO"})
    assert done.returncode == 0, done.stdout
    assert "WARN" in done.stdout
    assert "variable-misspelt" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("no_colour", [False, True])
def test_a_terminal_is_told_what_is_waited_for(doctor: Doctor, tmp_path: Path, no_colour: bool) -> None:
    environ = quick_torch(tmp_path, code="import time; time.sleep(0.5)") | {
        "NCLL_DEBUG": "INFO",
        "TERM": "xterm",
    }
    if no_colour:
        environ["NO_COLOR"] = "1"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "doctor", "--no-self-test"],
        cwd=tmp_path,
        env=doctor.environ | environ,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not data:
            break
        shown += data
    assert process.wait(60) == 0
    os.close(ours)
    assert b"asking" in shown
    assert b"torch" in shown
    assert (b"\x1b[1;33mWARN" in shown) is not no_colour


def test_a_terminal_without_utf_8(doctor: Doctor, tmp_path: Path) -> None:
    path = write(tmp_path, OLD_DRIVER + "OS: Übuntu ☃\n")
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", "--report", path],
        env=doctor.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr


def test_a_closed_pipe_is_no_error(doctor: Doctor, tmp_path: Path) -> None:
    path = write(tmp_path, OLD_DRIVER)
    line = f"{shlex.quote(sys.executable)} -m phalanx doctor --report {path} | true"
    done = subprocess.run(["bash", "-c", line + "; echo ${PIPESTATUS[0]}"], capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert done.stdout.strip() in (b"141", b"1")


def test_ctrl_c_leaves_no_process(doctor: Doctor, tmp_path: Path) -> None:
    environ = quick_torch(
        tmp_path, code=f"open({str(tmp_path / 'up')!r}, 'w').close()\nimport signal\nwhile 1: signal.pause()"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "doctor"],
        cwd=tmp_path,
        env=doctor.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, 2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


# a node


def test_a_node_in_an_empty_environment(tmp_path: Path) -> None:
    """As slurmd starts a prolog: no HOME, no PATH, no terminal, standard input closed, / as folder."""
    done = subprocess.run(
        ["env", "-i", sys.executable, "-m", "phalanx", "doctor", "--node", "--json"],
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert "torch" not in report["facts"]
    assert report["facts"].get("env", {}) == {}


def test_a_node_as_another_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable]
    seen = subprocess.run([*words, "-c", "import phalanx"], cwd="/", capture_output=True, check=False)
    if seen.returncode != 0:
        pytest.skip(f"another user may not read this installation: {seen.stderr.decode()[-200:]}")
    done = subprocess.run(
        [*words, "-m", "phalanx", "doctor", "--node", "--json"],
        cwd="/",
        env={},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"] in ("ok", "warn")


_WITH_A_PROBE = """
import sys
from phalanx.tools.doctor import gather
{change}
from phalanx.launch.entry import main
main(["doctor", "--node", "--json", "--timeout-s", "{timeout}", *sys.argv[1:]])
"""


def node_with(change: str, *words: str, timeout_s: float = 5.0) -> subprocess.CompletedProcess[str]:
    """`phalanx doctor --node` after one of its own parts was changed."""
    code = _WITH_A_PROBE.format(change=change, timeout=timeout_s)
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd="/", capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("fault", ["1 / 0", "import os; os.abort()"])
def test_a_broken_probe_of_ours_drains_no_node(fault: str) -> None:
    change = f"def broken(scene): {fault}\nchanged = dict(gather.PROBES, limits=broken); gather.gather_node.__kwdefaults__['probes'] = changed"
    done = node_with(change, "--fail-on", "warn")
    assert done.returncode == 0, done.stdout + done.stderr
    notes = {entry["id"]: entry["status"] for entry in json.loads(done.stdout)["findings"]}
    assert notes["probe-failed"] == "skip"


def test_a_broken_check_of_ours_drains_no_node() -> None:
    """Exit code 3: a prolog takes that for "not known"."""
    done = node_with(
        "from phalanx.tools.doctor import node\ndef broken(*a, **b): 1 / 0\nnode.diagnose = broken"
    )
    assert done.returncode == 3
    assert "internal error, ZeroDivisionError" in done.stderr


def test_a_driver_that_hangs_is_a_warning_in_time() -> None:
    change = (
        "import signal\nfrom phalanx.tools.doctor.probes import isolation\nisolation._kill = lambda child: None\n"
        "def hangs(scene):\n    while True: signal.pause()\n"
        "changed = dict(gather.PROBES, NVML=hangs); gather.gather_node.__kwdefaults__['probes'] = changed"
    )
    done = node_with(change, timeout_s=2.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {entry["id"]: entry["status"] for entry in json.loads(done.stdout)["findings"]}
    assert found["driver-does-not-answer"] == "warn"
    assert node_with(change, "--fail-on", "warn", timeout_s=2.0).returncode == 1


# Slurm


@pytest.mark.skipif(_WHY_NOT is not None, reason=f"Slurm lab: {_WHY_NOT}")
def test_the_hosts_of_an_allocation(tmp_path: Path) -> None:
    environ = quick_torch(tmp_path)
    with slurm_lab() as lab:
        words = ["-N2", "-n2", sys.executable, "-m", "phalanx", "doctor", "--hosts", "all", "--json"]
        done = lab.salloc(*words, environ=environ, cwd=tmp_path, timeout_s=120)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert sorted(report["hosts"]) == ["n1", "n2"]
    nodes = {host["facts"]["env"]["SLURMD_NODENAME"] for host in report["hosts"].values()}
    assert nodes == {"n1", "n2"}
    assert "host-does-not-answer" not in [entry["id"] for entry in report["findings"]]


def test_ids_are_complete() -> None:
    """Every id that a finding can have may be skipped by name."""
    import ast
    import re

    from phalanx.tools.doctor.symptom_table import __dict__ as table

    used = {
        symptom.id
        for value in table.values()
        if isinstance(value, tuple)
        for symptom in value
        if hasattr(symptom, "id")
    }
    makers = {"fail", "warn", "fine", "proven", "suspected", "Finding"}
    for path in (ROOT / "tools" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in makers:
                for argument in node.args[:2]:
                    if isinstance(argument, ast.Constant) and re.fullmatch(
                        r"[a-z0-9]+(-[a-z0-9]+)+", str(argument.value)
                    ):
                        used.add(str(argument.value))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                names = [
                    getattr(name, "id", "")
                    for target in node.targets
                    if isinstance(target, ast.Tuple)
                    for name in target.elts
                ]
                used |= {
                    str(value.value)
                    for name, value in zip(names, node.value.elts, strict=False)
                    if name == "cause" and isinstance(value, ast.Constant)
                }
    assert used - KNOWN_IDS == set()


def test_the_command_is_listed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "--help"], capture_output=True, text=True, check=True
    )
    assert "doctor" in done.stdout

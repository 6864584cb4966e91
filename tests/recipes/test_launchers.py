"""The recipe under every launcher, told to stop, and killed: the same job each time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.recipes.runs import read_metrics
from tests.conftest import ROOT

JOB = ("--data", "digits", "--epochs", "1", "--log-every-steps", "7", "--output-dir", "run")
LAUNCHERS = {
    "python": [sys.executable, "-m", "phalanx.recipes.mnist"],
    "phalanx run": [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "mnist"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "phalanx.recipes.mnist"),
    ],
    # accelerate takes its --multi_gpu for "several processes on this machine", GPUs or not; with --cpu it starts one.
    "accelerate launch": [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *(
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            "0",
        ),
        *("-m", "phalanx.recipes.mnist"),
    ],
}


def _run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, timeout=150, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_the_same_job(launcher: str, tmp_path: Path) -> None:
    if launcher.startswith("accelerate"):
        pytest.importorskip("accelerate")
    done = _run([*LAUNCHERS[launcher], *JOB], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("test accuracy") == 1
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(line["split"], line["step"]) for line in lines] == [
        ("train", 7), ("train", 14), ("train", 21), ("validation", 21), ("test", 21),
    ]  # fmt: skip
    ranks = 1 if launcher == "python" else 2
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-21" / "state.json").read_text())
    assert f'"world_size": {ranks}' in json.dumps(state)


def test_a_bad_value_is_one_message_on_several_ranks(tmp_path: Path) -> None:
    done = _run([*LAUNCHERS["torchrun"], "--data", "mnist"], tmp_path)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("Fix: --download") == 1


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    words = [*LAUNCHERS["python"], *JOB, "--ledger", "ledger"]
    words[words.index("--epochs") + 1] = "200"
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    ledger, deadline = tmp_path / "ledger" / "rank-0.jsonl", time.monotonic() + 60
    while not (ledger.is_file() and ledger.read_text().count("\n") > 5):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    # An epoch may have ended, and been saved, before the signal came.
    saved = (tmp_path / "run" / "checkpoints").glob("step-*[0-9]")
    step = max(int(path.name.split("-")[1]) for path in saved)
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = ledger.read_text().count("\n")
    # The signals are taken over at the first `maybe_save`, after the first step's line.
    while ledger.read_text().count("\n") < lines + 5:
        assert process.poll() is None
        assert time.monotonic() < deadline + 60
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    steps = [json.loads(line)["step"] for line in ledger.read_text().splitlines() if line.endswith("}")]
    assert steps == list(range(1, len(steps) + 1))  # none lost, none run twice
    assert len(steps) > step


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_kills_leave_no_trace() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "kill_resume.py", "--kills", "5", "--workers", "2", "--json"],
        capture_output=True, text=True, check=False, env=environ, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 5
    assert found["problems"] == []

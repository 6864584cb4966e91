"""`phalanx run --emit slurm`: the script's lines, and the script in a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.options import Given
from phalanx.launch.sbatch_words import options_of
from phalanx.tools.usage import UsageMistake
from tests.launch.launching import wait_until
from tests.launch.slurm_lab import SlurmLab, missing, slurm_lab

_WHY_NOT = missing()
in_the_lab = pytest.mark.skipif(_WHY_NOT is not None, reason=f"Slurm lab: {_WHY_NOT}")

ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
RUN = [sys.executable, "-m", "phalanx", "run"]


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    with slurm_lab() as running:
        yield running


def _emit(folder: Path, *words: object, code: int = 0) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_RUN_")}
    command = [*RUN, "--emit", "slurm", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def _headers(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_nodes_ranks_gpus_and_the_users_words(tmp_path: Path) -> None:
    folder = tmp_path / "my folder"
    folder.mkdir()
    (folder / "train it.py").touch()
    words = ["--nnodes", 2, "--gpus", "auto:4", "--nproc-per-node", 4, "--max-restarts", 1]
    text = _emit(folder, *words, "--sbatch", "-A 'my acct' --time 10:00", "train it.py", "--lr", "a $b")
    assert _headers(text) == [
        "--job-name=train_it",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--gpus-per-node=4",
        f"--chdir='{folder}'",
        "--output=%x-%j.out",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@150",
        "-A 'my acct'",
        "--time=10:00",
    ]
    (line,) = [line for line in text.splitlines() if "phalanx run" in line]
    assert shlex.split(line.removesuffix(" &"))[6:] == [
        *("--nproc-per-node", "4", "--max-restarts", "1", "train it.py", "--lr", "a $b"),
    ]
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("-A acct job.sh", "'job.sh' is no option of sbatch's"),
        ("-n 8", "--ntasks does not go with --emit slurm"),
        ("--ntasks-per-node=4", "--ntasks-per-node does not go with --emit slurm"),
        ("--wrap=ls", "--wrap does not go with"),
        ("-a 1-4", "--array does not go with"),
        ("-p", "-p has no value"),
        ("-y 3", "sbatch has no option -y"),
        ("--signal=USR2@60", "--signal=USR2@60: the script saves"),
        ("-A 'acct", "No closing quotation"),
    ],
)
def test_words_that_sbatch_would_take_otherwise(words: str, what: str) -> None:
    with pytest.raises(UsageMistake) as raised:
        options_of(Given(words, "--sbatch"))
    assert what in str(raised.value)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--sbatch", "-N 3", "--nnodes", 2], "--nnodes 2, but --sbatch asks for 3 nodes"),
        (["--hosts", "a,b"], "--hosts a,b with --emit slurm"),
        (["--gpus", "0,1"], "--gpus 0,1 with --emit slurm"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, words: list[object], what: str) -> None:
    assert what in _emit(tmp_path, *words, "mnist", code=2)


@in_the_lab
def test_a_script_ends_with_its_ranks_code(lab: SlurmLab, tmp_path: Path) -> None:
    (tmp_path / "train it.py").write_text("import os, sys\nprint(os.getcwd(), sys.argv[1:])\nsys.exit(5)\n")
    text = _emit(tmp_path, "--nnodes", 2, "--sbatch", "-t 5", "train it.py", "a b")
    (tmp_path / "job.sh").write_text(text)
    found = lab.wait_for_job(lab.sbatch("job.sh", environ=ENVIRON, cwd=tmp_path))
    output = next(tmp_path.glob("train_it-*.out")).read_text()
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "1:0", "0"), output
    assert f"{tmp_path} ['a b']" in output
    assert "exit code 5" in output


@in_the_lab
def test_the_warning_before_the_limit_saves_and_the_job_goes_on(lab: SlurmLab, tmp_path: Path) -> None:
    """In mid-epoch; Slurm's limit is in whole minutes, so its signal is sent by hand, as Slurm sends it."""
    recipe = ["mnist", "--data", "fake", "--epochs", 2, "--global-batch-size", 4, "--ledger", "ledger"]
    text = _emit(tmp_path, "--nnodes", 2, "--sbatch", "-t 10", *recipe, "--output-dir", "out")
    (tmp_path / "job.sh").write_text(text)
    job = lab.sbatch("job.sh", environ=ENVIRON, cwd=tmp_path)
    ledger = tmp_path / "ledger" / "rank-0.jsonl"
    started = lambda: ledger.exists() and ledger.read_text().count("\n") > 10  # noqa: E731
    wait_until(lambda: started() or lab.job(job)["JobState"] not in ("PENDING", "RUNNING"), "steps", 180)
    assert started(), "".join(path.read_text() for path in tmp_path.glob("*.out"))
    lab.scancel("--signal=USR1", "--batch", job)
    wait_until(lambda: lab.job(job)["Restarts"] == "1", "the job is requeued", timeout_s=120)
    lab.start_now(job)
    found = lab.wait_for_job(job)
    output = next(tmp_path.glob("mnist-*.out")).read_text()
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), output
    (saved,) = re.findall(r"saved out/checkpoints/step-(\d+), exit 75", output)
    epoch_steps = 1 + max(note["step"] for note in _notes(ledger) if note["epoch"] == 0)
    assert int(saved) % epoch_steps != 0
    assert f"saved; job {job} goes back into the queue" in output
    assert _times_seen(tmp_path / "ledger") == {0: {1}, 1: {1}}


def _notes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _times_seen(folder: Path) -> dict[int, set[int]]:
    """By epoch, how often its positions were taken; the last note of a step counts."""
    counts: dict[int, Counter[int]] = {}
    for path in folder.glob("rank-*.jsonl"):
        steps = {note["step"]: note for note in _notes(path)}
        for note in steps.values():
            counts.setdefault(note["epoch"], Counter()).update(note["positions"])
    assert all(len(found) == max(found) + 1 for found in counts.values())  # no position was left out
    return {epoch: set(found.values()) for epoch, found in counts.items()}

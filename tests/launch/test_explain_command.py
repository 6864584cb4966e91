"""`phalanx explain` as a command: exit codes, JSON and nothing else, wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OOM = "[rank1]: RuntimeError: CUDA error: out of memory\n"
UNKNOWN = "ValueError: the moon is in the wrong phase\n"


def explain(
    *words: str, stdin: bytes = b"", folder: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """The command, where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from phalanx.launch.entry import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", *words],
        input=stdin,
        capture_output=True,
        check=False,
        cwd=folder,
        timeout=60,
        env={**os.environ, **environ},
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize(
    ("log", "outcome", "code"),
    [(OOM, "explained", 0), (UNKNOWN, "unknown", 1), ("loss 0.5\n", "no-failure", 0), ("", "unknown", 1)],
)
def test_exit_codes_and_json(tmp_path: Path, log: str, outcome: str, code: int) -> None:
    (tmp_path / "run.log").write_text(log)
    done = explain("--json", str(tmp_path / "run.log"))
    assert (done.returncode, done.stderr) == (code, "")
    content = json.loads(done.stdout)
    assert content["schema"] == 1
    assert content["outcome"] == outcome
    assert [
        set(diagnosis) >= {"id", "rank", "cause", "fix", "evidence"} for diagnosis in content["diagnoses"]
    ] == [True] * len(content["diagnoses"])
    assert explain(str(tmp_path / "run.log")).returncode == code


def test_text_names_cause_rank_and_fix(tmp_path: Path) -> None:
    done = explain("-", stdin=OOM.encode())
    assert done.stdout.startswith("Cause: cuda-oom (rank 1): ")
    assert "\nFix: " in done.stdout
    assert "\nSeen: stdin:1: RuntimeError: CUDA error: out of memory\n" in done.stdout


def test_several_logs_and_the_variable_for_json(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("loss 0.5\n")
    (tmp_path / "rank-1.log").write_text(OOM)
    done = explain("rank-0.log", "rank-1.log", folder=tmp_path, PHALANX_EXPLAIN_JSON="1")
    assert json.loads(done.stdout)["diagnoses"][0]["rank"] == 1


def test_without_a_log_the_last_run_is_read(tmp_path: Path) -> None:
    run = tmp_path / "phalanx-logs" / "20260301-train"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "rank-1.log").write_text(OOM)
    assert explain(folder=tmp_path).stdout.startswith("Cause: cuda-oom (rank 1)")


@pytest.mark.parametrize(
    "words", [["no.log"], ["empty"], [], ["--jsno"], ["nul\x01.log"], ["/root/../no/such"]]
)
def test_wrong_input_is_one_message_and_exit_code_2(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    done = explain(*words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("phalanx explain: ")
    assert "\nFix: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_that_knows_no_unicode(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("FileNotFoundError: [Errno 2] No such file or directory: 'größe.pt'\n")
    done = explain(str(tmp_path / "a.log"), PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "file-not-found" in done.stdout


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(OOM)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "explain", str(tmp_path / "a.log")],
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.stderr == b""


def test_only_light_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(OOM)
    code = (
        "import sys; from phalanx.launch.entry import command; command(['explain', sys.argv[1]]);"
        "print(sorted({'torch', 'numpy', 'rich', 'psutil', 'pynvml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.log")], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "[]"

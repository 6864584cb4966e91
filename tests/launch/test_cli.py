"""The command as a user meets it: exit codes, messages, and no torch before ranks start."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from phalanx import __version__
from phalanx.launch import cli, entry
from phalanx.launch.options import BY_KEY
from phalanx.launch.placement import Placement
from phalanx.launch.run_command import headline, log_folder
from phalanx.launch.spec import RunSpec, Target


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for option in BY_KEY.values():
        for variable in option.variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("PHALANX_DEBUG", raising=False)
    (tmp_path / "train.py").write_text("print('ran')\n")
    return tmp_path


def phalanx(words: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """The command as its own process, with a torch that cannot be imported."""
    broken = Path("broken")
    (broken / "torch").mkdir(parents=True, exist_ok=True)
    (broken / "torch" / "__init__.py").write_text("raise ImportError('torch was imported')")
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        env={**os.environ, "PYTHONPATH": str(broken.resolve()), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["run", "--dry-run", "train.py"],
        ["run", "--dry-run", "mnist"],
        ["run", "--dry-run", "-m", "phalanx.recipes.mnist"],
        ["recipes"],
        ["recipes", "--help"],
        ["recipes", "copy", "--help"],
        ["recipes", "copy", "mnist", "mine.py"],
        ["gpus", "--local"],
        ["gpus", "--help"],
        ["bench", "--help"],
        ["completion", "--help"],
        ["completion", "zsh"],
    ],
    ids=" ".join,
)
def test_no_torch_is_needed(words: list[str]) -> None:
    done = phalanx(words)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""


def test_where_torch_cannot_be_imported_run_says_so_without_a_traceback() -> None:
    done = phalanx(["run", "train.py"])
    assert done.returncode == 3
    assert "ImportError: torch was imported" in done.stderr
    assert "Traceback" not in done.stderr


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """One command line in this process; ranks are never reached here."""
    outcome = entry.command(words)
    assert isinstance(outcome, int)
    captured = capfd.readouterr()
    return outcome, captured.out, captured.err


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "--version") == (0, f"phalanx {__version__}\n", "")


def test_only_commands_that_exist_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capfd, "--help")
    for name, command in cli.phalanx.commands.items():
        assert f"  {name} " in out
        assert command.get_short_help_str(100).endswith(".")
    listed = ", ".join(sorted(cli.COMMANDS))
    for name in ("train", "docto", "launch"):
        assert f"  {name} " not in out
        code, _, err = run(capfd, name)
        assert code == 2
        assert err.startswith(f"phalanx: There is no command {name!r}, only {listed}.\nFix: ")


def test_without_a_command_the_help_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd)
    assert code == 2
    assert "Commands:" in out + err


def test_a_script_without_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert "Fix: phalanx run train.py" in run(capfd, "train.py")[2]
    assert "Fix: phalanx run mnist" in run(capfd, "mnist")[2]
    assert "Fix: phalanx run" in run(capfd, "rnu", "train.py")[2]
    assert run(capfd, "--nproc-per-node", "2", "train.py")[2] == (
        "phalanx: --nproc-per-node is an option of `phalanx run`.\nFix: phalanx run --nproc-per-node ..\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "TARGET is missing"),
        (
            ["run", "--nproc-per-node", "train.py"],
            "--nproc-per-node train.py was read as an option with its value",
        ),
        (["run", "--nproc-per-nod", "2", "train.py"], "Fix: did you mean --nproc-per-node?"),
        (["run", "--nproc_per_nod=2", "train.py"], "Fix: did you mean --nproc-per-node?"),
        (["run", "-z", "train.py"], "There is no option -z"),
        (["run", "train.py", "--nproc-per-node", "2"], "Fix: phalanx run --nproc-per-node 2 train.py"),
        (["run", "trian.py"], "Fix: phalanx run train.py"),
        (["run", "--nproc-per-node", "0", "train.py"], "--nproc-per-node 0: a node needs at least one rank"),
        (["run", "--nproc-per-node=-1", "train.py"], "--nproc-per-node -1: a node needs at least one rank"),
        (["run", "--nproc-per-node", "abc", "train.py"], "--nproc-per-node abc: not a number"),
        (["run", "--nproc-per-node", "", "train.py"], "--nproc-per-node ''"),
        (["run", "--max-restarts", "-1", "train.py"], "--max-restarts -1: must be 0 or more"),
        (["run", "--nnodes", "2:1", "train.py"], "Fix: --nnodes 1:2"),
        (["run", "--show", "rank1", "train.py"], "--show rank1: must be one of rank0, all"),
        (["run", "--grace-s", "soon", "train.py"], "--grace-s soon: not a number of seconds"),
        (["run", "--gpus", "0,x", "train.py"], "--gpus 0,x: "),
        (["run", "--log-dir", "", "train.py"], "--log-dir is empty"),
        (["run", "--log-dir", "train.py", "train.py"], "a file has that name"),
        (["run", "--log-dir"], "requires an argument"),
        (["run", "--standalone=1", "train.py"], "does not take a value"),
        (["run", "--print-completion", "tcsh"], "no completion for 'tcsh', only for bash, zsh, fish"),
        (["recipes", "copy"], "Missing argument"),
        (["recipes", "copy", "mnits", "x.py"], "Fix: phalanx recipes copy mnist x.py"),
        (["recipes", "cpoy", "mnist", "x.py"], "No such command 'cpoy'"),
        (["completion", "bahs"], "Fix: phalanx completion bash"),
        (["completion"], "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_usage_mistake_is_one_message_and_exit_code_2(
    capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, out, err = run(capfd, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"phalanx {words[0]}: ")
    assert message in err
    assert "Fix: " in err
    assert "Traceback" not in err


def test_a_bad_variable_is_named_as_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_RUN_NPROC_PER_NODE", "abc")
    assert run(capfd, "run", "train.py")[2].startswith(
        "phalanx run: PHALANX_RUN_NPROC_PER_NODE=abc: not a number"
    )
    monkeypatch.setenv("PHALANX_RUN_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PET_STANDALONE", "maybe")
    code, _, err = run(capfd, "run", "train.py")
    assert code == 2
    assert (
        err == "phalanx run: PET_STANDALONE=maybe: neither yes nor no.\nFix: PET_STANDALONE=1, or unset it\n"
    )


def test_dry_run_shows_ranks_devices_threads_command_and_folder(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PHALANX_RUN_LOG_DIR", "logs")
    code, out, err = run(
        capfd, "run", "--dry-run", "--gpus", "none", "--nproc_per_node=2", "-r", "3", "train.py", "a b"
    )
    assert (code, err) == (0, "")
    lines = {line[2:14].strip() or "more": line[15:] for line in out.splitlines()[1:]}
    assert out.splitlines()[0] == "Would start 2 ranks on this node:"
    assert lines["command"] == f"{shlex.quote(sys.executable)} -u train.py 'a b'"
    assert lines["rank 1"] == "RANK=1 LOCAL_RANK=1 on CPU"
    assert lines["threads"] == "OMP_NUM_THREADS=3, set by you"
    assert lines["more"] == "CUDA_VISIBLE_DEVICES="
    assert lines["log folder"] == "logs"
    assert lines["note"].startswith("--redirects has no effect: ")
    assert not Path("logs").exists()


def test_the_headline_says_ranks_devices_threads_and_folder(tmp_path: Path) -> None:
    spec = RunSpec(
        target=Target(kind="script", name="x.py", display="x"), nproc_per_node=2, log_dir=Path("logs")
    )
    placement = Placement(
        nproc_per_node=2, devices=("GPU 3 (H100, GPU-33)", "GPU 1 (H100, GPU-11)"), threads="t"
    )
    assert headline(spec, placement) == (
        "2 ranks; cuda:0 is GPU 3 (H100, GPU-33); cuda:1 is GPU 1 (H100, GPU-11); t; logs in logs."
    )


def test_double_dash_before_target_passes_everything_on(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "run", "--dry-run", "--", "train.py", "--gpus", "2", "--", "-m")
    assert code == 0
    assert f"{shlex.quote(sys.executable)} -u train.py --gpus 2 -- -m" in out


def test_the_log_folder_is_this_runs_own(folder: Path) -> None:
    now = 1700000000.0
    assert log_folder("", "train", now).parent == Path("phalanx-logs")
    assert log_folder("", "train", now).name.endswith("-train")
    assert log_folder("logs", "train", now) == Path("logs")
    (folder / "logs").mkdir()
    assert log_folder("logs", "train", now) == Path("logs")
    (folder / "logs" / "run.json").touch()  # another run's
    assert log_folder("logs", "train", now).parent == Path("logs")


def test_an_internal_error_is_one_line_and_exit_code_3(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setitem(cli.phalanx.commands, "recipes", click.Command("recipes", callback=broken))
    code, out, err = run(capfd, "recipes")
    assert (code, out) == (3, "")
    assert err == (
        "phalanx recipes: internal error, RuntimeError: first second (PHALANX_DEBUG=1 shows where; please report it)\n"
    )
    monkeypatch.setenv("PHALANX_DEBUG", "1")
    assert "in broken" in run(capfd, "recipes")[2]


def test_an_interruption_is_130(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.phalanx.commands, "recipes", click.Command("recipes", callback=interrupted))
    code, out, err = run(capfd, "recipes")
    assert (code, out, err.strip()) == (130, "", "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "run", "--help"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_run_returns_in_a_rank_is_called_by_main_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script must not see the command line's frames, nor its exception handlers."""
    frames: list[str] = []

    def script() -> None:
        frame = sys._getframe(1)
        while frame is not None:
            frames.append(frame.f_code.co_filename)
            frame = frame.f_back  # type: ignore[assignment]
        raise ValueError("the script's own")

    monkeypatch.setitem(cli.phalanx.commands, "recipes", click.Command("recipes", callback=lambda: script))
    with pytest.raises(ValueError, match="the script's own") as caught:
        entry.main(["recipes"])
    assert caught.value.__context__ is None
    assert frames[0].endswith("entry.py")
    assert not any("click" in name for name in frames)


def test_where_torch_is_absent_run_says_what_to_install(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.launch.run_command.find_spec", lambda name: None)
    code, out, err = run(capfd, "run", "train.py")
    assert (code, out) == (3, "")
    assert err.splitlines() == [
        f"phalanx run: torch is not installed for {sys.executable}, so no rank can start.",
        f"Fix: {sys.executable} -m pip install torch, or start phalanx with the Python that has it",
    ]
    assert not Path("phalanx-logs").exists()


def test_exit_codes_of_run_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (0, 1, 75, 143):
        monkeypatch.setitem(
            cli.phalanx.commands, "recipes", click.Command("recipes", callback=lambda c=code: c)
        )
        with pytest.raises(SystemExit) as caught:
            entry.main(["recipes"])
        assert caught.value.code == code


def test_a_recipes_help_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    outcome = entry.command(["run", "--nproc-per-node", "2", "mnist", "--help"])
    assert callable(outcome)
    outcome()
    assert started == [[sys.executable, "-m", "phalanx.recipes.mnist", "--help"]]


def test_a_closed_standard_output_is_no_error() -> None:
    words = shlex.join([sys.executable, "-m", "phalanx", "recipes"])
    done = subprocess.run(["sh", "-c", f"{words} >&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

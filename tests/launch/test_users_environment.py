"""What stands in the user's environment or on his command line, and what `phalanx run` makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launch.entry import command as run_command
from tests.launch.launching import Launcher


def test_the_users_own_folders_of_modules_reach_every_rank(launcher: Launcher) -> None:
    (launcher.folder / "src").mkdir()
    (launcher.folder / "src" / "only_here.py").write_text("word = 'found'\n")
    launcher.environ["PYTHONPATH"] = str(launcher.folder / "src")
    script = launcher.script(
        """
        import os, sys
        import only_here
        print(os.environ["RANK"], only_here.word, os.environ["PYTHONPATH"])
        """,
        name="other/script.py",
    )
    for option in ((), ("--no-preload",)):
        done = launcher.run(*option, "--show", "all", script, timeout_s=120)
        assert done.returncode == 0, done.stderr
        for rank in range(2):
            assert f"{rank} found {launcher.folder / 'src'}" in done.stdout


def test_two_jobs_at_once_that_both_find_torchs_usual_port_in_the_environment(launcher: Launcher) -> None:
    """Each goes on when ranks of the other have met, so that neither can have waited for the other's end."""
    launcher.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    script = launcher.script(
        """
        import sys, time
        from pathlib import Path
        import torch.distributed as dist
        own, other = sys.argv[1:]
        dist.init_process_group("gloo")
        dist.barrier()
        Path(own).touch()
        end = time.monotonic() + 90
        while not Path(other).exists():
            assert time.monotonic() < end, "the other job has not met"
            time.sleep(0.01)
        dist.barrier()
        dist.destroy_process_group()
        """
    )
    jobs = [
        launcher.start("--log-dir", launcher.folder / f"logs-{own}", script, own, other)
        for own, other in (("one", "two"), ("two", "one"))
    ]
    for job in jobs:
        _, err = job.communicate(timeout=150)
        assert job.returncode == 0, err.decode()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hostfile="], "--hostfile is empty"),
        (["--hosts", "localhost:0,"], "there is an empty name"),
        (["--gpus", "4,5,6.7"], "is not one of this node's GPUs"),
    ],
)
def test_half_a_value_is_refused_and_nothing_runs_here_instead(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    (tmp_path / "train.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert run_command(["run", *words, "train.py"]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("Fix: ") == 1
    assert not (tmp_path / "ran").exists()

"""The scripts in docs/cluster.md do what the page says, as they stand there: in a real Slurm, and in a shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launch.slurm_lab import SlurmLab, missing, slurm_lab

PAGE = (ROOT / "docs" / "cluster.md").read_text()
_WHY_NOT = missing()
needs_slurm = pytest.mark.skipif(_WHY_NOT is not None, reason=f"Slurm lab: {_WHY_NOT}")
PATIENCE_S = 60.0


def snippet(name: str) -> str:
    (found,) = re.findall(rf"```\w+ {name}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def installed(shm: str) -> str:
    """Shell lines for a node with phalanx and slurm.conf where they belong, and this much shared memory."""
    command = shlex.join([sys.executable, "-m", "phalanx"])
    return f"""mount -t tmpfs tmpfs /etc/slurm
cp "$SLURM_CONF" /etc/slurm/slurm.conf
mount -t tmpfs tmpfs /opt
mount -t tmpfs tmpfs /run
mount -t tmpfs -o size={shm} tmpfs /dev/shm
mkdir -p /opt/phalanx/bin
cat > /opt/phalanx/bin/phalanx <<'END'
#!/bin/sh
exec {command} "$@"
END
chmod +x /opt/phalanx/bin/phalanx"""


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A cluster with the page's prolog, epilog and health check."""
    folder = tmp_path_factory.mktemp("scripts")
    folder.chmod(0o755)
    for name in ("prolog", "epilog", "healthcheck"):
        (folder / name).write_text(snippet(name))
        (folder / name).chmod(0o755)
    settings = f"""Prolog={folder}/prolog
Epilog={folder}/epilog
PrologFlags=Alloc
HealthCheckProgram={folder}/healthcheck
HealthCheckInterval=2"""
    with slurm_lab(settings=settings, before=installed("2G")) as running:
        yield running


def until(condition: Callable[[], bool], lab: SlurmLab) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, lab.logs()
        time.sleep(0.1)


def nodes(lab: SlurmLab) -> dict[str, str]:
    """State and reason of each node."""
    words = ["sinfo", "--noheader", "--Node", "--format=%N %T %E"]
    done = subprocess.run(words, env=lab.environ, capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@needs_slurm
def test_slurm_s_scripts(lab: SlurmLab, tmp_path: Path) -> None:
    """Healthy nodes run jobs; nodes whose /dev/shm shrinks are drained, and the reason is kept."""
    done = lab.srun("-N2", "-n2", "true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + lab.logs()
    until(lambda: all(state.startswith("idle") for state in nodes(lab).values()), lab)  # after the epilog

    lab.inside("mount", "-o", "remount,size=64M", "/dev/shm")
    until(lambda: all(state.startswith("drain") for state in nodes(lab).values()), lab)
    assert all("phalanx: /dev/shm is too small" in state for state in nodes(lab).values())


@needs_slurm
def test_the_prolog_alone_holds_a_job_back(tmp_path: Path) -> None:
    script = tmp_path / "prolog"
    script.write_text(snippet("prolog"))
    script.chmod(0o755)
    tmp_path.chmod(0o755)
    with slurm_lab(settings=f"Prolog={script}\nPrologFlags=Alloc", before=installed("64M")) as lab:
        done = lab.srun("-N1", "-n1", "echo", "ran", cwd=tmp_path)
        assert "ran" not in done.stdout
        until(lambda: any(state.startswith("drain") for state in nodes(lab).values()), lab)
        assert "Prolog error" in " ".join(nodes(lab).values())


@pytest.mark.parametrize("name", ["prolog", "epilog"])
@pytest.mark.parametrize(("code", "passes"), [(0, True), (1, False), (2, True), (3, True), (137, True)])
@pytest.mark.parametrize("said", ["FAIL  a finding [id]", "ModuleNotFoundError: No module named 'phalanx'"])
def test_only_a_failure_drains(tmp_path: Path, name: str, code: int, passes: bool, said: str) -> None:
    passes = passes or not said.startswith("FAIL")
    program = tmp_path / "phalanx"
    program.write_text(f'#!/bin/sh\necho "{said}"\nexit {code}\n')
    program.chmod(0o755)
    script = snippet(name).replace("/opt/phalanx/bin/phalanx", str(program))
    script = script.replace("/run/", f"{tmp_path}/")
    done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, check=False)
    assert (done.returncode == 0) is passes


def test_the_step_of_a_ci(tmp_path: Path) -> None:
    text = snippet("ci")
    step = "\n".join(line.removeprefix("      ") for line in text.split("run: |\n")[1].splitlines())
    (tmp_path / "phalanx").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m phalanx "$@"\n')
    (tmp_path / "phalanx").chmod(0o755)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('broken')\n")
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", step],  # as GitHub's runners start it
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "torch" in done.stdout
    assert json.loads((tmp_path / "doctor.json").read_text())["verdict"] == "fail"


def test_lines_keep_to_the_width() -> None:
    assert [line for line in PAGE.splitlines() if len(line) > 160] == []

"""docs/multi-node: its scripts, run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import lab as labs

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "multi-node"


def _environ(folder: Path) -> dict[str, str]:
    """With `phalanx` on the PATH, also where it is not installed as a command."""
    command = folder / "bin" / "phalanx"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m phalanx "$@"\n')
    command.chmod(0o755)
    return {"PATH": f"{command.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def _lines(text: str) -> set[str]:
    return {
        line[line.index("rank ", line.find("]") + 1) :] for line in text.splitlines() if "the sum is" in line
    }


EXPECTED = {f"rank {rank} of 4 on node {rank // 2}: the sum is 4" for rank in range(4)}


def test_the_rehearsal(tmp_path: Path) -> None:
    done = subprocess.run(
        [FOLDER / "rehearse.sh"],
        cwd=tmp_path,
        env=os.environ | _environ(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert _lines(done.stdout) == EXPECTED


@pytest.mark.skipif(labs.missing() is not None, reason=f"no lab: {labs.missing()}")
def test_by_hand_on_two_nodes(tmp_path: Path) -> None:
    environ = _environ(tmp_path)
    with labs.lab(("n1", "n2")) as lab:
        nodes = []
        for rank, node in enumerate(lab.nodes.values()):
            own = environ | {"NODE_RANK": str(rank), "FIRST": "n1", "PHALANX_RUN_LOG_DIR": f"logs-{rank}"}
            nodes.append(
                subprocess.Popen(
                    node.words(FOLDER / "by-hand.sh", cwd=tmp_path),
                    env=lab.environ | own,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            said = [node.communicate(timeout=180)[0] for node in nodes]
        finally:
            for process in nodes:
                process.kill()
    assert [node.returncode for node in nodes] == [0, 0], "".join(said)
    assert _lines("".join(said)) == EXPECTED

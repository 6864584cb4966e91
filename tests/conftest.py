"""Fixtures for every test: real ranks, and guards against what a test may leave behind."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch: OpenMP reads these once, and forked ranks inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Gloo names its peers by host name, which need not resolve on a bare machine.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import psutil
import pytest

from tests.ranks import RankRunner

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run_ranks(tmp_path: Path) -> RankRunner:
    """Run a function on real ranks, see `RankRunner`."""
    return RankRunner(tmp_path)


def _children() -> set[tuple[int, str]]:
    """Live descendants, multiprocessing's own servers left out."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
        except psutil.NoSuchProcess:
            continue
        if "multiprocessing.forkserver" in words or "multiprocessing.resource_tracker" in words:
            continue
        found.add((process.pid, words))
    return found


@pytest.fixture(autouse=True)
def _leave_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put environment and generators back; fail a test that leaves a group, process or file."""
    environ, folder = dict(os.environ), Path.cwd()
    children, files = _children(), {path.name for path in ROOT.iterdir()}
    state = random.getstate()
    yield
    os.chdir(folder)
    random.setstate(state)
    changed = {
        name for name in environ.keys() | os.environ.keys() if environ.get(name) != os.environ.get(name)
    }
    os.environ.clear()
    os.environ.update(environ)
    changed -= {"PYTEST_CURRENT_TEST"}
    problems = []
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()
        problems.append("a process group")
    left = _children() - children
    if left:
        for pid, _ in left:
            try:
                psutil.Process(pid).kill()
            except psutil.NoSuchProcess:
                continue
        problems.append(f"processes {sorted(left)}")
    new_files = {path.name for path in ROOT.iterdir()} - files - {".pytest_cache", ".hypothesis", "build"}
    if new_files:
        problems.append(f"files in the project's folder: {sorted(new_files)}")
    if changed:
        problems.append(f"environment variables {sorted(changed)}")
    if problems:
        pytest.fail(f"{request.node.nodeid} left behind " + "; ".join(problems))

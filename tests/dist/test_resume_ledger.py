"""Resume in mid-epoch on another number of ranks: every sample of the epoch once, at random points."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def ledger() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # where a script finds what all of them share
        yield _module()


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "bench_resume_ledger", ROOT / "benchmarks" / "resume_ledger.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("before", "after"), [(4, 8), (4, 2), (2, 3)])
def test_every_sample_is_seen_once_in_the_same_steps(ledger: ModuleType, before: int, after: int) -> None:
    whole = {}
    for epoch in range(ledger.EPOCHS):
        loader = ledger.loader_of(0, 1)
        loader.set_epoch(epoch)
        whole[epoch] = [sorted(step) for step in ledger.take(loader)]
        assert sorted(itertools.chain(*whole[epoch])) == list(range(ledger.NUM_ITEMS))
    assert whole[0] != whole[1]
    for epoch, step in ledger.points(20, seed=1):
        assert ledger.phalanx_run(epoch, step, before, after) == whole[epoch], (epoch, step)


def test_the_ledger_finds_what_is_lost_and_repeated(ledger: ModuleType) -> None:
    """Skipping what a rank had taken, as samplers that keep a count do, loses samples on more ranks."""
    assert ledger.faults(range(1000)) == (0, 0)
    assert ledger.faults([*range(998), 5, 5]) == (2, 1)
    assert ledger.faults(ledger.other_run(DistributedSampler, 1, 0, 4, 8)) == (0, 0)
    never, _ = ledger.faults(ledger.other_run(DistributedSampler, 1, 10, 4, 8))
    assert never > 400
    _, twice = ledger.faults(ledger.other_run(DistributedSampler, 1, 10, 4, 2))
    assert twice > 200


def test_real_ranks_that_are_killed_resume_on_more() -> None:
    """Through CheckpointManager, as the benchmark's command does it."""
    command = [sys.executable, str(ROOT / "benchmarks" / "resume_ledger.py"), "--json"]
    done = subprocess.run(
        [*command, "--points", "1", "--real", "1", "--kinds", "2:3"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["from"], row["to"], row["exact"], row["real_exact"]) == (2, 3, 1, 1)
    assert json.loads(done.stdout)["torch"] == torch.__version__

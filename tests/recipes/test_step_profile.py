"""Where a step's time goes: shares that add up, a trace of every rank, and a run that is otherwise the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.recipes import mnist
from phalanx.recipes.mnist import MnistSettings
from phalanx.recipes.step_profile import DATA, WORK, shares
from tests.ranks import RankRunner
from tests.recipes.job import assert_equal_runs, run_job

_EVENTS = st.lists(
    st.tuples(
        st.sampled_from([WORK, "gloo:all_reduce", "nccl:x", "aten::mm"]),
        st.integers(0, 60),
        st.integers(1, 20),
    ),
    max_size=12,
)


@given(_EVENTS)
def test_shares_are_those_counted_microsecond_by_microsecond(found: list[tuple[str, int, int]]) -> None:
    events = [(name, start, start + length) for name, start, length in found]
    work = {at for name, start, end in events for at in range(start, end) if name == WORK}
    collective = {
        at for name, start, end in events for at in range(start, end) if name.startswith(("gloo", "nccl"))
    }
    assert shares([*events, (DATA, 100, 107)]) == {
        "data_us": 7,
        "communication_us": len(work & collective),
        "compute_us": len(work - collective),
        "total_us": 7 + len(work),
    }


def _train(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> str:
    return run_job(mnist.train, MnistSettings(data="digits", epochs=2), folder, changes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_profiled_run_is_the_same_run_with_a_table_and_traces(
    run_ranks: RankRunner, tmp_path: Path, world_size: int
) -> None:
    run_ranks(_train, str(tmp_path), {"output_dir": "plain"}, world_size=world_size)
    changes = {"output_dir": "profiled", "profile": True}
    out = run_ranks(_train, str(tmp_path), changes, world_size=world_size)[0]
    assert_equal_runs(tmp_path / "plain", tmp_path / "profiled")
    assert "profile of 10 steps" in out
    rows = re.findall(r"^rank (\d) +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)$", out, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(world_size))
    for _, data, communication, compute, step_ms in rows:
        assert float(data) + float(communication) + float(compute) == pytest.approx(100, abs=0.2)
        assert (float(communication) > 0) == (world_size > 1)
        assert float(step_ms) > 0
    for rank in range(world_size):
        trace = json.loads((tmp_path / "profiled" / "profile" / f"rank-{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count(WORK) == 10
        assert any("conv" in str(name) for name in names)


def test_a_run_that_is_too_short_says_so(run_ranks: RankRunner, tmp_path: Path) -> None:
    changes = {"output_dir": "run", "profile": True, "epochs": 1, "global_batch_size": 512}
    (out,) = run_ranks(_train, str(tmp_path), changes, world_size=1)
    assert "no profile: it begins after 5 steps" in out
    assert not (tmp_path / "run" / "profile").exists()

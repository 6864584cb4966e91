"""The two bandwidths, as nccl-tests defines them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.tools.bench.bandwidth import CONVENTIONS, bandwidth
from phalanx.tools.bench.report import head_lines

BUS = {
    "all-reduce": 175.0,
    "all-gather": 87.5,
    "reduce-scatter": 87.5,
    "broadcast": 100.0,
    "all-to-all": 87.5,
}


@pytest.mark.parametrize(("kind", "bus"), [*BUS.items(), ("send-recv", 100.0)])
def test_a_gigabyte_on_eight_ranks_in_ten_milliseconds(kind: str, bus: float) -> None:
    found = bandwidth(kind, 10**9, 0.010, 8)
    assert found.algorithm == pytest.approx(100.0)
    assert found.bus == pytest.approx(bus)


@pytest.mark.parametrize("kind", CONVENTIONS)
def test_one_rank_has_no_bus(kind: str) -> None:
    assert bandwidth(kind, 1024, 1e-6, 1).bus is None


@given(
    kind=st.sampled_from(sorted(CONVENTIONS)), size=st.integers(1, 1 << 40), world_size=st.integers(2, 4096)
)
def test_the_bus_never_carries_more_than_twice_the_size(kind: str, size: int, world_size: int) -> None:
    found = bandwidth(kind, size, 0.5, world_size)
    assert found.bus is not None
    assert 0.5 * found.algorithm <= found.bus < 2 * found.algorithm or found.bus == found.algorithm


@pytest.mark.parametrize("kind", CONVENTIONS)
def test_the_size_convention_is_printed(kind: str) -> None:
    about = {
        "benchmark": kind,
        "world_size": 8,
        "nodes": 2,
        "backend": "nccl",
        "device": "x",
        "dtype": "float32",
    }
    text = "\n".join(head_lines(about))
    assert f"SIZE: {CONVENTIONS[kind].size}" in text
    assert CONVENTIONS[kind].factor in text
    assert "BUSBW: n/a" in "\n".join(head_lines({**about, "world_size": 1}))

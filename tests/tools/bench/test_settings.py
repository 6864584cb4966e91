"""What a user may type, and what the ranks are told of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.tools.bench.settings import (
    DTYPES,
    KINDS,
    BenchSettings,
    check_kind,
    checked_settings,
    parse_bytes,
)
from phalanx.tools.usage import UsageMistake


@given(size=st.integers(1, 1 << 39), unit=st.sampled_from(["", "K", "M", "k", "KiB", " MB", "g"]))
def test_sizes_with_units(size: int, unit: str) -> None:
    factor = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}[unit.strip().lower()[:1]]
    assert parse_bytes(f"{size}{unit}") == size * factor


@given(text=st.text(max_size=12))
def test_any_other_text_is_no_size(text: str) -> None:
    size = parse_bytes(text)
    assert size is None or size >= 0


@given(
    kind=st.sampled_from(KINDS),
    low=st.integers(1, 1 << 20),
    more=st.integers(0, 1 << 22),
    factor=st.integers(2, 9),
    dtype=st.sampled_from(sorted(DTYPES)),
    world_size=st.integers(1, 64),
)
def test_sizes_grow_and_every_rank_gets_whole_elements(
    kind: str, low: int, more: int, factor: int, dtype: str, world_size: int
) -> None:
    settings = BenchSettings(kind=kind, min_bytes=low, max_bytes=low + more, factor=factor, dtype=dtype)
    sizes = settings.sizes(world_size)
    assert sizes == sorted(set(sizes))
    parts = world_size if kind in ("all-gather", "reduce-scatter", "all-to-all") else 1
    assert all(size % (parts * DTYPES[dtype]) == 0 and size > 0 for size in sizes)


def test_the_ranks_are_told_all_of_it() -> None:
    settings = BenchSettings(kind="all-gather", min_bytes=8, max_bytes=64, factor=2, iterations=3, warmup=0,
                             backend="gloo", dtype="bfloat16")  # fmt: skip
    kind, *words = settings.words()
    given = {words[i][2:].replace("-", "_"): words[i + 1] for i in range(0, len(words), 2)}
    assert checked_settings(kind, dict(given)) == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_bytes": "x"}, "--min-bytes x: a size is"),
        ({"min_bytes": "0"}, "--min-bytes 0: a size is"),
        ({"max_bytes": "-1"}, "--max-bytes -1: a size is"),
        ({"max_bytes": "9999999G"}, "--max-bytes 9999999G: a size is"),
        ({"min_bytes": "1M", "max_bytes": "1K"}, "the smallest is above the largest"),
        ({"factor": "1"}, "--factor 1: a whole number of 2"),
        ({"iterations": "0"}, "--iterations 0: a whole number of 1"),
        ({"warmup": "-1"}, "--warmup -1"),
        ({"backend": "mpi"}, "--backend mpi: must be one of gloo, nccl"),
        ({"dtype": "float31"}, "Fix: --dtype float16"),
    ],
)
def test_what_cannot_be(given: dict[str, str | None], message: str) -> None:
    with pytest.raises(UsageMistake) as caught:
        checked_settings("all-reduce", given)
    assert message in str(caught.value)
    assert "\nFix: " in str(caught.value)


def test_names_of_benchmarks_are_taken_in_any_spelling() -> None:
    assert [check_kind(name) for name in ("all_reduce", "AllReduce", "sendrecv")] == [
        "all-reduce",
        "all-reduce",
        "send-recv",
    ]
    with pytest.raises(UsageMistake, match="Fix: phalanx bench all-gather"):
        check_kind("all-gahter")

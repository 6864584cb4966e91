"""The keyed permutation: a bijection for every length, and as even as a fair shuffle.

Keys are fixed, so each test has one outcome. A chi-square statistic of d degrees of freedom has mean d and
deviation sqrt(2 d); the tests accept 5 deviations, which a fair shuffle leaves less than once in a million
times. They look at both sides: counts that are too even are no shuffle either.
"""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.dist.keys import derive_key
from phalanx.dist.permutation import TABLE_LIMIT, Indices, KeyedPermutation


def permutation(num_items: int, key: int, *, network: bool = False) -> KeyedPermutation:
    """A permutation, on request by the network whatever its length."""
    made = KeyedPermutation(num_items, key)
    if network:
        made._use_table = False
    return made


def assert_uniform(counts: npt.NDArray[np.int64], freedom: int) -> None:
    expected = counts.sum() / counts.size
    assert expected >= 5, "too few observations for a chi-square test"
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5, (chi_square, freedom)


@pytest.mark.parametrize("network", [False, True], ids=["table", "network"])
def test_every_length_from_1_to_5000_is_a_bijection(network: bool) -> None:
    everything = np.arange(5000, dtype=np.int64)
    for num_items in range(1, 5001):
        order = permutation(num_items, num_items, network=network).take(everything[:num_items])
        assert order.min() >= 0
        assert np.bincount(order, minlength=num_items).tobytes() == b"\1\0\0\0\0\0\0\0" * num_items, num_items


@settings(max_examples=12, deadline=None)
@given(st.integers(TABLE_LIMIT - 2, 1_500_000), st.integers(0, (1 << 63) - 1))
def test_large_lengths_are_bijections(num_items: int, key: int) -> None:
    order = KeyedPermutation(num_items, key).take(np.arange(num_items, dtype=np.int64))
    seen = np.zeros(num_items, dtype=bool)
    seen[order] = True
    assert seen.all()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 1 << 62), st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 62) - 1))
def test_huge_lengths_repeat_nothing_and_stay_in_range(num_items: int, key: int, start: int) -> None:
    start %= num_items
    positions = np.arange(start, min(start + 1000, num_items), dtype=np.int64)
    order = KeyedPermutation(num_items, key).take(positions)
    assert len(np.unique(order)) == len(positions)
    assert order.min() >= 0
    assert int(order.max()) < num_items


@pytest.mark.parametrize("num_items", [1, 2, 100, TABLE_LIMIT, TABLE_LIMIT + 1, 10**8])
def test_an_element_does_not_depend_on_what_else_is_asked_for(num_items: int) -> None:
    order = KeyedPermutation(num_items, 3)
    positions = np.unique(np.linspace(0, num_items - 1, 50).astype(np.int64))
    together = order.take(positions)
    assert together.tolist() == [order[int(position)] for position in positions]
    assert order.take(positions[::-1]).tolist() == together[::-1].tolist()


def test_blocks_join_without_a_seam() -> None:
    order = KeyedPermutation(200_000, 3)
    positions = np.arange(200_000, dtype=np.int64)
    whole = order.take(positions)
    parts = [order.take(part) for part in np.array_split(positions, 7)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert list(order) == whole.tolist()


@pytest.mark.parametrize(
    ("num_items", "first"),
    [
        (10, [6, 9, 7, 3, 0, 5, 4, 8, 1, 2]),
        (
            10**8,
            [
                49137130,
                82269383,
                66201432,
                3418632,
                4099750,
                99977376,
                92472041,
                70598530,
                77483830,
                23605631,
            ],
        ),
    ],
)
def test_orders_are_the_same_on_every_machine(num_items: int, first: list[int]) -> None:
    # Written down: a change here changes which samples a resumed run sees.
    assert KeyedPermutation(num_items, 7).take(np.arange(len(first), dtype=np.int64)).tolist() == first


def test_positions_outside_are_an_index_error() -> None:
    order = KeyedPermutation(10, 0)
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match="10 items"):
            order[wrong]
        with pytest.raises(IndexError, match="10 items"):
            order.take(np.array([0, wrong]))
    assert order.take(np.empty(0, dtype=np.int64)).tolist() == []
    assert list(KeyedPermutation(0, 0)) == []


@pytest.mark.parametrize("num_items", [-1, (1 << 62) + 1])
def test_lengths_out_of_range_are_refused(num_items: int) -> None:
    with pytest.raises(ValueError, match=str(num_items)):
        KeyedPermutation(num_items, 0)


def test_set_up_takes_no_memory_however_long_the_order() -> None:
    KeyedPermutation(10**9, 0)[0]  # what is made once per process is not counted
    tracemalloc.start()
    try:
        KeyedPermutation(10**9, 1)[5]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


@pytest.mark.parametrize("network", [False, True], ids=["table", "network"])
def test_all_orders_of_four_items_are_equally_likely(network: bool) -> None:
    ranks = {order: number for number, order in enumerate(itertools.permutations(range(4)))}
    positions = np.arange(4, dtype=np.int64)
    counts = np.zeros(24, dtype=np.int64)
    for seed in range(4800):
        order = permutation(4, derive_key(seed, "order"), network=network).take(positions)
        counts[ranks[tuple(order.tolist())]] += 1
    assert_uniform(counts, 23)


def _orders(num_items: int, seeds: int) -> npt.NDArray[np.int64]:
    positions = np.arange(num_items, dtype=np.int64)
    return np.stack(
        [KeyedPermutation(num_items, derive_key(seed, "order")).take(positions) for seed in range(seeds)]
    )


def test_each_of_ten_items_is_as_often_at_each_place() -> None:
    orders = _orders(10, 5000)
    counts = np.stack([np.bincount(orders[:, place], minlength=10) for place in range(10)])
    assert_uniform(counts, 81)  # rows and columns have fixed sums


@pytest.mark.parametrize(("one", "other"), [(0, 1), (3, 4), (0, 9), (2, 7)])
def test_each_pair_of_ten_items_is_as_often_at_two_places(one: int, other: int) -> None:
    orders = _orders(10, 5000)
    counts = np.bincount(orders[:, one] * 10 + orders[:, other], minlength=100).reshape(10, 10)
    assert counts.diagonal().sum() == 0
    assert_uniform(counts[~np.eye(10, dtype=bool)], 89)


# Around the length where the algorithm changes, one far above it, and one just above a power of four, where
# most of the network's results lie outside and are fed in again.
LENGTHS = [TABLE_LIMIT - 1, TABLE_LIMIT, TABLE_LIMIT + 1, 70_001, (1 << 18) + 1, 10**8, (1 << 40) + 1]
LENGTH_IDS = [str(num_items) for num_items in LENGTHS]


def _look(num_items: int, places: Indices, seeds: int) -> Indices:
    """What lies at these places, one row for each of ``seeds`` orders."""
    return np.stack(
        [KeyedPermutation(num_items, derive_key(seed, "order")).take(places) for seed in range(seeds)]
    )


def _bins(values: Indices, num_items: int, bins: int) -> Indices:
    return (values.astype(np.float64) * (bins / num_items)).astype(np.int64)


@pytest.mark.parametrize("num_items", LENGTHS, ids=LENGTH_IDS)
def test_places_are_uniform_over_many_seeds(num_items: int) -> None:
    places = np.concatenate([np.arange(32), np.linspace(32, num_items - 1, 32).astype(np.int64)])
    values = _look(num_items, places, 160)
    rows = np.arange(64)[None, :]
    for binned in (_bins(values, num_items, 32), values % 32):
        counts = np.bincount((rows * 32 + binned).ravel(), minlength=64 * 32).reshape(64, 32)
        assert_uniform(counts, 64 * 31)  # each row has a fixed sum


@pytest.mark.parametrize("num_items", LENGTHS, ids=LENGTH_IDS)
def test_pairs_of_places_are_uniform_over_many_seeds(num_items: int) -> None:
    starts = np.linspace(0, num_items - 1 - (1 << 15), 16).astype(np.int64)
    distances = [0, 1, 2, 256, 1 << 15]
    values = _look(num_items, np.concatenate([starts + distance for distance in distances]), 160)
    one, *others = np.split(values, len(distances), axis=1)
    for other in others:
        for a, b in (
            (_bins(one, num_items, 16), _bins(other, num_items, 16)),
            (one % 16, other % 16),
            (_bins(one, num_items, 16), other % 16),
        ):
            assert_uniform(np.bincount((a * 16 + b).ravel(), minlength=256), 255)


@pytest.mark.parametrize("num_items", LENGTHS[:6], ids=LENGTH_IDS[:6])
def test_neighbours_within_one_order_are_uniform(num_items: int) -> None:
    values = KeyedPermutation(num_items, derive_key(0, "order")).take(np.arange(60_000, dtype=np.int64))
    for distance in (1, 2, 255, 256, 257):
        for binned in (_bins(values, num_items, 16), values % 16):
            pairs = binned[:-distance] * 16 + binned[distance:]
            assert_uniform(np.bincount(pairs, minlength=256), 255)


def test_orders_of_neighbouring_epochs_are_independent() -> None:
    places = np.arange(60_000, dtype=np.int64)
    one, other = (KeyedPermutation(100_000, derive_key(0, epoch, "order")).take(places) for epoch in (0, 1))
    counts = np.bincount(_bins(one, 100_000, 16) * 16 + _bins(other, 100_000, 16), minlength=256)
    assert_uniform(counts, 255)


@pytest.mark.parametrize("num_items", [1000, 40_000, 66_000])
def test_one_item_stays_in_place_on_average(num_items: int) -> None:
    places = np.arange(num_items, dtype=np.int64)
    stayed = int((_look(num_items, places, 100) == places).sum())
    # Poisson with mean 100: deviation 10.
    assert abs(stayed - 100) < 5 * 10

"""WeightedShardSampler: one draw for all ranks, with the right chances, resumed at its place."""

from __future__ import annotations

import doctest
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from phalanx.dist import weighted_sampler
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.plan import Tail
from phalanx.dist.weighted_sampler import WeightedShardSampler
from tests.dist.loading import flat, numbers, taken, world

RARE = [0.1] * 90 + [0.9] * 10


def interleaved(parts: list[list[int]]) -> list[int]:
    dealt = itertools.chain.from_iterable(itertools.zip_longest(*parts))
    return [index for index in dealt if index is not None]


def shares(weights: Any, num_samples: int | None, world_size: int, **options: Any) -> list[list[int]]:
    return [
        list(WeightedShardSampler(weights, num_samples, rank, world_size, **options))
        for rank in range(world_size)
    ]


def chi_square(counts: Any, expected: Any) -> float:
    """How far off in standard deviations of the statistic: a few at most where the chances are right."""
    statistic = float((((counts - expected) ** 2) / expected).sum())
    freedom = len(counts) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def test_the_examples_of_the_docstrings() -> None:
    found = doctest.testmod(weighted_sampler)
    assert found.attempted > 3
    assert found.failed == 0


@pytest.mark.parametrize("replacement", [True, False])
def test_ranks_share_one_draw(replacement: bool) -> None:
    (alone,) = shares(RARE, 100, 1, replacement=replacement)
    parts = shares(RARE, 100, 8, replacement=replacement)
    assert [len(part) for part in parts] == [13, 13, 13, 13, 12, 12, 12, 12]
    assert interleaved(parts) == alone
    assert (len(set(alone)) == 100) is not replacement


@pytest.mark.parametrize("replacement", [True, False])
def test_padding_repeats_draws_and_never_asks_for_more(replacement: bool) -> None:
    (alone,) = shares(RARE, 100, 1, replacement=replacement)
    parts = shares(RARE, 100, 8, replacement=replacement, tail="pad")
    assert [len(part) for part in parts] == [13] * 8
    assert interleaved(parts) == alone + alone[:4]


@given(
    st.lists(st.floats(0, 1e300), min_size=1, max_size=40).filter(any),
    st.integers(1, 60),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from(["uneven", "drop", "pad"]),
    st.integers(0, 5),
)
def test_any_world_size_deals_the_same_draw_of_items_with_a_weight(
    weights: list[float], num_samples: int, world_size: int, replacement: bool, tail: Tail, epoch: int
) -> None:
    if not replacement:
        num_samples = min(num_samples, sum(weight > 0 for weight in weights))
    samplers = [
        WeightedShardSampler(weights, num_samples, rank, world_size, replacement=replacement, tail=tail)
        for rank in range(world_size)
    ]
    single = WeightedShardSampler(weights, num_samples, 0, 1, replacement=replacement)
    for sampler in [*samplers, single]:
        sampler.set_epoch(epoch)
    alone, parts = list(single), [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    kept = num_samples // world_size * world_size if tail == "drop" else num_samples
    assert interleaved(parts)[:kept] == alone[:kept]
    assert all(weights[index] > 0 for index in alone)
    if not replacement:
        assert len(set(alone)) == len(alone)


def test_draws_with_replacement_have_the_chances_of_their_weights() -> None:
    weights = np.array([1, 2, 0, 3, 10, 0.5, 7, 0, 4, 4])
    (draws,) = shares(weights, 200_000, 1)
    counts = np.bincount(draws, minlength=10)
    assert counts[weights == 0].sum() == 0
    likely = weights > 0
    expected = weights[likely] / weights.sum() * 200_000
    assert abs(chi_square(counts[likely], expected)) < 5
    # and pairs of neighbours are independent
    pairs = np.bincount(np.array(draws[0::2]) * 10 + np.array(draws[1::2]), minlength=100).reshape(10, 10)
    expected_pairs = np.outer(weights, weights)[likely][:, likely] / weights.sum() ** 2 * 100_000
    assert abs(chi_square(pairs[likely][:, likely].ravel(), expected_pairs.ravel())) < 5


def test_draws_without_replacement_have_the_chances_of_successive_draws() -> None:
    weights = np.array([1.0, 2.0, 3.0, 0.0, 6.0])
    sampler = WeightedShardSampler(weights, 2, 0, 1, replacement=False)
    counts = np.zeros((5, 5))
    for _ in range(20_000):
        counts[tuple(sampler)] += 1
    expected = {
        (i, j): weights[i] / 12 * weights[j] / (12 - weights[i]) * 20_000
        for i in range(5)
        for j in range(5)
        if i != j and weights[i] and weights[j]
    }
    seen = np.array([counts[pair] for pair in expected])
    assert seen.sum() == 20_000
    assert abs(chi_square(seen, np.array(list(expected.values())))) < 5


def test_more_than_two_to_the_24_items_with_and_without_replacement() -> None:
    count = (1 << 24) + 1000
    weights = np.zeros(count)
    weights[-2000:] = np.arange(1, 2001)
    draws = np.array(list(WeightedShardSampler(weights, 100_000, 1, 2))) - (count - 2000)
    counts = np.bincount(draws, minlength=2000).reshape(20, 100).sum(axis=1)
    expected = weights[-2000:].reshape(20, 100).sum(axis=1) / weights.sum() * 50_000
    assert abs(chi_square(counts, expected)) < 5
    weights[:] = 1
    first = list(WeightedShardSampler(weights, 1000, 0, 1, replacement=False))
    assert len(set(first)) == 1000
    assert max(first) > 1 << 23


@pytest.mark.parametrize("shape", [0.3, 1.0, 5.0])
def test_a_partial_selection_is_the_start_of_the_whole_race(shape: float) -> None:
    weights = np.random.default_rng(0).pareto(shape, 300_000)
    weights[::7] = 0
    every = WeightedShardSampler(weights, None, 0, 1, replacement=False)
    assert len(every) == np.count_nonzero(weights)
    whole = list(every)
    for count in (1, 1000, 65_536, 65_537, 120_000):
        assert list(WeightedShardSampler(weights, count, 0, 1, replacement=False)) == whole[:count]
    assert sorted(whole) == np.flatnonzero(weights).tolist()


def test_the_exponential_is_accurate_from_the_smallest_to_the_largest_number() -> None:
    uniform = np.concatenate(
        [np.linspace(0, 1, 10_001)[:-1], 10.0 ** np.linspace(-19, 0, 999)[:-1], [1 - 2.0**-53]]
    )
    assert weighted_sampler._exponential(uniform) == pytest.approx(-np.log1p(-uniform), rel=2e-15)


def test_weights_of_any_scale_and_kind_draw_alike() -> None:
    base = np.array([1, 2, 3, 4, 5], dtype=np.float64)
    expected = list(WeightedShardSampler(base, 50, 0, 1))
    kinds: list[Any] = [
        base.tolist(),
        tuple(base),
        torch.tensor(base),
        torch.tensor(base, dtype=torch.bfloat16),
        torch.tensor(base, requires_grad=True),
        base.astype(np.int32),
        base.astype(np.float16),
        base * 2.0**1000,
        base * 2.0**-1000,
        (value for value in base),
    ]
    for kind in kinds:
        assert list(WeightedShardSampler(kind, 50, 0, 1)) == expected


def test_weights_are_copied() -> None:
    for replacement in (True, False):
        weights = np.ones(10)
        sampler = WeightedShardSampler(weights, 5, 0, 1, replacement=replacement)
        expected = list(WeightedShardSampler(np.ones(10), 5, 0, 1, replacement=replacement))
        weights[:] = np.nan
        assert list(sampler) == expected


def test_each_epoch_and_each_seed_has_draws_of_its_own() -> None:
    sampler = WeightedShardSampler(RARE, 50, 0, 1)
    orders = [tuple(sampler) for _ in range(3)]
    orders += [tuple(WeightedShardSampler(RARE, 50, 0, 1, seed=1))]
    assert len(set(orders)) == 4
    sampler.set_epoch(1)
    assert tuple(sampler) == orders[1]


def test_global_generators_neither_matter_nor_change() -> None:
    draws = []
    for seed in range(2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        draws.append(list(WeightedShardSampler(RARE, 50, 0, 1, replacement=False)))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]
    assert draws[0] == draws[1]


@settings(max_examples=40)
@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 5), st.integers(0, 60), st.booleans())
def test_a_state_resumes_on_another_number_of_ranks(
    num_samples: int, then: int, now: int, steps: int, replacement: bool
) -> None:
    weights = np.arange(1, 301)
    options: dict[str, Any] = {"replacement": replacement, "seed": 5}
    whole = WeightedShardSampler(weights, num_samples, 0, 1, **options)
    order, after = list(whole), list(whole)
    seen, state = [], {}
    for rank in range(then):
        sampler = WeightedShardSampler(weights, num_samples, rank, then, **options)
        seen.append(list(itertools.islice(sampler, min(steps, num_samples // then))))
        state = sampler.state_dict()
    if len(interleaved(seen)) == num_samples:
        return
    assert state == {"seed": 5, "epoch": 0, "consumed": len(interleaved(seen))}
    resumed = [WeightedShardSampler(weights, num_samples, rank, now, **options) for rank in range(now)]
    for sampler in resumed:
        sampler.load_state_dict(state)
    assert interleaved(seen) + interleaved([list(sampler) for sampler in resumed]) == order
    assert interleaved([list(sampler) for sampler in resumed]) == after


def test_a_plain_dataloader_takes_it() -> None:
    dataset = TensorDataset(torch.arange(100))
    loader = DataLoader(dataset, batch_size=5, sampler=WeightedShardSampler(RARE, 40, 1, 2), num_workers=1)
    seen = [int(index) for (batch,) in loader for index in batch]
    assert seen == list(WeightedShardSampler(RARE, 40, 0, 1))[1::2]


@pytest.mark.parametrize("replacement", [True, False])
def test_a_shard_loader_cuts_its_steps_from_the_whole_draw(replacement: bool) -> None:
    def loader(rank: int, world_size: int) -> ShardLoader:
        # whatever rank the sampler was made for
        sampler = WeightedShardSampler(RARE, 50, rank, world_size, replacement=replacement, seed=7)
        return ShardLoader(
            numbers(100), global_batch_size=20, sampler=sampler, world=world(rank, world_size), seed=1
        )

    alone = WeightedShardSampler(RARE, 50, 0, 1, replacement=replacement, seed=7)
    parts = [loader(rank, 4) for rank in range(4)]
    assert all(part.training and len(part) == 3 for part in parts)
    for _ in range(2):
        steps = [taken(part) for part in parts]
        dealt = [interleaved([steps[rank][step] for rank in range(4)]) for step in range(3)]
        assert flat(dealt) == list(alone)
    resumed, first = loader(0, 1), loader(0, 1)
    seen = taken(first, 2)
    resumed.load_state_dict(first.state_dict())
    alone.set_epoch(0)
    assert flat(seen + taken(resumed)) == list(alone)


def test_real_ranks_agree_and_ranks_with_other_weights_are_told(run_ranks: Any) -> None:
    parts = run_ranks(_draws_of_the_world, world_size=2)
    assert interleaved([part for part, _ in parts]) == list(WeightedShardSampler(RARE, 30, 0, 1))
    for _, message in parts:
        assert "order drawn from the sampler" in message


def _draws_of_the_world(rank: int, world_size: int) -> tuple[list[int], str]:
    from phalanx.dist.world import init_world

    init_world()
    mine = list(WeightedShardSampler(RARE, 30))
    try:
        ShardLoader(
            numbers(100), global_batch_size=4, sampler=WeightedShardSampler(np.arange(100) + rank * 50)
        )
    except ValueError as error:
        return mine, str(error)
    return mine, ""


@pytest.mark.parametrize(
    ("weights", "options", "named"),
    [
        ([1, -2.5], {}, "weights\\[1\\]=-2.5"),
        ([1, 2, float("nan")], {}, "weights\\[2\\]=nan"),
        ([float("inf")], {}, "weights\\[0\\]=inf"),
        ([1.0, -float("inf")], {}, "weights\\[1\\]=-inf"),
        ([0, 0.0, 0], {}, "all 3 are 0"),
        ([], {}, "empty"),
        (torch.ones(2, 3), {}, "shape \\(2, 3\\)"),
        (3.0, {}, "shape \\(\\)"),
        (None, {}, "weights=None"),
        (["a"], {}, "weights=\\['a'\\]"),
        ([1j], {}, "no numbers"),
        ([[1], [1, 2]], {}, "no numbers"),
        ([1, 2], {"num_samples": 0}, "num_samples=0"),
        ([1, 2], {"num_samples": 1.5}, "num_samples=1.5"),
        ([1, 0, 2], {"num_samples": 3, "replacement": False}, "only 2 of 3 weights are above 0"),
        ([1, 2], {"rank": 2, "world_size": 2}, "rank=2 is outside"),
        ([1, 2], {"rank": 0}, "both, or neither"),
        ([1, 2], {"seed": None}, "seed=None"),
        ([1, 2], {"seed": "x"}, "seed='x'"),
        ([1, 2], {"tail": "wrap"}, "tail='wrap'"),
        ([1, 2], {"replacement": "no"}, "replacement='no'"),
    ],
)
def test_bad_arguments_are_named(weights: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        WeightedShardSampler(weights, **options)


@given(st.data())
def test_a_bad_weight_is_named_wherever_it_stands(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0, 1e308), min_size=1, max_size=30))
    place = data.draw(st.integers(0, len(weights) - 1))
    weights[place] = data.draw(
        st.one_of(st.just(float("nan")), st.just(float("inf")), st.floats(max_value=-5e-324))
    )
    with pytest.raises(ValueError) as caught:
        WeightedShardSampler(weights)
    assert str(caught.value).startswith(f"weights[{place}]={weights[place]!r}:")


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"epoch": 0, "consumed": 0}, "seed missing"),
        ({"seed": 0, "epoch": 0, "consumed": 11}, "11 samples"),
        ({"seed": 0, "epoch": 0, "consumed": -1}, "consumed=-1"),
    ],
)
def test_states_that_do_not_fit_are_refused(state: dict[str, int], named: str) -> None:
    sampler = WeightedShardSampler([1, 2], 10, 0, 1)
    with pytest.raises(ValueError, match=named):
        sampler.load_state_dict(state)

"""LengthBucketSampler: the same batches on any world size, little padding, equally many for every rank."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from phalanx.dist import length_buckets
from phalanx.dist.length_buckets import LengthBucketSampler
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.plan import Tail
from tests.dist.loading import flat, numbers, taken, world

LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 0.7, 5000).astype(int), 1, 512)

Batches = list[list[int]]


def of_ranks(lengths: Any, world_size: int, *args: Any, **options: Any) -> list[LengthBucketSampler]:
    return [
        LengthBucketSampler(lengths, *args, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def joined(parts: list[Batches]) -> Batches:
    """The batches of all ranks together, rank 0's first sample first."""
    steps = []
    for step in zip(*parts, strict=True):
        rows = itertools.zip_longest(*step)
        steps.append([index for row in rows for index in row if index is not None])
    return steps


def padded(batches: Batches, lengths: Any = LENGTHS) -> float:
    """Padded size over real size."""
    sizes = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    return sizes / sum(lengths[index] for batch in batches for index in batch)


def test_the_examples_of_the_docstrings() -> None:
    found = doctest.testmod(length_buckets)
    assert found.attempted >= 2
    assert found.failed == 0


@pytest.mark.parametrize("size", [{"global_batch_size": 64}, {"max_tokens": 8192}])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_batches_are_the_same_on_any_number_of_ranks(size: dict[str, int], shuffle: bool) -> None:
    (alone,) = of_ranks(LENGTHS, 1, shuffle=shuffle, **size)
    batches = list(alone)
    for world_size in (2, 3, 8):
        samplers = of_ranks(LENGTHS, world_size, shuffle=shuffle, **size)
        assert {len(sampler) for sampler in samplers} == {len(batches)}
        parts = [list(sampler) for sampler in samplers]
        assert joined(parts) == batches
    assert sorted(flat(batches)) == list(range(5000))


def test_padding_is_a_small_part_of_what_random_batches_need() -> None:
    order = np.random.default_rng(1).permutation(5000)
    random = padded([order[start : start + 16].tolist() for start in range(0, 5000, 16)])
    for size in ({"global_batch_size": 64}, {"max_tokens": 8192}):
        parts = [list(sampler) for sampler in of_ranks(LENGTHS, 4, **size)]  # type: ignore[arg-type]
        ratio = padded(flat(parts))  # type: ignore[arg-type]
        assert ratio - 1 < 0.15 * (random - 1)
        # and the ranks of a step wait for one another's longest sample only a little
        for step in zip(*parts, strict=True):
            longest = [max(LENGTHS[index] for index in batch) for batch in step]
            assert min(longest) >= 0.6 * max(longest)


def test_no_batch_is_larger_than_max_tokens_and_few_are_much_smaller() -> None:
    batches = list(LengthBucketSampler(LENGTHS, max_tokens=8192, rank=0, world_size=1))
    sizes = [len(batch) * max(LENGTHS[index] for index in batch) for batch in batches]
    assert max(sizes) <= 8192
    assert np.mean(sizes) > 0.9 * 8192


def test_epochs_have_other_batches_in_another_order() -> None:
    sampler = LengthBucketSampler(LENGTHS, 64, 0, 1)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second} == set()
    lengths = [LENGTHS[batch[0]] for batch in first]
    assert lengths != sorted(lengths)
    assert lengths != sorted(lengths, reverse=True)
    sampler.set_epoch(0)
    assert list(sampler) == first
    fixed = LengthBucketSampler(LENGTHS, 64, 0, 1, shuffle=False)
    assert list(fixed) == list(fixed)
    assert [LENGTHS[index] for index in flat(list(fixed))] == sorted(LENGTHS, reverse=True)


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 30), max_size=120),
    st.integers(1, 5),
    st.integers(0, 20),
    st.booleans(),
    st.sampled_from(["uneven", "drop", "pad"]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 50)),
)
def test_every_rank_has_as_many_batches_and_every_sample_comes(
    lengths: list[int],
    world_size: int,
    extra: int,
    by_tokens: bool,
    tail: Tail,
    shuffle: bool,
    pool_size: int | None,
) -> None:
    size = world_size + extra
    least = max([1, *lengths]) * world_size
    sizes: dict[str, int] = {"max_tokens": least + extra} if by_tokens else {"global_batch_size": size}
    samplers = of_ranks(lengths, world_size, tail=tail, shuffle=shuffle, pool_size=pool_size, **sizes)
    expected = [len(sampler) for sampler in samplers]
    parts = [list(sampler) for sampler in samplers]
    assert [len(part) for part in parts] == expected
    assert len(set(expected)) == 1
    assert all(batch for part in parts for batch in part)
    seen = np.bincount([index for part in parts for index in flat(part)], minlength=len(lengths))
    if by_tokens:
        assert (seen >= 1).all()
        for step in zip(*parts, strict=True):
            distinct = set(flat(list(step)))
            assert len(distinct) * max(lengths[index] for index in distinct) <= least + extra
    elif tail == "drop":
        assert seen.sum() == len(lengths) // size * size
        assert seen.max(initial=0) <= 1
    elif tail == "uneven" and (len(lengths) % size == 0 or len(lengths) % size >= world_size):
        assert (seen == 1).all()
    else:
        assert (seen >= 1).all()
        if tail == "pad":
            assert {len(batch) for step in zip(*parts, strict=True) for batch in [flat(list(step))]} <= {size}


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 4), st.integers(0, 20), st.booleans())
def test_a_state_resumes_on_another_number_of_ranks(
    count: int, then: int, now: int, steps: int, by_tokens: bool
) -> None:
    lengths = LENGTHS[:count]
    sizes: dict[str, int] = {"max_tokens": 2500} if by_tokens else {"global_batch_size": 12}
    alone = LengthBucketSampler(lengths, rank=0, world_size=1, seed=4, **sizes)
    order, after = list(alone), list(alone)
    seen, states = [], []
    for sampler in of_ranks(lengths, then, seed=4, **sizes):
        seen.append(list(itertools.islice(sampler, steps)))
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    if steps >= len(order):
        return
    resumed = of_ranks(lengths, now, **sizes)
    for sampler in resumed:
        sampler.load_state_dict(states[0])
    rest = [list(sampler) for sampler in resumed]
    whole = [set(batch) for batch in order]
    assert [set(batch) for batch in joined(seen) + joined(rest)] == whole
    assert [set(batch) for batch in joined([list(sampler) for sampler in resumed])] == [set(b) for b in after]


def test_a_rank_without_a_sample_repeats_one_of_its_batch() -> None:
    parts = [list(sampler) for sampler in of_ranks([3] * 9, 4, 4, seed=1)]
    last = [part[-1] for part in parts]
    assert len(parts[0]) == 3
    assert last == [last[0]] * 4
    assert len(last[0]) == 1


def test_a_plain_dataloader_takes_it_as_its_batches() -> None:
    def pad(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    texts = [torch.full((int(length),), index) for index, length in enumerate(LENGTHS[:200], start=1)]
    lengths = [len(text) for text in texts]
    seen = []
    for rank in range(2):
        sampler = LengthBucketSampler(lengths, 16, rank, 2)
        loader = DataLoader(texts, batch_sampler=sampler, collate_fn=pad)  # type: ignore[arg-type]
        assert len(loader) == 13
        seen += [int(number) for batch in loader for number in batch[:, 0]]
    assert sorted(seen) == list(range(1, 201))


@pytest.mark.parametrize("tail", ["uneven", "drop"])
def test_a_shard_loader_delivers_the_same_batches(tail: Tail) -> None:
    def loader(rank: int, world_size: int) -> ShardLoader:
        sampler = LengthBucketSampler(LENGTHS[:203], 20, rank, world_size, seed=3)
        return ShardLoader(
            numbers(203), global_batch_size=20, sampler=sampler, tail=tail, world=world(rank, world_size)
        )

    plain = LengthBucketSampler(LENGTHS[:203], 20, 0, 1, seed=3, tail=tail)
    parts = [loader(rank, 4) for rank in range(4)]
    for _ in range(2):
        assert joined([taken(part) for part in parts]) == list(plain)
    first, resumed = loader(0, 1), loader(0, 1)
    seen = taken(first, 4)
    resumed.load_state_dict(first.state_dict())
    plain.set_epoch(0)
    assert seen + taken(resumed) == list(plain)


@pytest.mark.parametrize(
    ("sizes", "named"), [({"max_tokens": 4000}, "max_tokens=4000"), ({"global_batch_size": 10}, "=10")]
)
def test_a_shard_loader_with_another_batch_size_is_refused(sizes: dict[str, int], named: str) -> None:
    sampler = LengthBucketSampler(LENGTHS[:100], rank=0, world_size=1, **sizes)
    with pytest.raises(ValueError, match="torn apart") as caught:
        ShardLoader(numbers(100), global_batch_size=20, sampler=sampler, world=world())
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("lengths", "options", "named"),
    [
        ([1, -2], {"global_batch_size": 1}, "lengths\\[1\\]="),
        ([1, 2.5], {"global_batch_size": 1}, "lengths\\[1\\]="),
        ([float("nan")], {"global_batch_size": 1}, "lengths\\[0\\]="),
        ([[1, 2]], {"global_batch_size": 1}, "shape \\(1, 2\\)"),
        (7, {"global_batch_size": 1}, "shape \\(\\)"),
        (None, {"global_batch_size": 1}, "lengths=None"),
        (["ab"], {"global_batch_size": 1}, "lengths=\\['ab'\\]"),
        ([1], {}, "one of the two"),
        ([1], {"global_batch_size": 1, "max_tokens": 1}, "one of the two"),
        ([1], {"global_batch_size": 0}, "global_batch_size=0"),
        ([1], {"global_batch_size": 3, "rank": 0, "world_size": 4}, "over 4 ranks"),
        ([1, 9, 2], {"max_tokens": 17, "rank": 0, "world_size": 2}, "sample 1 has a length of 9"),
        ([1], {"max_tokens": 1.5}, "max_tokens=1.5"),
        ([1], {"global_batch_size": 1, "pool_size": 0}, "pool_size=0"),
        ([1], {"global_batch_size": 1, "seed": None}, "seed=None"),
        ([1], {"global_batch_size": 1, "tail": "x"}, "tail='x'"),
        ([1], {"global_batch_size": 1, "rank": 1, "world_size": 1}, "rank=1 is outside"),
    ],
)
def test_bad_arguments_are_named(lengths: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LengthBucketSampler(lengths, **options)


def test_a_place_within_a_batch_is_refused() -> None:
    sampler = LengthBucketSampler([1] * 20, 5, 0, 1)
    for consumed in (7, 25):
        with pytest.raises(ValueError, match=f"{consumed} samples of epoch 2"):
            sampler.load_state_dict({"seed": 0, "epoch": 2, "consumed": consumed})

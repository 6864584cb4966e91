"""Plan: which samples a step sees is free of the number of shards. Progress: the only counter."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx.dist.keys
import phalanx.dist.permutation
import phalanx.dist.plan
from phalanx.dist.plan import Plan, Progress, Tail

TAILS: list[Tail] = ["uneven", "drop", "pad"]

plans = st.builds(
    Plan,
    num_items=st.integers(1, 120),
    global_batch_size=st.integers(1, 40),
    shards=st.integers(1, 9),
    seed=st.one_of(st.none(), st.integers(-5, 5)),
    tail=st.sampled_from(TAILS),
)


def step_indices(plan: Plan, epoch: int, step: int) -> list[int]:
    return [int(index) for v in range(plan.shards) for index in plan.indices(epoch, step, v)]


@pytest.mark.parametrize("module", [phalanx.dist.keys, phalanx.dist.permutation, phalanx.dist.plan])
def test_docstring_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_50_samples_on_4_shards_are_13_13_12_12() -> None:
    plan = Plan(num_items=50, global_batch_size=50, shards=4)
    assert [plan.shard_count(0, 0, v) for v in range(4)] == [13, 13, 12, 12]
    assert [len(plan.positions(0, 0, v)) for v in range(4)] == [13, 13, 12, 12]


@given(plans, st.integers(0, 3), st.data())
def test_a_step_sees_the_same_samples_on_any_number_of_shards(
    plan: Plan, epoch: int, data: st.DataObject
) -> None:
    alone = Plan(plan.num_items, plan.global_batch_size, 1, plan.seed, plan.tail)
    assert plan.steps_per_epoch == alone.steps_per_epoch
    assert plan.fingerprint() == alone.fingerprint()
    if plan.steps_per_epoch:
        step = data.draw(st.integers(0, plan.steps_per_epoch - 1))
        assert sorted(step_indices(plan, epoch, step)) == sorted(alone.indices(epoch, step, 0))


@given(plans)
def test_counts_are_the_lengths_and_shares_differ_by_one_at_most(plan: Plan) -> None:
    for step in range(plan.steps_per_epoch):
        shares = [len(plan.positions(1, step, v)) for v in range(plan.shards)]
        assert shares == [plan.shard_count(1, step, v) for v in range(plan.shards)]
        assert sum(shares) == plan.count(1, step)
        assert shares == sorted(shares, reverse=True)
        assert max(shares) - min(shares) <= 1


@given(plans, st.integers(0, 3))
def test_what_an_epoch_covers(plan: Plan, epoch: int) -> None:
    seen = np.bincount(
        [index for step in range(plan.steps_per_epoch) for index in step_indices(plan, epoch, step)],
        minlength=plan.num_items,
    )
    assert len(seen) == plan.num_items
    rest = plan.num_items % plan.global_batch_size
    if plan.tail == "uneven":
        assert (seen == 1).all()
    elif plan.tail == "drop":
        assert seen.max(initial=0) <= 1
        assert (seen == 0).sum() == rest
    else:
        assert seen.min() >= 1
        assert seen.sum() == plan.steps_per_epoch * plan.global_batch_size


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(plan: Plan, epoch: int) -> list[int]:
        return [index for step in range(plan.steps_per_epoch) for index in step_indices(plan, epoch, step)]

    plan, other = Plan(100, 10, 1, seed=0), Plan(100, 10, 1, seed=1)
    orders = [order(plan, 0), order(plan, 1), order(other, 0), order(other, 1)]
    assert len({tuple(found) for found in orders}) == 4
    assert order(Plan(100, 10, 1, seed=0), 1) == orders[1]


def test_without_a_seed_or_a_shuffle_the_dataset_order_is_kept() -> None:
    for plan in (Plan(7, 4, 2, seed=None), Plan(7, 4, 2, seed=3, shuffle=False)):
        assert [plan.indices(5, step, v).tolist() for step in (0, 1) for v in (0, 1)] == [
            [0, 2],
            [1, 3],
            [4, 6],
            [5],
        ]


def test_keys_differ_by_epoch_step_shard_purpose_and_seed() -> None:
    plan = Plan(100, 10, 4, seed=1)
    keys = [
        plan.key(epoch, step, v, purpose)
        for epoch in range(3)
        for step in range(3)
        for v in range(4)
        for purpose in ("loop", "workers")
    ]
    keys += [plan.sample_key(epoch, position) for epoch in range(3) for position in range(20)]
    keys += [plan.sample_key(0, 0, "other"), Plan(100, 10, 4, seed=2).key(0, 0, 0, "loop")]
    assert len(set(keys)) == len(keys)


def test_sample_keys_are_free_of_the_number_of_shards_and_of_the_batch() -> None:
    assert Plan(100, 10, 4).sample_key(2, 17) == Plan(100, 25, 1).sample_key(2, 17)
    # without a shuffle the seed still says how samples are augmented
    assert Plan(9, 3, 1, seed=1, shuffle=False).sample_key(0, 0) != Plan(
        9, 3, 1, seed=2, shuffle=False
    ).sample_key(0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"num_items": 99},
        {"global_batch_size": 9},
        {"seed": 1},
        {"seed": None},
        {"tail": "pad"},
        {"shuffle": False},
    ],
)
def test_the_fingerprint_tells_whatever_changes_a_step(change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"num_items": 100, "global_batch_size": 10, "shards": 2}
    assert Plan(**settings).fingerprint() != Plan(**{**settings, **change}).fingerprint()
    assert Plan(**settings).fingerprint() == Plan(**{**settings, "shards": 5}).fingerprint()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_items": -1}, "num_items=-1"),
        ({"num_items": True}, "num_items=True"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"global_batch_size": 2.5}, "global_batch_size=2.5"),
        ({"shards": 0}, "shards=0"),
        ({"seed": "a"}, "seed='a'"),
        ({"tail": "wrap"}, "tail='wrap'"),
    ],
)
def test_bad_plans_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Plan(**{"num_items": 10, "global_batch_size": 5, "shards": 2, **change})


@pytest.mark.parametrize(("epoch", "step", "v"), [(0, 2, 0), (0, -1, 0), (-1, 0, 0), (0, 0, 2), (0, 0, -1)])
def test_steps_and_shards_that_do_not_exist_are_refused(epoch: int, step: int, v: int) -> None:
    plan = Plan(10, 5, 2)
    with pytest.raises(ValueError, match=r"there are|an epoch has"):
        plan.positions(epoch, step, v)


def test_no_items_are_no_steps() -> None:
    assert [Plan(0, 5, 2, tail=tail).steps_per_epoch for tail in TAILS] == [0, 0, 0]


@given(st.builds(Progress, *[st.integers(0, 1 << 40)] * 4))
def test_progress_goes_through_plain_values(progress: Progress) -> None:
    assert Progress.from_dict(progress.to_dict()) == progress


@pytest.mark.parametrize("field", ["epoch", "step_in_epoch", "step", "skipped"])
def test_progress_that_is_no_place_is_refused(field: str) -> None:
    whole = Progress(1, 2, 3, 4).to_dict()
    with pytest.raises(ValueError, match=f"{field}=-1"):
        Progress.from_dict({**whole, field: -1})
    with pytest.raises(ValueError, match=f"{field}='1'"):
        Progress.from_dict({**whole, field: "1"})
    del whole[field]
    with pytest.raises(ValueError, match=f"lacks {field}"):
        Progress.from_dict(whole)

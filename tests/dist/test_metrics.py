"""Metrics over ranks equal those of one process that sees everything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from phalanx.dist.loaders import ShardLoader
from phalanx.dist.metrics import Accuracy, Mean
from phalanx.dist.samplers import ShardSampler
from phalanx.dist.world import init_world


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 9)), min_size=1, max_size=20), st.booleans())
def test_a_mean_is_weighted_by_samples(batches: list[tuple[float, int]], as_tensors: bool) -> None:
    mean = Mean()
    for value, weight in batches:
        mean.update(torch.tensor(value, dtype=torch.float64) if as_tensors else value, weight)
    total = sum(weight for _, weight in batches)
    if total == 0:
        assert math.isnan(mean.compute())
    else:
        expected = math.fsum(value * weight for value, weight in batches) / total
        assert mean.compute() == pytest.approx(expected, abs=1e-9)


def test_elements_of_a_tensor_count_each() -> None:
    mean = Mean()
    mean.update(torch.tensor([1.0, 2.0, 3.0]))
    mean.update(7)
    assert mean.compute() == 13 / 4
    mean.reset()
    mean.update(torch.tensor([[1.0, 2.0]]), torch.tensor([[3, 1]]))
    assert mean.compute() == 5 / 4


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0)])
@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("inf"))])
def test_a_stand_in_weighs_nothing_even_when_it_is_no_number(value: Any, weight: Any) -> None:
    mean = Mean()
    mean.update(3.0, 2)
    mean.update(value, weight)
    assert mean.compute() == 3.0


def test_many_small_numbers_are_summed_in_float64() -> None:
    mean = Mean()
    for _ in range(1000):
        mean.update(torch.full((1000,), 0.1, dtype=torch.float32))
    assert mean.compute() == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)


def test_a_mean_keeps_no_graph() -> None:
    weight = torch.ones(1, requires_grad=True)
    mean = Mean()
    mean.update(weight * 2)
    assert isinstance(mean._sum, torch.Tensor)
    assert not mean._sum.requires_grad


def test_nothing_counted_is_nan_and_reset_starts_over() -> None:
    mean, accuracy = Mean(), Accuracy()
    assert math.isnan(mean.compute())
    assert math.isnan(accuracy.compute())
    mean.update(5.0)
    accuracy.update(torch.tensor([1]), torch.tensor([1]))
    assert (mean.compute(), accuracy.compute()) == (5.0, 1.0)
    mean.reset()
    accuracy.reset()
    assert math.isnan(mean.compute())
    assert math.isnan(accuracy.compute())


def test_negative_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="weight=-1"):
        Mean().update(1.0, -1)


SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3], [0.2, 0.3, 0.5], [0.4, 0.5, 0.1]])
TARGETS = torch.tensor([1, 2, 2, 2])


@pytest.mark.parametrize(("topk", "expected"), [(1, 0.5), (2, 0.75), (3, 1.0)])
def test_accuracy_of_scores(topk: int, expected: float) -> None:
    accuracy = Accuracy(topk)
    accuracy.update(SCORES[:3], TARGETS[:3])
    accuracy.update(SCORES[3:], TARGETS[3:])
    assert accuracy.compute() == expected


def test_accuracy_of_predicted_classes_and_of_pixels() -> None:
    accuracy = Accuracy()
    accuracy.update(SCORES.argmax(1), TARGETS)
    assert accuracy.compute() == 0.5
    accuracy.reset()
    accuracy.update(SCORES.t()[None], TARGETS[None])  # one image of four pixels
    assert accuracy.compute() == 0.5


@pytest.mark.parametrize(("count", "expected"), [(None, 0.5), (3, 2 / 3), (1, 1.0)])
def test_only_real_samples_count(count: int | None, expected: float) -> None:
    accuracy = Accuracy()
    accuracy.update(SCORES, TARGETS, count=count)
    accuracy.update(SCORES[:1], TARGETS[1:2], count=0)
    assert accuracy.compute() == expected


@pytest.mark.parametrize(
    ("predictions", "targets", "options", "named"),
    [
        (torch.zeros(4, 3), torch.zeros(3).long(), {}, "shape"),
        (torch.zeros(4), torch.zeros(4).long(), {}, "scores > 0"),
        (torch.zeros(4, 1), torch.zeros(4, 1).long(), {}, "shape"),
        (torch.zeros(4, 3), torch.zeros(4).long(), {"topk": 4}, "3 classes"),
        (torch.zeros(4).long(), torch.zeros(4).long(), {"topk": 2}, "topk=2"),
    ],
)
def test_shapes_that_do_not_match_are_refused(
    predictions: torch.Tensor, targets: torch.Tensor, options: dict[str, int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Accuracy(**options).update(predictions, targets)


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="topk=0"):
        Accuracy(0)
    with pytest.raises(ValueError, match="count=5"):
        Accuracy().update(SCORES, TARGETS, count=5)


def _evaluate(rank: int, world_size: int) -> list[float]:
    """The mean of the indices and the share of even ones, by a loader and by a sampler."""
    init_world()
    loader = ShardLoader(TensorDataset(torch.arange(10)), global_batch_size=8)
    mean, accuracy, batches = Mean(), Accuracy(), 0
    for (x,) in loader:
        batches += 1
        mean.update(x.double().mean(), weight=loader.local_count)
        accuracy.update(x % 2, torch.zeros_like(x))
    sampled = Mean()
    for index in ShardSampler(10, shuffle=False):
        sampled.update(float(index))
    return [mean.compute(), accuracy.compute(), sampled.compute(), batches]


def test_uneven_ranks_count_every_sample_once_and_do_not_wait_for_each_other(run_ranks: Any) -> None:
    found = run_ranks(_evaluate, world_size=4)
    assert [values[:3] for values in found] == [[4.5, 0.5, 4.5]] * 4
    assert [values[3] for values in found] == [2, 2, 1, 1]


def _one_rank_alone(rank: int, world_size: int) -> list[float]:
    init_world()
    mean, accuracy = Mean(), Accuracy()
    if rank == 1:  # the other one has nothing: numbers on one rank, tensors on the other
        mean.update(torch.tensor([2.0, 4.0]))
        accuracy.update(SCORES, TARGETS)
    return [mean.compute(), accuracy.compute()]


def test_a_rank_without_any_sample_takes_part(run_ranks: Any) -> None:
    assert run_ranks(_one_rank_alone, world_size=2) == [[3.0, 0.5]] * 2


def _training(rank: int, world_size: int) -> list[float]:
    init_world()
    loader = ShardLoader(TensorDataset(torch.arange(9)), global_batch_size=4, shuffle=True)
    mean, accuracy = Mean(), Accuracy()
    for (x,) in loader:
        mean.update(x.double().mean(), weight=loader.local_count)
        accuracy.update(x % 2, torch.zeros_like(x), count=loader.local_count)
    return [mean.compute(), accuracy.compute()]


def test_stand_ins_of_a_training_loader_count_nothing(run_ranks: Any) -> None:
    for values in run_ranks(_training, world_size=3):
        assert values == [pytest.approx(4.0), pytest.approx(5 / 9)]

"""What the loops share: exact evaluation, and what rank 0 alone finds out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from phalanx.dist import ShardLoader
from phalanx.recipes.settings import SettingsError
from phalanx.recipes.training import evaluate, from_rank_zero
from tests.ranks import RankRunner


class _Scores(nn.Module):
    """Says class 1 where the input is positive, and counts the samples it has seen."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([-x, x], dim=1)


def _data(items: int) -> TensorDataset:
    x = torch.linspace(-3, 5, items)
    return TensorDataset(x, (torch.arange(items) % 3 > 0).long())


def _evaluate(rank: int, world_size: int, items: int, batch: int) -> dict[str, float]:
    from phalanx.dist import init_world

    init_world()
    return evaluate(_Scores(), ShardLoader(_data(items), global_batch_size=batch))


@pytest.mark.parametrize(("items", "batch"), [(37, 10), (1, 4)])
def test_evaluation_counts_every_sample_once_on_any_number_of_ranks(
    run_ranks: RankRunner, items: int, batch: int
) -> None:
    x, labels = _data(items).tensors
    outputs = _Scores()(x)
    loss = nn.functional.cross_entropy(outputs, labels).item()
    accuracy = (outputs.argmax(1) == labels).float().mean().item()
    for world_size in (1, 3):
        for found in run_ranks(_evaluate, items, batch, world_size=world_size):
            assert found == {
                "loss": pytest.approx(loss, rel=1e-5),
                "accuracy": pytest.approx(accuracy, abs=1e-7),
            }


def test_evaluation_leaves_the_mode_as_it_was() -> None:
    model = _Scores()
    evaluate(model, ShardLoader(_data(5), global_batch_size=2))
    assert model.training
    evaluate(model.eval(), ShardLoader(_data(5), global_batch_size=2))
    assert not model.training


def _refuse_on_rank_zero(rank: int, world_size: int, problem: str) -> object:
    from phalanx.dist import init_world

    init_world()

    def make() -> int:
        if problem:
            raise SettingsError(problem)
        return rank + 7

    try:
        return from_rank_zero(make)
    except SettingsError as error:
        return str(error)


def test_rank_zeros_word_is_everybodys(run_ranks: RankRunner) -> None:
    assert run_ranks(_refuse_on_rank_zero, "", world_size=2) == [7, 7]
    assert run_ranks(_refuse_on_rank_zero, "no", world_size=2) == ["no", "no"]

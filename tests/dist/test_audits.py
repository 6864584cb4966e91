"""The dataset audit: what differs between ranks is found without fetching a sample, and said in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, random_split

from phalanx.dist.audits import (
    audit_same_dataset,
    audit_same_model,
    dataset_fingerprint,
    explain_differences,
    explain_models,
    hash_values,
    model_description,
)
from phalanx.dist.parallel import parallelize
from phalanx.dist.world import World, init_world


class Untouchable(Dataset[int]):
    """Fails when a sample is fetched."""

    def __init__(self, num_items: int = 10) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a sample was fetched")


class WithTransform(Dataset[int]):
    """A wrapper as users write them."""

    def __init__(self, subset: Dataset[int]) -> None:
        self.subset = subset
        self.itself = self  # a cycle must not trap the audit

    def __len__(self) -> int:
        return len(self.subset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> int:
        return self.subset[index]


def differing(one: Any, other: Any) -> list[str]:
    a, b = dataset_fingerprint(one), dataset_fingerprint(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def test_the_docstring_example() -> None:
    import doctest

    import phalanx.dist.audits

    assert doctest.testmod(phalanx.dist.audits).failed == 0


def test_equal_datasets_have_equal_fingerprints() -> None:
    def make() -> Any:
        parts = random_split(Untouchable(10), [7, 3], generator=torch.Generator().manual_seed(0))
        return ConcatDataset([Subset(parts[0], [0, 2]), TensorDataset(torch.arange(4.0), torch.ones(4, 2))])

    assert differing(make(), make()) == []


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (Untouchable(10), Untouchable(11), ["dataset.length"]),
        (Subset(Untouchable(), [0, 1]), Subset(Untouchable(), [1, 0]), ["dataset.indices"]),
        (Subset(Subset(Untouchable(), [0, 1]), [0]), Subset(Subset(Untouchable(), [0, 2]), [0]), ["dataset.dataset.indices"]),
        (WithTransform(Subset(Untouchable(), [1])), WithTransform(Subset(Untouchable(), [2])), ["dataset.subset.indices"]),
        (
            ConcatDataset([Untouchable(3), Subset(Untouchable(), [1])]),
            ConcatDataset([Untouchable(3), Subset(Untouchable(), [2])]),
            ["dataset.datasets[1].indices"],
        ),
        (
            StackDataset(a=Subset(Untouchable(), [1])),
            StackDataset(a=Subset(Untouchable(), [2])),
            ["dataset.datasets['a'].indices"],
        ),
        (TensorDataset(torch.zeros(5)), TensorDataset(torch.zeros(5, 1)), ["dataset.tensors[0].shape"]),
        (TensorDataset(torch.zeros(5)), TensorDataset(torch.zeros(5).int()), ["dataset.tensors[0].dtype"]),
        (TensorDataset(torch.zeros(5)), TensorDataset(torch.ones(5)), ["dataset.tensors[0].values"]),
    ],
)  # fmt: skip
def test_each_difference_has_its_name(one: Any, other: Any, names: list[str]) -> None:
    assert [name for name in differing(one, other) if name in names] == names
    assert not [name for name in differing(one, other) if not name.startswith("dataset")]


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "numpy", "torch"]
)
def test_integers_hash_by_value_whatever_holds_them(make: Any) -> None:
    assert hash_values(make([3, 1, 2])) == hash_values([3, 1, 2])
    assert hash_values(make([3, 1, 2])) != hash_values([3, 2, 1])


def test_sequences_of_other_things_hash_too() -> None:
    assert hash_values(["a", "b"]) != hash_values(["b", "a"])
    assert hash_values([(0, 1), (2,)]) == hash_values([(0, 1), (2,)])
    assert hash_values(range(5)) != hash_values(range(6))
    assert hash_values([]) == hash_values([])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(1_000_000.0),
        torch.zeros(3, 1_000_000),
        torch.zeros(100, 3, 224, 224, dtype=torch.uint8),
        torch.zeros(1),
        torch.zeros(0, 5),
        torch.zeros(6, 4).t(),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(4, 0),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_tensors_of_any_shape_are_sampled(tensor: torch.Tensor) -> None:
    data = TensorDataset(tensor)
    assert differing(data, data) == []
    if tensor.numel():
        changed = TensorDataset(torch.ones_like(data.tensors[0]))
        assert differing(data, changed)


def test_values_at_both_ends_of_a_large_tensor_are_looked_at() -> None:
    zeros = torch.zeros(1_000_000, 8)
    for place in (0, -1):
        other = zeros.clone()
        other[place] = 1
        assert differing(TensorDataset(zeros), TensorDataset(other)) == ["dataset.tensors[0].values"]


def test_the_message_names_the_ranks_and_what_to_do() -> None:
    prints = [dataset_fingerprint(Subset(Untouchable(), [0, number])) for number in (1, 1, 2)]
    message = explain_differences(prints)
    assert message is not None
    assert "rank 2 holds other indices than rank 0 (dataset.indices): an unseeded random_split?" in message
    assert "torch.Generator().manual_seed(0)" in message

    message = explain_differences([dataset_fingerprint(Untouchable(number)) for number in (10, 9, 8)])
    assert message is not None
    assert "ranks 1, 2 hold another number of samples" in message
    assert "rank 0: 10, rank 1: 9, rank 2: 8" in message
    assert explain_differences([dataset_fingerprint(Untouchable())] * 3) is None
    assert "rank 1 holds another seed" in (explain_differences([{}, {"seed": 1}]) or "")
    assert "rank 1 holds another seed" in (explain_differences([{"seed": 1}, {}]) or "")


def test_a_single_process_has_nothing_to_compare() -> None:
    audit_same_dataset(Untouchable(), init_world())


class Broken(Dataset[int]):
    def __len__(self) -> int:
        raise OSError("no such folder")

    def __getitem__(self, index: int) -> int:
        return index


def _audit(rank: int, world_size: int, what: str) -> str:
    dataset: Any = Untouchable()
    settings: dict[str, Any] = {}
    if what == "split":
        dataset = Subset(dataset, [0, rank])
    elif what == "broken" and rank == 1:
        dataset = Broken()
    elif what == "setting":
        settings = {"seed": rank}
    world: World = init_world()
    try:
        audit_same_dataset(dataset, world, settings=settings)
    except ValueError as error:
        return str(error)
    return "equal"


def _audits(rank: int, world_size: int) -> list[str]:
    return [_audit(rank, world_size, what) for what in ("same", "split", "broken", "setting")]


def test_every_rank_hears_what_differs_and_none_is_left_waiting(run_ranks: Any) -> None:
    one, other = run_ranks(_audits, world_size=2)
    assert one == other
    same, split, broken, setting = one
    assert same == "equal"
    assert "rank 1 holds other indices" in split
    assert "rank 1: OSError: no such folder" in broken
    assert "rank 1 holds another seed than rank 0" in setting
    assert "a seed must not depend on the rank" in setting


# ---- models


def _build(rank: int, what: str) -> nn.Module:
    if what == "classes":
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 10 - rank))
    if what == "names":
        return nn.ModuleDict({"one" if rank else "other": nn.Linear(2, 2)})
    if what == "frozen":
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(rank == 0)
        return model
    return nn.BatchNorm1d(3)


def _models(rank: int, world_size: int) -> dict[str, str]:
    world = init_world()
    found = {}
    for what in ("same", "classes", "names", "frozen"):
        try:
            audit_same_model(_build(rank, what), world)
        except ValueError as error:
            found[what] = str(error)
    try:
        parallelize(_build(rank, "classes"), SGD)
    except ValueError as error:
        found["parallelize"] = str(error)
    return found


def test_ranks_with_different_models_are_named_before_ddp_sees_them(run_ranks: Any) -> None:
    one, other = run_ranks(_models, world_size=2)
    assert one == other
    assert "same" not in one
    assert one["classes"].splitlines()[:3] == [
        "Ranks have built different models:",
        "  1.weight: rank 0: float32 [10, 4]; rank 1: float32 [9, 4]",
        "  1.bias: rank 0: float32 [10]; rank 1: float32 [9]",
    ]
    assert "other.weight: rank 0: float32 [2, 2]; rank 1: not there" in one["names"]
    assert "bias: rank 0: float32 [2]; rank 1: float32 [2] (frozen)" in one["frozen"]
    assert one["parallelize"] == one["classes"]


def test_models_in_words() -> None:
    assert model_description(nn.BatchNorm1d(3))["num_batches_tracked"] == "int64 []"
    assert model_description(nn.LazyLinear(3))["weight"] == "float32 of no shape yet"
    many = [{f"{number}": "float32 [1]" for number in range(20)}, {}]
    assert "and 12 more" in explain_models(many)
    assert "in another order" in explain_models([{"a": "x", "b": "y"}, {"b": "y", "a": "x"}])

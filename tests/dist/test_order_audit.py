"""A DistributedSampler that repeats its order is told of, once, and only when it does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from phalanx.dist.order_audit import watch_orders


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    original = DistributedSampler.__iter__
    watch_orders()
    watch_orders()  # once is enough
    yield
    DistributedSampler.__iter__ = original  # type: ignore[method-assign]


def _loader(shuffle: bool = True) -> tuple[DataLoader[torch.Tensor], DistributedSampler[torch.Tensor]]:
    data = TensorDataset(torch.arange(8.0))
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, 2, 0, shuffle=shuffle)
    return DataLoader(data, batch_size=2, sampler=sampler), sampler  # type: ignore[return-value]


def test_two_epochs_in_one_order() -> None:
    loader, _ = _loader()
    first = [x[0].tolist() for x in loader]
    with pytest.warns(
        UserWarning, match=r"the order of the last one, that of epoch 0.*Fix: sampler.set_epoch"
    ):
        second = [x[0].tolist() for x in loader]
    assert second == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)  # it is said once


def test_no_word_where_the_order_changes_or_does_not_matter() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader, sampler = _loader()
        next(iter(loader))  # a look at the first batch is no pass
        orders = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders.append([x[0].tolist() for x in loader])
        assert orders[0] != orders[1]
        evaluation, _ = _loader(shuffle=False)
        for _ in range(3):
            list(evaluation)

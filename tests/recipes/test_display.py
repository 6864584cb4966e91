"""A bar on a terminal, few lines elsewhere, rank 0 alone."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from phalanx.dist import ShardLoader
from phalanx.recipes.display import Display


def _data(items: int) -> TensorDataset:
    x = torch.linspace(-3, 5, items)
    return TensorDataset(x, (torch.arange(items) % 3 > 0).long())


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal()])
def test_a_bar_is_for_terminals_only(stream: io.StringIO) -> None:
    loader = ShardLoader(_data(10), global_batch_size=2, shuffle=True)
    with Display(25, speaks=True, stream=stream) as display:
        for epoch in range(25):
            assert len(list(display.watch(loader, epoch))) == 5
            display.epoch_done(epoch, {"loss": 0.5, "accuracy": 0.75})
    text = stream.getvalue()
    assert "epoch 25/25  validation loss 0.5000, accuracy 75.00%" in text
    assert "samples/s" in text
    if stream.isatty():
        assert "\x1b[" in text
    else:
        assert not set("\r\x1b") & set(text)
        assert len(text.splitlines()) == 9  # about ten lines, however many epochs
    assert display.train_s > 0


def test_ranks_other_than_0_show_nothing() -> None:
    loader = ShardLoader(_data(10), global_batch_size=2, shuffle=True)
    stream: Any = _Terminal()
    with Display(1, speaks=False, stream=stream) as display:
        list(display.watch(loader, 0))
        display.epoch_done(0, {"loss": 0.5, "accuracy": 0.75})
    assert stream.getvalue() == ""

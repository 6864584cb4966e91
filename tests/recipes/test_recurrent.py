"""Cells with a batch-first state: the written-out one is torch's, and a split batch gives the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.recipes.recurrent import CELLS, Cell, CharacterModel, Forecaster, HandRnn, Recurrent


@pytest.mark.parametrize("layers", [1, 3])
def test_the_cell_written_out_is_torchs(layers: int) -> None:
    torch.manual_seed(0)
    ours, theirs = HandRnn(3, 5, layers).double(), nn.RNN(3, 5, layers, batch_first=True).double()
    with torch.no_grad():
        for layer in range(layers):
            getattr(theirs, f"weight_ih_l{layer}").copy_(ours.from_input[layer].weight)
            getattr(theirs, f"weight_hh_l{layer}").copy_(ours.from_hidden[layer].weight)
            getattr(theirs, f"bias_ih_l{layer}").copy_(ours.from_input[layer].bias)
            getattr(theirs, f"bias_hh_l{layer}").zero_()
    x, state = torch.randn(4, 6, 3).double(), torch.randn(layers, 4, 5).double()
    for found, expected in zip(ours(x, state), theirs(x, state), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_split_on_dim_0_gives_the_same(cell: Cell) -> None:
    """As DataParallel splits it: three samples in two parts, state and all."""
    torch.manual_seed(0)
    network = Recurrent(cell, inputs=2, hidden=4, layers=2).double()
    x = torch.randn(3, 5, 2).double()
    state = torch.randn(3, 2, network.state_size).double()
    whole, after = network(x, state)
    assert whole.shape == (3, 5, 4)
    assert after.shape == state.shape
    parts = [network(x[rows], state[rows]) for rows in (slice(0, 2), slice(2, 3))]
    torch.testing.assert_close(torch.cat([outputs for outputs, _ in parts]), whole)
    torch.testing.assert_close(torch.cat([states for _, states in parts]), after)


@pytest.mark.parametrize("cell", CELLS)
def test_a_state_handed_on_is_one_long_sequence(cell: Cell) -> None:
    torch.manual_seed(0)
    network = Recurrent(cell, inputs=2, hidden=4, layers=2).double()
    x = torch.randn(3, 9, 2).double()
    whole, after = network(x)
    first, state = network(x[:, :4])
    second, handed_on = network(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(handed_on, after)


def test_the_forecaster_knows_the_month_only_if_it_is_told() -> None:
    torch.manual_seed(0)
    values = torch.full((1, 14), 200.0)
    for month in (True, False):
        model = Forecaster("gru", 8, 1, 0.0, month=month)
        january, july = (model(values, torch.full((1, 14), number)) for number in (0, 6))
        assert january.shape == (1, 14)
        assert torch.equal(january, july) != month


def test_the_character_model_says_a_chance_for_each_symbol() -> None:
    model = CharacterModel("lstm", symbols=9, hidden=8, layers=2, dropout=0.0)
    logits, state = model(torch.zeros(2, 5, dtype=torch.int64))
    assert logits.shape == (2, 5, 9)
    assert state.shape == (2, 2, 16)

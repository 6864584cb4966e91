"""Recurrent networks whose hidden state is batch-first, so that whatever splits a batch splits the state with it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

Cell = Literal["hand", "rnn", "lstm", "gru"]
CELLS: tuple[Cell, ...] = ("hand", "rnn", "lstm", "gru")


class HandRnn(nn.Module):
    """Elman's network (1990) written out: h[t] = tanh(W x[t] + U h[t-1] + b), one layer on another.

    What ``torch.nn.RNN`` computes, so that the loop over time can be read.
    """

    def __init__(self, inputs: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        sizes = [inputs] + [hidden] * (layers - 1)
        self.from_input = nn.ModuleList(nn.Linear(size, hidden) for size in sizes)
        self.from_hidden = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in sizes)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [batch, time, inputs], ``state`` [layers, batch, hidden] -> outputs, the state after the last."""
        last = []
        for from_input, from_hidden, hidden in zip(self.from_input, self.from_hidden, state, strict=True):
            outputs = []
            for now in from_input(x).unbind(1):
                hidden = torch.tanh(now + from_hidden(hidden))
                outputs.append(hidden)
            x = torch.stack(outputs, dim=1)
            last.append(hidden)
        return x, torch.stack(last)


class Recurrent(nn.Module):
    """One of the cells over a sequence, with one tensor as its state: ``[batch, layers, state_size]``.

    ``DataParallel`` splits every argument on dim 0; torch's own cells have the batch of their state on dim 1,
    even with ``batch_first``, and would get the layers split. An LSTM's two states stand side by side.

    >>> network = Recurrent("lstm", inputs=3, hidden=8, layers=2)
    >>> outputs, state = network(torch.zeros(5, 7, 3))
    >>> tuple(outputs.shape), tuple(state.shape)
    ((5, 7, 8), (5, 2, 16))
    """

    def __init__(self, cell: Cell, inputs: int, hidden: int, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.cell, self.layers, self.state_size = cell, layers, hidden * (2 if cell == "lstm" else 1)
        self.network: nn.Module
        if cell == "hand":
            self.network = HandRnn(inputs, hidden, layers)
        else:
            between = (
                dropout if layers > 1 else 0.0
            )  # torch warns of dropout that falls between no two layers
            kind = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[cell]
            self.network = kind(inputs, hidden, layers, batch_first=True, dropout=between)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``x`` [batch, time, inputs] -> outputs [batch, time, hidden] and the state after the last time."""
        if isinstance(self.network, nn.RNNBase):
            self.network.flatten_parameters()  # a replica's weights are copies that lie apart
        if state is None:
            state = x.new_zeros(len(x), self.layers, self.state_size)
        given = state.transpose(0, 1).contiguous()
        if self.cell == "lstm":
            hidden, memory = (part.contiguous() for part in given.chunk(2, dim=-1))
            outputs, (hidden, memory) = self.network(x, (hidden, memory))
            after = torch.cat([hidden, memory], dim=-1)
        else:
            outputs, after = self.network(x, given)
        return outputs, after.transpose(0, 1)


class Forecaster(nn.Module):
    """What follows each value of a monthly series, in logarithms: ``values, months`` [n, time] -> [n, time].

    ``months`` are those of the values that follow. What is learnt is the change of the logarithm: growth in per
    cent, so that years with many passengers are like those with few.
    """

    def __init__(self, cell: Cell, hidden: int, layers: int, dropout: float, *, month: bool) -> None:
        super().__init__()
        self.month = month
        self.recurrent = Recurrent(cell, 3 if month else 1, hidden, layers, dropout)
        self.change = nn.Linear(hidden, 1)

    def forward(self, values: Tensor, months: Tensor) -> Tensor:
        logs = values.float().log()
        features = [4 * (logs - logs.mean(dim=1, keepdim=True))]
        if self.month:  # December and January are neighbours on a circle
            angles = 2 * math.pi / 12 * months
            features += [torch.sin(angles), torch.cos(angles)]
        outputs, _ = self.recurrent(torch.stack(features, dim=-1))
        following: Tensor = logs + 0.1 * self.change(outputs)[..., 0]
        return following


class CharacterModel(nn.Module):
    """``numbers`` [n, time], state -> logits of the characters that follow [n, time, symbols], the state after."""

    def __init__(self, cell: Cell, symbols: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, 64)
        self.dropout = nn.Dropout(dropout)
        self.recurrent = Recurrent(cell, 64, hidden, layers, dropout)
        self.logits = nn.Linear(hidden, symbols)

    def forward(self, numbers: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs, after = self.recurrent(self.dropout(self.embedding(numbers)), state)
        return self.logits(self.dropout(outputs)), after

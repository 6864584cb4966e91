"""Positions of each step, after a kill too."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from phalanx.dist import ShardLoader
from phalanx.recipes.ledger import Ledger


def _data(items: int) -> TensorDataset:
    x = torch.linspace(-3, 5, items)
    return TensorDataset(x, (torch.arange(items) % 3 > 0).long())


def test_the_ledger_survives_a_line_that_was_cut_short(tmp_path: Path) -> None:
    loader = ShardLoader(_data(10), global_batch_size=4, micro_batch_size=2, shuffle=True)
    path = tmp_path / "ledger" / "rank-0.jsonl"
    for _ in range(2):
        ledger = Ledger(str(path.parent), rank=0)
        for _ in loader:
            ledger.note(loader)
        ledger.close()
        with path.open("a") as file:
            file.write('{"epoch": 0, "st')
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [(line["epoch"], line["step"], line["positions"]) for line in lines] == [
        (0, 1, [0, 1, 2, 3]), (0, 2, [4, 5, 6, 7]), (0, 3, [8, 9]),
        (1, 4, [0, 1, 2, 3]), (1, 5, [4, 5, 6, 7]), (1, 6, [8, 9]),
    ]  # fmt: skip

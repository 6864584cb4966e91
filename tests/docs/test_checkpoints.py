"""The manual's page on checkpoints: its examples run, one after the other, and print what it shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.dist import (
    CheckpointManager,
    ShardLoader,
    consolidate_weights,
    load_state_dict,
    match_state_dict,
    parallelize,
)
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


def test_the_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    train_loader = ShardLoader(data, global_batch_size=8, shuffle=True)
    model, optimizer, _ = parallelize(nn.Linear(3, 2), torch.optim.Adam, loader=train_loader)
    names: dict[str, Any] = {
        "CheckpointManager": CheckpointManager,
        "consolidate_weights": consolidate_weights,
        "load_state_dict": load_state_dict,
        "match_state_dict": match_state_dict,
        "safetensors": safetensors,
        "torch": torch,
        "train_loader": train_loader,
        "model": model,
        "optimizer": optimizer,
        "loss_fn": nn.CrossEntropyLoss(),
        "epochs": 2,
    }
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 7
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for example in examples:
            exec(compile(example, "docs/checkpoints.md", "exec"), names)
    shown = re.findall(r"```\n(\d.*?)```", PAGE, re.DOTALL)
    assert out.getvalue().endswith(shown[0])
    assert out.getvalue().startswith("2 10 {'epoch_loss': ")
    on_disk = set(os.listdir("checkpoints/step-10"))
    assert on_disk == {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert on_disk <= set(re.findall(r"`([a-z]+\.[a-z]+)`", PAGE))

"""Checkpoints of every format, small, made by the libraries that users make them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer's first step would import it, and it sets a variable of the environment
from torch import nn


class Tied(nn.Module):
    """An embedding whose weights are the output layer's as well, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(x)))  # type: ignore[no-any-return]


def trained() -> tuple[Tied, torch.optim.Optimizer]:
    """A model and an Adam that has taken a step."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tutorial(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What tutorials save."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def write_all(folder: Path) -> dict[str, Path]:
    """One small file per format that is a single file."""
    from safetensors.torch import save_file

    model, optimizer = trained()
    paths = {
        name: folder / name for name in ("zip.pt", "legacy.pt", "bare.pt", "bare.safetensors", "module.pt")
    }
    torch.save(tutorial(model, optimizer), paths["zip.pt"])
    torch.save(tutorial(model, optimizer), paths["legacy.pt"], _use_new_zipfile_serialization=False)
    torch.save(model.state_dict(), paths["bare.pt"])
    save_file({key: value.clone() for key, value in model.state_dict().items()}, paths["bare.safetensors"])
    torch.save(model, paths["module.pt"])
    return paths

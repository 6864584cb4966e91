"""A small run to save and resume: the same model, data and steps for every checkpoint test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.dist.checkpoints import CheckpointManager
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
}


def manager(folder: Path, model: nn.Module, optimizer: Any = None, **options: Any) -> CheckpointManager:
    """A manager of `model` alone, without a loader."""
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    return CheckpointManager(folder, model=model, optimizer=optimizer, **options)


class Run:
    """Model, optimizer, scheduler, loader and manager, as a user's script has them; float64."""

    def __init__(
        self,
        folder: Path,
        optimizer: str = "adam",
        num_items: int = 22,
        strategy: str = "auto",
        **options: Any,
    ) -> None:
        loader_options = {"global_batch_size": 6, "seed": 0, **options.pop("loader_options", {})}
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(num_items, 4, generator=generator, dtype=torch.float64), torch.arange(num_items) % 3
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.loader = ShardLoader(data, shuffle=True, **loader_options)
        self.model, self.optimizer, self.engine = parallelize(
            model, OPTIMIZERS[optimizer], strategy, loader=self.loader
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.checkpoints = CheckpointManager(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            scheduler=self.scheduler,
            **options,
        )

    def step(self, batch: list[torch.Tensor]) -> None:
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def train(self, until: int, save_each: int | None = None) -> None:
        """Steps up to number `until`, from wherever the loader stands."""
        while self.loader.progress.step < until:
            for batch in self.loader:
                self.step(batch)
                if save_each and self.loader.progress.step % save_each == 0:
                    self.checkpoints.save(note=self.loader.progress.step)
                if self.loader.progress.step >= until:
                    break

    def weights(self) -> list[list[float]]:
        return [parameter.detach().reshape(-1).tolist() for parameter in self.model.parameters()]

"""A run with virtual ranks in which everything is random that can be, and what it leaves, bit by bit."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import Dataset

from phalanx.dist.checkpoints import CheckpointManager
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
}


class Noisy(Dataset[tuple[Tensor, int]]):
    """Small images, flipped, shifted and made noisy at random each time they are read."""

    def __init__(self, num_items: int = 100) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(num_items, 1, 8, 8, generator=generator)
        self.labels = torch.randint(0, 5, (num_items,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image.roll(int(np.random.randint(-2, 3)), -1) + 0.1 * torch.randn(image.shape), self.labels[
            index
        ]


class Net(nn.Module):
    """Convolution, batch norm of both kinds, dropout, and a layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 24)),
        )
        self.norm = nn.BatchNorm1d(24)
        self.sometimes = nn.Linear(24, 5)
        self.never = nn.Linear(24, 5)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        if len(x) > 1:
            features = self.norm(features)
        out: Tensor = self.head(F.dropout(features.relu(), 0.3, self.training))
        return out + self.sometimes(features) if torch.rand(()) < 0.1 else out


class VirtualRun:
    """A user's script: loader, model, engine, and checkpoints where a folder is given."""

    def __init__(
        self,
        virtual_ranks: int,
        folder: Path | None = None,
        *,
        optimizer: str = "adam",
        batch: int = 25,
        micro: int | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.loader = ShardLoader(
            Noisy(), global_batch_size=batch, micro_batch_size=micro, shuffle=True, seed=3
        )
        options = {"max_grad_norm": 1.0, **options}
        self.model, self.optimizer, self.engine = parallelize(
            Net(), OPTIMIZERS[optimizer], virtual_ranks=virtual_ranks, loader=self.loader, **options
        )
        self.losses: list[str] = []
        self.checkpoints: CheckpointManager | None = None
        if folder is not None:
            self.checkpoints = CheckpointManager(
                folder, model=self.model, optimizer=self.optimizer, loader=self.loader, every_steps=1
            )
            self.checkpoints.restore()

    def train(self, until: int, killed_at: int | None = None) -> None:
        """Up to this step of the run; or killed within a step, after a virtual rank's backward."""
        loader, engine = self.loader, self.engine
        while loader.progress.step < until:
            for x, y in loader:
                with engine.micro_step():
                    engine.backward(F.cross_entropy(self.model(x), y, reduction="sum"), loader.global_count)
                if loader.progress.step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if not loader.is_last_micro:
                    continue
                info = engine.step()
                self.losses.append(f"{float(info.loss)!r} {info.grad_norm!r}")  # type: ignore[arg-type]
                if self.checkpoints is not None:
                    self.checkpoints.maybe_save()
                if loader.progress.step >= until:
                    break

    def bits(self) -> str:
        """A hash of weights, buffers and the optimizer's state."""
        digest = hashlib.sha256()
        state = dict(self.model.state_dict())
        for number, entries in self.optimizer.state_dict()["state"].items():
            state |= {f"{number}.{name}": value for name, value in entries.items() if value is not None}
        for name, value in sorted(state.items()):
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def run(virtual_ranks: int, steps: int, **options: Any) -> list[Any]:
    """Losses of all steps and the bits at the end."""
    made = VirtualRun(virtual_ranks, **options)
    made.train(steps)
    return [made.losses, made.bits()]

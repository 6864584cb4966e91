"""Training runs for the tests of engines: one net, one set of data, weights to compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from phalanx.dist.engines.engine import Engine
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize

NUM_ITEMS, BATCH = 53, 10  # the last step has 3 samples: on 4 ranks one has none


def net(dtype: torch.dtype = torch.float64, *, batch_norm: bool = False) -> nn.Sequential:
    """A small classifier, the same on every call."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    if batch_norm:
        layers.insert(1, nn.BatchNorm1d(16))
    return nn.Sequential(*layers).to(dtype)


def data(dtype: torch.dtype = torch.float64, num_items: int = NUM_ITEMS) -> TensorDataset:
    """Samples and classes, the same on every call."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_items, 5, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, 3, (num_items,), generator=generator))


def sgd(params: Any) -> SGD:
    return SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> Adam:
    return Adam(params, lr=1e-2)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a sharded tensor all of it. Collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def weights(engine: Engine) -> list[float]:
    """All weights in one list. Collective."""
    state = engine.export()["model"]
    params = [name for name, _ in engine.unwrap().named_parameters()]
    return torch.cat([state[name].detach().double().reshape(-1) for name in params]).tolist()


def train(engine: Engine, loader: ShardLoader, *, epochs: int = 2, plain: bool = False) -> int:
    """Train on every batch of so many epochs, by the engine or in a plain loop; the number of steps."""
    steps = 0
    for _ in range(epochs):
        for x, y in loader:
            if plain:
                loss = F.cross_entropy(engine.model(x), y)
                engine.optimizer.zero_grad()
                loss.backward()
                engine.optimizer.step()
                steps += 1
                continue
            with engine.micro_step():
                engine.backward(F.cross_entropy(engine.model(x), y, reduction="sum"), loader.global_count)
            if loader.is_last_micro:
                engine.step()
                steps += 1
    return steps


def run(
    strategy: str,
    make: Any = sgd,
    *,
    dtype: torch.dtype = torch.float64,
    batch_norm: bool = False,
    micro: int | None = None,
    plain: bool = False,
    epochs: int = 2,
    **options: Any,
) -> tuple[Engine, list[float]]:
    """Make engine and loader, train, and give the weights. Collective."""
    loader = ShardLoader(data(dtype), global_batch_size=BATCH, micro_batch_size=micro, shuffle=True)
    model = net(dtype, batch_norm=batch_norm)
    optimizer = make(model.parameters()) if isinstance(make, type(sgd)) else make
    *_, engine = parallelize(model, optimizer, strategy, loader=loader, **options)
    train(engine, loader, epochs=epochs, plain=plain)
    return engine, weights(engine)


def reference(
    make: Any = sgd,
    *,
    dtype: torch.dtype = torch.float64,
    batch_norm: bool = False,
    epochs: int = 2,
    clip: float | None = None,
) -> list[float]:
    """The weights of one process with a loop that owes nothing to us."""
    loader = ShardLoader(data(dtype), global_batch_size=BATCH, shuffle=True)
    model = net(dtype, batch_norm=batch_norm)
    optimizer: Optimizer = make(model.parameters())
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).tolist()

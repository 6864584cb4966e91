"""Do all engines train the same weights as one process?

    python benchmarks/engine_agreement.py                      ddp, fsdp, accelerate and deepspeed on 2 and 4 ranks
    python benchmarks/engine_agreement.py --ranks 2 --strategies fsdp --steps 10 --json

*ddp, fsdp, accelerate*: a network with batch norm (over all ranks' batches) in fp64, without dropout, 50 steps of SGD with momentum and of
Adam, 30 samples a step shared unevenly by 4 ranks, with an uneven last step in each epoch: the relative norm of the difference to the
weights of ``single``, in a loop that owes nothing to phalanx but the order of the samples.

*deepspeed*, ZeRO 0 to 3: a network without batch norm in fp32, clipping off: the first step's gradients, and the weights after 10
steps, beside the same loop in fp32. In fp32 the order of sums alone moves Adam's weights by 0.1 behind a batch norm, so that is not judged.

On gloo, on the CPU. Ends with 1 when a limit is missed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from conditions import arguments, conditions, in_words, told_as_json
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from phalanx.dist.engines.engine import Engine
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.membership import single_world
from phalanx.dist.parallel import parallelize
from phalanx.dist.world import init_world

STRATEGIES = ("ddp", "fsdp", "accelerate", "deepspeed")
STEPS, ZERO_STEPS, GLOBAL_BATCH, NUM_ITEMS = 50, 10, 30, 250
LIMITS = {"weights": 1e-8, "zero_gradients": 1e-6, "zero_weights": 1e-5}
OPTIMIZERS: dict[str, Any] = {"sgd": partial(SGD, lr=0.05, momentum=0.9), "adam": partial(Adam, lr=1e-2)}


def network(dtype: torch.dtype, *, batch_norm: bool) -> nn.Sequential:
    """Convolutions and linear layers, the same weights on every call."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(8), nn.BatchNorm1d(32)] if batch_norm else [nn.Identity(), nn.Identity()]
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), norms[0], nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(8 * 16, 32), norms[1], nn.Tanh(), nn.Linear(32, 10)),
    ).to(dtype)


def samples(dtype: torch.dtype) -> TensorDataset:
    """Noise images and classes, the same on every call."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_ITEMS, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), torch.randint(0, 10, (NUM_ITEMS,), generator=generator))


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def _distance(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())


def bare(optimizer: str, dtype: torch.dtype, steps: int, *, batch_norm: bool) -> tuple[Tensor, Tensor]:
    """The first step's gradients and the last weights of one process."""
    model = network(dtype, batch_norm=batch_norm)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    alone = single_world("cpu")  # whatever group there is
    loader = ShardLoader(samples(dtype), global_batch_size=GLOBAL_BATCH, shuffle=True, world=alone)
    first, done = None, 0
    while done < steps:
        for x, y in loader:
            stepper.zero_grad()
            F.cross_entropy(model(x), y).backward()
            first = _flat(param.grad for param in model.parameters()) if first is None else first
            stepper.step()
            done += 1
            if done == steps:
                break
    assert first is not None
    return first, _flat(model.parameters())


def by_engine(
    strategy: str, optimizer: str, dtype: torch.dtype, steps: int, **options: Any
) -> tuple[Tensor | None, Tensor]:
    """The same by an engine; gradients for deepspeed alone. Collective."""
    batch_norm = strategy != "deepspeed"
    loader = ShardLoader(samples(dtype), global_batch_size=GLOBAL_BATCH, shuffle=True)
    model, _, engine = parallelize(
        network(dtype, batch_norm=batch_norm),
        OPTIMIZERS[optimizer],
        strategy,
        loader=loader,
        sync_batch_norm=batch_norm,
        **options,
    )
    first, done = None, 0
    while done < steps:
        for x, y in loader:
            with engine.micro_step():
                engine.backward(F.cross_entropy(model(x), y, reduction="sum"), loader.global_count)
            if first is None and strategy == "deepspeed":
                first = _zero_gradients(engine)
            engine.step()
            done += 1
            if done == steps:
                break
    state = engine.export()["model"]
    return first, _flat(state[name] for name, _ in engine.unwrap().named_parameters())


def _zero_gradients(engine: Engine) -> Tensor:
    from deepspeed.utils import safe_get_full_grad

    grads = [
        param.grad if param.grad is not None else safe_get_full_grad(param)
        for param in engine.unwrap().parameters()
    ]
    return _flat(grads)


def _rank_main(rank: int, ranks: int, port: int, strategies: list[str], steps: int, path: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    init_world(device="cpu")
    rows = []
    for strategy in strategies:
        for optimizer in OPTIMIZERS:
            if strategy == "deepspeed":
                for stage in range(4):
                    number = min(steps, ZERO_STEPS)
                    first, last = by_engine(strategy, optimizer, torch.float32, number, zero_stage=stage)
                    theirs, weights = bare(optimizer, torch.float32, number, batch_norm=False)
                    assert first is not None
                    rows.append(
                        [
                            f"ZeRO {stage}",
                            optimizer,
                            number,
                            _distance(first, theirs),
                            _distance(last, weights),
                        ]
                    )
                continue
            options = {"blocks": (nn.Linear, nn.Conv2d)} if strategy == "fsdp" else {}
            _, last = by_engine(strategy, optimizer, torch.float64, steps, **options)
            _, weights = bare(optimizer, torch.float64, steps, batch_norm=True)
            rows.append([strategy, optimizer, steps, None, _distance(last, weights)])
    if rank == 0:
        with open(path, "w") as file:
            json.dump(rows, file)


def measure(ranks: int, strategies: list[str], steps: int) -> list[dict[str, Any]]:
    """One row for each strategy and optimizer."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.json"
        mp.spawn(_rank_main, (ranks, port, strategies, steps, path), nprocs=ranks)
        with open(path) as file:
            rows = json.load(file)
    names = ("engine", "optimizer", "steps", "first_gradients", "weights")
    return [{"ranks": ranks, **dict(zip(names, row, strict=True))} for row in rows]


def within(row: dict[str, Any]) -> bool:
    """Whether a row keeps its limits."""
    if row["first_gradients"] is None:
        return bool(row["weights"] <= LIMITS["weights"])
    return bool(
        row["first_gradients"] <= LIMITS["zero_gradients"] and row["weights"] <= LIMITS["zero_weights"]
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    missing = [
        name for name in options.strategies if name in ("accelerate", "deepspeed") and find_spec(name) is None
    ]
    strategies = [name for name in options.strategies if name not in missing]
    rows = [row for ranks in options.ranks for row in measure(ranks, strategies, options.steps)]
    result = {
        "rows": rows,
        "limits": LIMITS,
        "not_installed": missing,
        **conditions("torch", "python", "cores", "machine"),
    }
    if not told_as_json(result, options):
        print(
            "ranks  engine      optimizer  steps  first gradients     weights   (relative norm of the difference to one process)"
        )
        for row in rows:
            first = "-" if row["first_gradients"] is None else f"{row['first_gradients']:.1e}"
            said = "" if within(row) else "   over its limit"
            print(
                f"{row['ranks']:5}  {row['engine']:10}  {row['optimizer']:9}  {row['steps']:5}  {first:>15}  {row['weights']:10.1e}{said}"
            )
        if missing:
            print(f"left out, not installed: {', '.join(missing)}")
        print(
            f"limits: {LIMITS['weights']:.0e}; ZeRO {LIMITS['zero_gradients']:.0e} and {LIMITS['zero_weights']:.0e}. "
            f"{in_words(result)}, 1 run"
        )
    return int(not all(map(within, rows)))


if __name__ == "__main__":
    sys.exit(main())

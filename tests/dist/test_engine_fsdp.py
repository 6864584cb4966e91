"""The fsdp engine, on gloo: the weights of one process, and what it refuses."""

from __future__ import annotations

import copy
import doctest
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from phalanx.dist.engines import fsdp
from phalanx.dist.engines.fsdp import FSDPEngine, find_blocks
from phalanx.dist.engines.single import SingleEngine
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.wrappers import unwrap
from tests.dist import engine_runs as runs
from tests.ranks import RankRunner

# name: how it trains, and the reference that it must equal
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain adam": ({"make": runs.adam, "plain": True}, {"make": runs.adam}),
    "accumulate": ({"make": runs.adam, "micro": 2}, {"make": runs.adam}),
    "blocks": ({"blocks": nn.Linear}, {}),
    "blocks, kept gathered": ({"blocks": (nn.Linear,), "reshard_after_forward": False, "micro": 2}, {}),
    "clip": ({"plain": True, "max_grad_norm": 0.5}, {"clip": 0.5}),
    "clip by the engine": ({"blocks": nn.Linear, "max_grad_norm": 0.5}, {"clip": 0.5}),
    "sync batch norm": ({"batch_norm": True, "sync_batch_norm": True, "plain": True}, {"batch_norm": True}),
}


def _cases(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (options, _) in CASES.items():
        engine, found[name] = runs.run("fsdp", **options)
        assert isinstance(engine, FSDPEngine)
        params = list(engine.model.parameters())
        assert all(isinstance(param, DTensor) for param in params)
        if world_size == 2:
            assert sum(p.to_local().numel() for p in params) < sum(p.numel() for p in params)
    if world_size == 2:
        found["precision"] = _precisions(rank)
        found["compiled"] = [_compiled("before"), _compiled("after")]
    return found


def _precisions(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for precision in ("bf16", "fp16"):
        for batch_norm in (False, True):
            engine, values = runs.run(
                "fsdp",
                dtype=torch.float32,
                batch_norm=batch_norm,
                sync_batch_norm=batch_norm,
                precision=precision,
                blocks=nn.Linear,
                max_grad_norm=100.0,
            )
            assert next(engine.model.parameters()).dtype == torch.float32
            assert engine.model(torch.ones(2, 5)).dtype == torch.float32
            found[f"{precision} {batch_norm}"] = values
    # One rank's overflow must skip the step on every rank.
    for step in range(2):
        x = torch.ones(4, 5)
        with engine.micro_step(last=True):
            loss = engine.model(x).square().sum()
            engine.backward(loss * float("inf") if step == 0 and rank == 1 else loss, 8)
        found[f"skipped {step}"] = engine.step().skipped
    return found


def _compiled(when: str) -> list[float]:
    model: nn.Module = runs.net()
    plain = model
    if when == "before":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    loader = ShardLoader(runs.data(), global_batch_size=runs.BATCH, shuffle=True)
    model, _, engine = parallelize(model, runs.sgd(model.parameters()), "fsdp", loader=loader)
    assert unwrap(model) is plain
    if when == "after":
        engine.model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    runs.train(engine, loader, plain=True)
    return runs.weights(engine)


@pytest.fixture(scope="module")
def references() -> dict[str, list[float]]:
    return {name: runs.reference(**options) for name, (_, options) in CASES.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_weights_are_those_of_one_process(
    run_ranks: RankRunner, references: dict[str, list[float]], world_size: int
) -> None:
    for found in run_ranks(_cases, world_size=world_size, timeout_s=120):
        for name, expected in references.items():
            assert found[name] == pytest.approx(expected, rel=0, abs=1e-9), name
        if world_size > 2:
            continue
        for compiled in found["compiled"]:
            assert compiled == pytest.approx(runs.reference(), rel=0, abs=1e-9)
        precision = found["precision"]
        assert precision["skipped 0"] is True
        assert precision["skipped 1"] is False
        expected = runs.reference(dtype=torch.float32)
        for name in ("bf16 False", "fp16 False"):
            assert precision[name] == pytest.approx(expected, rel=0, abs=0.05), name
            assert precision[name] != pytest.approx(expected, rel=0, abs=1e-6), name


# ---- states, optimizers, stand-ins


def _state(engine: Any) -> dict[str, Any]:
    return copy.deepcopy(engine.export())


def _many(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    loader = ShardLoader(runs.data(), global_batch_size=runs.BATCH, shuffle=True)
    model = runs.net()
    optimizer = runs.adam(model.parameters())
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    model, given, engine = parallelize(model, optimizer, "fsdp", loader=loader)
    found["same optimizer"] = given is optimizer and engine.optimizer is optimizer
    runs.train(engine, loader, epochs=1)
    scheduler.step()
    saved = _state(engine)
    found["keys"] = list(saved["model"])
    found["whole"] = [
        tuple(saved["model"]["0.weight"].shape),
        tuple(saved["optimizer"]["state"][0]["exp_avg"].shape),
    ]
    found["lr"] = saved["optimizer"]["param_groups"][0]["lr"]
    at = loader.state_dict()
    runs.train(engine, loader, epochs=1)
    after = runs.weights(engine)
    engine.load(saved)
    loader.load_state_dict(at)
    runs.train(engine, loader, epochs=1)
    found["resumed"] = runs.weights(engine) == after

    # not inside a step, neither through the engine nor around it
    loss = model(torch.ones(2, 5, dtype=torch.float64)).sum()
    for load in (lambda: engine.load(saved), lambda: model.load_state_dict(model.state_dict())):
        with pytest.raises(RuntimeError, match="inside a step"):
            load()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) inside a step"):
        model.load_state_dict(model.state_dict())
    optimizer.step()
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        model(torch.ones(2, 5, dtype=torch.float64))
    engine.load(saved)

    with pytest.warns(UserWarning, match="parallel already"):
        again = parallelize(model, optimizer, "fsdp")
    found["again"] = again == (model, optimizer, engine)

    # a model that the user has sharded
    own = runs.net()
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(own, mesh=mesh)
    with pytest.warns(UserWarning, match="sharded by fully_shard already"):
        _, _, theirs = parallelize(own, SGD)
    found["own"] = type(theirs).__name__
    old = runs.net()
    stale = SGD(old.parameters(), lr=0.1)
    fully_shard(old, mesh=mesh)
    with pytest.raises(ValueError, match="not the model's"), pytest.warns(UserWarning, match="sharded by"):
        parallelize(old, stale)
    lbfgs = runs.net()
    with pytest.raises(ValueError, match="LBFGS keeps parameters in _params"):
        parallelize(lbfgs, torch.optim.LBFGS(lbfgs.parameters()), "fsdp")
    with pytest.raises(ValueError, match=r"blocks=Conv2d: the model has no such submodule"):
        parallelize(runs.net(), SGD, "fsdp", blocks=nn.Conv2d)
    *_, lost = parallelize(runs.net(), SGD, "fsdp")
    with lost.micro_step(last=False):
        lost.backward(lost.model(torch.ones(2, 5, dtype=torch.float64)).sum(), 4)
    with pytest.raises(RuntimeError, match="no micro step was the last one"):
        lost.step()
    found["nan"] = _nan_stand_in()
    found["unused"] = _unused()
    found["tokens"] = _tokens(rank)
    return found


def _nan_stand_in() -> list[list[float]]:
    """1 sample on 2 ranks; the loss of the rank without any is NaN."""
    found = []
    for plain in (True, False):
        loader = ShardLoader(TensorDataset(runs.data().tensors[0][:1]), global_batch_size=1, shuffle=True)
        model, optimizer, engine = parallelize(runs.net(), runs.sgd, "fsdp", loader=loader)
        (x,) = next(iter(loader))
        poison = float("nan") if loader.local_count == 0 else 1.0
        if plain:
            (model(x).square().sum(1).mean() * poison).backward()
            optimizer.step()
        else:
            with engine.micro_step():
                engine.backward(model(x).square().sum() * poison, loader.global_count)
            engine.step()
        found.append(runs.weights(engine))
    return found


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.unused = nn.Linear(2, 1)
        self.sometimes = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.used(x) + (self.sometimes(x) if both else 0)


def _unused() -> list[Any]:
    rank = dist.get_rank()
    found = []
    for flag in (False, True):
        torch.manual_seed(0)
        model, optimizer, engine = parallelize(_Branch(), runs.sgd, "fsdp", find_unused_parameters=flag)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(1, 2), not flag or rank == 0).sum().backward()
                optimizer.step()
        found.append([str(w.message).split(". ")[0] for w in caught if "got no gradient" in str(w.message)])
    found.append(engine.export()["model"]["sometimes.bias"].item())
    return found


def _tokens(rank: int) -> list[float]:
    """10 tokens of sum 20 on rank 0, 30 tokens of sum 30 on rank 1."""
    model, _, engine = parallelize(nn.Linear(1, 1, bias=False), lambda p: SGD(p, lr=1.0), "fsdp")
    count, total = (10, 20.0) if rank == 0 else (30, 30.0)
    before = runs.weights(engine)[0]
    with engine.micro_step():
        engine.backward(model(torch.full((count, 1), total / count)).sum(), 40)
    engine.step()
    return [before - runs.weights(engine)[0]]


def test_states_refusals_and_weights_of_samples(run_ranks: RankRunner) -> None:
    first, second = run_ranks(_many, world_size=2, timeout_s=120)
    assert first == second
    assert first["same optimizer"] is True
    assert first["keys"] == list(runs.net().state_dict())
    assert first["whole"] == [(16, 5), (16, 5)]
    assert first["lr"] == 0.5e-2
    assert first["resumed"] is True
    assert first["again"] is True
    assert first["own"] == "FSDPEngine"
    model = runs.net()
    model(runs.data().tensors[0][:1]).square().sum(1).mean().backward()
    runs.sgd(model.parameters()).step()
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    for weights in first["nan"]:
        assert weights == pytest.approx(expected, rel=0, abs=1e-12)
    named, quiet, moved = first["unused"]
    assert named == ["2 of 6 parameters got no gradient: unused.weight, unused.bias"]
    assert quiet == []
    torch.manual_seed(0)
    assert moved != _Branch().sometimes.bias.item()
    assert first["tokens"] == [pytest.approx(1.25)]


# ---- one process


def test_one_process_gets_its_own_model_back() -> None:
    model = runs.net()
    same, _, engine = parallelize(model, runs.sgd, "fsdp", blocks=nn.Linear)
    assert same is model
    assert type(engine) is SingleEngine
    assert not isinstance(model, FSDPModule)
    with pytest.raises(ValueError, match="'block'; did you mean 'blocks'"):
        parallelize(model, runs.sgd, "fsdp", block=nn.Linear)


def test_blocks() -> None:
    assert doctest.testmod(fsdp, extraglobs={"nn": nn}).failed == 0
    big = nn.Linear(1000, 1000)
    inner = nn.ModuleList([nn.Sequential(big, nn.ReLU()), nn.Linear(2, 2)])
    model = nn.ModuleDict({"blocks": inner, "head": nn.Linear(1000, 1000)})
    assert find_blocks(model) == [inner[0]]  # outermost, large enough, in a list
    model["head"].weight = big.weight
    assert find_blocks(model) == []  # tied with a part outside
    assert find_blocks(model, nn.ReLU) == [inner[0][1]]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_gpus(run_ranks: RankRunner, precision: str) -> None:
    first, second = run_ranks(_on_gpus, precision, world_size=2, backend=None, environ=_variables)
    assert first == second
    assert first[-1] < first[0]


def _variables(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533",
    }  # fmt: skip


def _on_gpus(rank: int, world_size: int, precision: str) -> list[float]:
    from phalanx.dist.world import all_reduce_sum, init_world

    world = init_world()
    loader = ShardLoader(runs.data(torch.float32), global_batch_size=runs.BATCH, shuffle=True)
    model, _, engine = parallelize(
        runs.net(torch.float32),
        runs.adam,
        "fsdp",
        loader=loader,
        precision=precision,
        blocks=nn.Linear,
        max_grad_norm=1.0,
    )  # type: ignore[arg-type]
    losses = []
    for _ in range(10):
        total = 0.0
        for x, y in loader:
            assert x.device == world.device
            with engine.micro_step():
                loss = F.cross_entropy(model(x), y, reduction="sum")
                engine.backward(loss, loader.global_count)
            engine.step()
            total += float(loss) if loader.local_count else 0.0
        losses.append(float(all_reduce_sum(total)))
    return losses

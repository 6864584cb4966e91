"""SyncBatchNorm: one process's batch norm over the batches of all ranks, there and back."""

from __future__ import annotations

import copy
import doctest
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.dist import sync_batch_norm
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from tests.dist import engine_runs as runs
from tests.ranks import RankRunner


def _images(num_items: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_items, 2, 4, 4, generator=generator, dtype=torch.float64) * 3 + 100


def _conv(momentum: float | None = 0.1, affine: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, momentum=momentum, affine=affine),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 2),
    ).double()


def _layer(rank: int, world_size: int, momentum: float | None, affine: bool) -> list[Any]:
    """Uneven batches by hand: outputs, gradients of the inputs, statistics."""
    model = convert_sync_batchnorm(_conv(momentum, affine))
    found: list[Any] = []
    for step in range(2):
        x = _images(9)[step:][rank::world_size].clone().requires_grad_()
        out = model(x)
        out.square().sum().backward()
        found.append([out.tolist(), x.grad.tolist()])
    norm = model[1]
    found.append([norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)])
    model.eval()
    found.append(model(x.detach()).tolist())  # no collective: one rank may evaluate alone
    return found


def _layers(rank: int, world_size: int) -> list[Any]:
    return [_layer(rank, world_size, *options) for options in ((0.1, True), (None, False))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_outputs_gradients_and_statistics(run_ranks: RankRunner, world_size: int) -> None:
    every = run_ranks(_layers, world_size=world_size)
    for number, options in enumerate(((0.1, True), (None, False))):
        model = _conv(*options)
        for step in range(2):
            x = _images(9)[step:].clone().requires_grad_()
            out = model(x)
            out.square().sum().backward()
            for rank in range(world_size):
                mine, gradient = every[rank][number][step]
                assert torch.tensor(mine, dtype=torch.float64).allclose(
                    out[rank::world_size], rtol=0, atol=1e-10
                )
                assert torch.tensor(gradient, dtype=torch.float64).allclose(
                    x.grad[rank::world_size], rtol=0, atol=1e-10
                )
        norm = model[1]
        for rank in range(world_size):
            mean, var, tracked = every[rank][number][2]
            assert mean == pytest.approx(norm.running_mean.tolist(), abs=1e-10)
            assert var == pytest.approx(norm.running_var.tolist(), abs=1e-10)
            assert tracked == 2


def _train(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "plain": {"plain": True},
        "accumulate": {"micro": 5},
        "compiled": {"plain": True, "compiled": True},
    }.items():
        loader = ShardLoader(
            runs.data(), global_batch_size=runs.BATCH, shuffle=True, micro_batch_size=options.get("micro")
        )
        model = runs.net(batch_norm=True)
        model, _, engine = parallelize(
            model, runs.sgd(model.parameters()), "ddp", loader=loader, sync_batch_norm=True
        )
        if options.get("compiled"):
            engine.model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        runs.train(engine, loader, plain=options.get("plain", False))
        norm = engine.unwrap()[1]
        found[name] = [runs.weights(engine), norm.running_mean.tolist(), norm.running_var.tolist()]
    found["stand-in"] = _stand_in()
    # fp32 and bf16, where sums are in fp32
    for precision in ("fp32", "bf16"):
        found[precision] = runs.run(
            "ddp", dtype=torch.float32, batch_norm=True, sync_batch_norm=True, plain=True, precision=precision
        )[1]
    model = nn.Sequential(nn.BatchNorm1d(2))
    with (
        pytest.raises(ValueError, match="the model is wrapped already"),
        pytest.warns(UserWarning, match="wrapped in"),
    ):
        parallelize(nn.parallel.DistributedDataParallel(model), runs.sgd, sync_batch_norm=True)
    with pytest.raises(ValueError, match="the model is a batch norm itself"):
        parallelize(nn.BatchNorm1d(2), runs.sgd, sync_batch_norm=True)
    with pytest.raises(ValueError, match="sync_batch_norm=True with virtual_ranks"):
        parallelize(model, runs.sgd, sync_batch_norm=True, virtual_ranks=world_size)
    return found


def _stand_in() -> list[Any]:
    """2 samples on 3 ranks: the third's stand-in changes neither statistics nor gradients."""
    data = TensorDataset(runs.data().tensors[0][:2])
    loader = ShardLoader(data, global_batch_size=2, shuffle=True)
    model, optimizer, engine = parallelize(
        runs.net(batch_norm=True), runs.sgd, "ddp", loader=loader, sync_batch_norm=True
    )
    (x,) = next(iter(loader))
    (model(x).square().sum(1).mean() * (float("nan") if loader.local_count == 0 else 1.0)).backward()
    optimizer.step()
    norm = engine.unwrap()[1]
    return [runs.weights(engine), norm.running_mean.tolist(), norm.running_var.tolist()]


def test_training_is_that_of_one_process(run_ranks: RankRunner) -> None:
    model = runs.net(batch_norm=True)
    loader = ShardLoader(runs.data(), global_batch_size=runs.BATCH, shuffle=True)
    *_, engine = parallelize(model, runs.sgd, "single", loader=loader)
    runs.train(engine, loader, plain=True)
    expected = [runs.weights(engine), model[1].running_mean.tolist(), model[1].running_var.tolist()]
    alone = runs.net(batch_norm=True)
    optimizer = runs.sgd(alone.parameters())
    alone(runs.data().tensors[0][:2]).square().sum(1).mean().backward()
    optimizer.step()
    stood_in = [
        torch.cat([p.detach().reshape(-1) for p in alone.parameters()]).tolist(),
        alone[1].running_mean.tolist(),
        alone[1].running_var.tolist(),
    ]
    single = runs.reference(dtype=torch.float32, batch_norm=True)
    for found in run_ranks(_train, world_size=3, timeout_s=120):
        for name in ("plain", "accumulate", "compiled"):
            for mine, theirs in zip(found[name], expected, strict=True):
                assert mine == pytest.approx(theirs, rel=0, abs=1e-9), name
        for mine, theirs in zip(found["stand-in"], stood_in, strict=True):
            assert mine == pytest.approx(theirs, rel=0, abs=1e-10)
        assert found["fp32"] == pytest.approx(single, rel=0, abs=1e-3)
        assert found["bf16"] == pytest.approx(single, rel=0, abs=0.1)


def test_there_and_back() -> None:
    """Evaluation and export work without a group, and give the same outputs and statistics."""
    assert doctest.testmod(sync_batch_norm).failed == 0
    model = _conv()
    model(_images(8))
    x, optimizer = _images(4), runs.sgd(model.parameters())
    model.eval()
    expected, keys = model(x), list(model.state_dict())
    ours = convert_sync_batchnorm(copy.deepcopy(model))
    assert isinstance(ours[1], SyncBatchNorm)
    assert torch.equal(ours(x), expected)
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    for synced in (ours, theirs):
        back = revert_sync_batchnorm(synced)
        assert not isinstance(back[1], (SyncBatchNorm, nn.SyncBatchNorm))
        assert not back[1].training
        assert torch.equal(back(x), expected)
        assert list(back.state_dict()) == keys
        assert torch.equal(back[1].running_var, model[1].running_var)
        back.train()
        assert back(x).shape == expected.shape
        pickle.loads(pickle.dumps(back))
    assert type(revert_sync_batchnorm(convert_sync_batchnorm(nn.BatchNorm3d(2)))) is nn.BatchNorm3d
    # parameters stay the same objects, also in one process where it is plain batch norm
    weight = model[1].weight
    convert_sync_batchnorm(model)
    assert model[1].weight is weight
    assert any(param is weight for group in optimizer.param_groups for param in group["params"])
    model.train()
    assert torch.equal(model(_images(8)), model(_images(8)))
    pickle.loads(pickle.dumps(model))
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        SyncBatchNorm(2)(torch.ones(2))


def test_a_copy_takes_no_loader_along() -> None:
    loader = ShardLoader(runs.data(), global_batch_size=4, shuffle=True)
    model = convert_sync_batchnorm(_conv(), loader)
    copied = copy.deepcopy(model)
    assert copied[1].counts._loader is model[1].counts._loader
    assert pickle.loads(pickle.dumps(model))[1].counts.real()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_two_gpus(run_ranks: RankRunner) -> None:
    expected = runs.reference(dtype=torch.float32, batch_norm=True)
    for weights in run_ranks(_on_gpus, world_size=2, backend="cpu:gloo,cuda:nccl"):
        assert weights == pytest.approx(expected, rel=0, abs=1e-3)


def _on_gpus(rank: int, world_size: int) -> list[float]:
    from phalanx.dist.world import init_world

    torch.cuda.set_device(rank)
    init_world()
    return runs.run("ddp", dtype=torch.float32, batch_norm=True, sync_batch_norm=True, plain=True)[1]


def test_a_batch_norm_under_two_names_stays_one() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(2)
            self.second = self.first
            self.block = nn.Sequential(self.first, nn.Linear(2, 2))

    model = convert_sync_batchnorm(Shared())
    assert isinstance(model.second, SyncBatchNorm)
    assert model.first is model.second is model.block[0]
    model = revert_sync_batchnorm(model)
    assert type(model.second) is nn.BatchNorm1d
    assert model.first is model.second is model.block[0]

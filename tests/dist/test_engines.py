"""Engines: precision, clipping, states; what holds in one process and on several ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim import SGD

from phalanx.dist.engines.engine import StepInfo
from phalanx.dist.parallel import parallelize
from tests.ranks import RankRunner


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def _sgd(params: Any) -> SGD:
    return SGD(params, lr=0.1)


def _batch(rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 2, (4,), generator=generator)


# ---- precision


class _Sees(nn.Module):
    """Says the dtype its layer computes in, and gives every kind of output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor, fail: bool = False) -> dict[str, Any]:
        if fail:
            raise KeyError("inside")
        y = self.layer(x)
        self.seen = y.dtype
        return {"y": y, "list": [y, (y, 3)]}


@pytest.mark.parametrize(
    ("precision", "seen"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_forward_runs_in_the_precision_and_returns_fp32(precision: str, seen: torch.dtype) -> None:
    model, _, _ = parallelize(_Sees(), _sgd, precision=precision)  # type: ignore[arg-type]
    out = model(torch.ones(1, 6))
    assert model.seen == seen
    assert out["y"].dtype == out["list"][0].dtype == out["list"][1][0].dtype == torch.float32
    assert out["list"][1][1] == 3
    assert model.layer.weight.dtype == torch.float32
    with pytest.raises(KeyError, match="inside"):
        model(torch.ones(1, 6), fail=True)
    assert not torch.is_autocast_enabled("cpu")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(1, 6))
        assert other.seen == seen
    assert not torch.is_autocast_enabled("cpu")


def _bf16(rank: int, world_size: int) -> list[Any]:
    model, optimizer, _ = parallelize(_net(), _sgd, precision="bf16")
    losses = []
    for _ in range(30):
        x, y = _batch(rank)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return [losses[0], losses[-1], [p.flatten()[0].item() for p in model.parameters()]]


def test_a_plain_loop_trains_in_bf16_on_two_ranks(run_ranks: RankRunner) -> None:
    first, second = run_ranks(_bf16, world_size=2)
    for start, end, _ in (first, second):
        assert end < start
    assert first[2] == second[2]


def _fp16(rank: int, world_size: int) -> list[Any]:
    model, _, engine = parallelize(_net(), _sgd, precision="fp16", max_grad_norm=1e9)
    infos = []
    for step in range(3):
        x, y = _batch(rank)
        with engine.micro_step():
            loss = F.cross_entropy(model(x), y, reduction="sum")
            # One rank's overflow must skip the step on every rank.
            engine.backward(loss * float("inf") if step == 1 and rank == 1 else loss, 4 * world_size)
        infos.append(engine.step())
    state = engine.export()
    return [
        [info.skipped for info in infos],
        infos[0].grad_norm,
        [p.flatten()[0].item() for p in model.parameters()],
        state["scaler"]["scale"],
    ]


def test_fp16_scales_and_skips_on_every_rank(run_ranks: RankRunner) -> None:
    first, second = run_ranks(_fp16, world_size=2)
    assert first == second
    skipped, norm, _, scale = first
    assert skipped == [False, True, False]
    assert scale == 65536.0 / 2
    model = _net()
    x, y = (torch.cat(parts) for parts in zip(_batch(0), _batch(1), strict=True))
    F.cross_entropy(model(x), y).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert norm == pytest.approx(float(expected), rel=1e-2)  # unscaled before it is measured


def test_fp16_refuses_a_plain_step() -> None:
    model, optimizer, _ = parallelize(_net(), _sgd, precision="fp16")
    model(_batch()[0]).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"precision='fp16' with a plain optimizer.step\(\).*\nFix: engine.backward"
    ):
        optimizer.step()


# ---- steps


def test_one_step_in_one_process() -> None:
    model, optimizer, engine = parallelize(_net(), _sgd, max_grad_norm=0.01)
    assert engine.model is model
    assert engine.optimizer is optimizer
    assert engine.unwrap() is model
    before = [p.detach().clone() for p in model.parameters()]
    x, y = _batch()
    with engine.micro_step(key=7):
        drawn = torch.rand(1)
        engine.backward(F.cross_entropy(model(x), y, reduction="sum"), 4)
    info = engine.step()
    assert isinstance(info, StepInfo)
    assert info.grad_norm is not None
    assert info.grad_norm > 0.01
    assert not info.skipped
    moved = torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), before, strict=True)])
    assert moved.norm() == pytest.approx(0.1 * 0.01, rel=1e-4)
    assert all(p.grad is None for p in model.parameters())
    with engine.micro_step(key=7):
        assert torch.equal(torch.rand(1), drawn)


def test_what_backward_refuses() -> None:
    model, _, engine = parallelize(_net(), _sgd)
    out = model(_batch()[0])
    with pytest.raises(ValueError, match=r"not a tensor of shape \(4, 2\)"):
        engine.backward(out, 4)
    with pytest.raises(ValueError, match="global_count=0"):
        engine.backward(out.sum(), 0)


def test_a_micro_batch_in_a_plain_loop_is_refused() -> None:
    class Loader:
        training, local_count, step_local_count, global_count, is_last_micro = False, 2, 4, 4, False

    loader = Loader()
    model, optimizer, _ = parallelize(_net(), _sgd, loader=loader)
    assert loader.training is True
    model(_batch()[0]).sum().backward()
    with pytest.raises(RuntimeError, match="before the step's last micro batch"):
        optimizer.step()
    loader.is_last_micro = True
    optimizer.step()


def test_states_go_out_and_in_between_steps() -> None:
    model, _, engine = parallelize(_net(), lambda p: SGD(p, lr=0.1, momentum=0.9))

    def step() -> None:
        with engine.micro_step():
            engine.backward(model(_batch()[0]).square().sum(), 4)

    step()
    engine.step()
    saved = copy.deepcopy(engine.export())
    step()
    engine.step()
    after = copy.deepcopy(engine.export())
    engine.load(saved)
    step()
    with pytest.raises(RuntimeError, match=r"engine.load\(\) inside a step"):
        engine.load(saved)
    engine.step()
    again = engine.export()
    assert list(saved["model"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(torch.equal(again["model"][key], after["model"][key]) for key in after["model"])


def _exported_keys(rank: int, world_size: int) -> list[Any]:
    _, _, engine = parallelize(_net(), _sgd)
    return [type(engine).__name__, list(engine.export()["model"])]


def test_exported_keys_are_the_users(run_ranks: RankRunner) -> None:
    keys = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert run_ranks(_exported_keys, world_size=2) == [["DDPEngine", keys]] * 2


def _options(rank: int, world_size: int) -> list[Any]:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model, optimizer, _ = parallelize(net, _sgd, bucket_cap_mb=0.01, static_graph=True)
    buckets = 0

    def count(state: object, bucket):
        nonlocal buckets
        buckets += 1
        return default_hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, count)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    return [buckets, model.static_graph]


def test_options_reach_ddp(run_ranks: RankRunner) -> None:
    (buckets, static), _ = run_ranks(_options, world_size=2)
    assert buckets > 3 * 2  # with the default size it would be one a step
    assert static


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_gpu(precision: str) -> None:
    model, optimizer, engine = parallelize(
        _net(), _sgd, precision=precision, max_grad_norm=1.0, device="cuda"
    )  # type: ignore[arg-type]
    assert next(model.parameters()).device.type == "cuda"
    x, y = (tensor.cuda() for tensor in _batch())
    losses = []
    for _ in range(20):
        with engine.micro_step():
            loss = F.cross_entropy(model(x), y, reduction="sum")
            engine.backward(loss, 4)
        assert engine.step().grad_norm is not None
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert optimizer.param_groups[0]["params"][0].device.type == "cuda"

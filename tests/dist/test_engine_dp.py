"""The dp engine: its plan, arguments and outputs on the CPU; the whole on GPUs."""

from __future__ import annotations

import doctest
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DataParallel

from phalanx.dist.engines import dp
from phalanx.dist.engines.dp import choose_devices, count_samples, join, plan_chunks, split
from phalanx.dist.parallel import parallelize
from phalanx.dist.wrappers import unwrap
from tests.dist import engine_runs as runs

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_samples", "num_devices", "sizes"),
    [
        (9, 8, [2, 2, 2, 2, 1]),
        (1, 2, [1]),
        (9, 4, [3, 3, 3]),
        (5, 2, [3, 2]),
        (8, 1, [8]),
    ],
)
def test_the_plan(num_samples: int, num_devices: int, sizes: list[int]) -> None:
    assert plan_chunks(num_samples, num_devices) == sizes


@given(st.integers(1, 500), st.integers(1, 16))
def test_the_plan_is_torchs(num_samples: int, num_devices: int) -> None:
    sizes = plan_chunks(num_samples, num_devices)
    assert sizes == [len(chunk) for chunk in torch.arange(num_samples).chunk(num_devices)]


def test_examples() -> None:
    assert doctest.testmod(dp).failed == 0


Pair = namedtuple("Pair", "x y")


def test_arguments_that_are_no_batch_stay_whole() -> None:
    x, table, pair = torch.arange(6).reshape(3, 2), torch.ones(7), Pair(torch.arange(3), "name")
    args = (x, {"table": table, "pair": pair}, [x, None])
    assert count_samples(args, {}) == 3
    first, second = split(args, 3, [2, 1])
    assert second[0].tolist() == [[4, 5]]
    assert first[1]["table"] is table
    assert isinstance(first[1]["pair"], Pair)
    assert second[1]["pair"].x.tolist() == [2]
    assert second[1]["pair"].y == "name"
    assert first[2][1] is None
    assert len(split({"mask": table}, 3, [2, 1])) == 2  # as many as there are chunks
    assert count_samples((), {"scale": torch.tensor(1.0), "x": [x]}) == 3
    with pytest.raises(ValueError, match="no argument of forward is a tensor with samples"):
        count_samples((torch.tensor(1.0),), {"name": "x"})
    with pytest.raises(ValueError, match="0 samples on 2 devices"):
        plan_chunks(0, 2)


def test_outputs_meet_weighted_by_samples() -> None:
    """batch 5 on 2 GPUs counts 3/5 and 2/5, a loss of 0 dims stays one."""
    outputs = [
        {"loss": torch.tensor(1.0), "y": torch.zeros(3, 2), "pair": Pair([torch.zeros(3)], None)},
        {"loss": torch.tensor(6.0), "y": torch.ones(2, 2), "pair": Pair([torch.ones(2)], None)},
    ]
    joined = join(outputs, [3, 2], CPU)
    assert joined["loss"].item() == pytest.approx(3.0)
    assert joined["loss"].dim() == 0
    assert joined["y"].shape == (5, 2)
    assert isinstance(joined["pair"], Pair)
    assert joined["pair"].x[0].tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(TypeError, match="forward returned a object"):
        join([object(), object()], [1, 1], CPU)


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = runs.net()

    def forward(self, x: torch.Tensor, *, y: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        assert table.shape == (3,)
        return F.cross_entropy(self.net(x) * table, y)


@pytest.mark.parametrize("num_samples", [1, 5, 9])
def test_chunks_together_are_the_whole_batch(monkeypatch: pytest.MonkeyPatch, num_samples: int) -> None:
    """The forward with replicas that share one device, where there is no GPU."""
    model = _WithLoss()
    wrapped = dp.ChunkedDataParallel.__new__(dp.ChunkedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module, wrapped.device_ids, wrapped._dtype = model, list(range(4)), None
    ran = []

    def in_turn(replicas: list[Any], inputs: Any, named: Any, devices: Any) -> list[Any]:
        ran.append((len(replicas), len(inputs), len(named), len(devices)))
        return [each(*args, **kwargs) for each, args, kwargs in zip(replicas, inputs, named, strict=True)]

    monkeypatch.setattr(dp, "parallel_apply", in_turn)
    monkeypatch.setattr(dp, "_to", lambda value, device: value)
    monkeypatch.setattr(wrapped, "replicate", lambda module, ids: [module] * len(ids), raising=False)
    monkeypatch.setattr(dp, "join", lambda outputs, sizes, device: join(outputs, sizes, CPU))
    x, y = (tensor[:num_samples] for tensor in runs.data().tensors)
    table = torch.ones(3, dtype=torch.float64)
    loss = wrapped(x, y=y, table=table)
    loss.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    whole = model(x, y=y, table=table)
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)
    for mine, expected in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, expected.grad, rtol=0, atol=1e-12)
    chunks = len(plan_chunks(num_samples, 4))
    assert ran == ([] if chunks == 1 else [(chunks,) * 4])
    assert unwrap(wrapped) is model


def test_what_is_refused() -> None:
    assert choose_devices(None, 3, 1) == [0, 1, 2]
    assert choose_devices((2, 0), 3, 1) == [2, 0]
    with pytest.raises(ValueError, match="is for one process, and this is one of 2"):
        choose_devices(None, 2, 2)
    with pytest.raises(ValueError, match="3 is none of the visible GPUs"):
        choose_devices([0, 3], 2, 1)
    with pytest.raises(ValueError, match="each GPU counts once"):
        choose_devices([1, 1], 2, 1)
    with pytest.raises(ValueError, match="each GPU counts once"):
        choose_devices([], 2, 1)
    with pytest.raises(ValueError, match="sync_batch_norm=True with strategy='dp'"):
        parallelize(runs.net(), runs.sgd, "dp", sync_batch_norm=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_it_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)the GPUs of this process, and it sees none.*Fix: strategy='auto'"
    ):
        parallelize(runs.net(), runs.sgd, "dp")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_gpus(precision: Any) -> None:
    with pytest.warns(UserWarning, match="strategy='ddp' is faster"):
        model, _, engine = parallelize(
            runs.net(torch.float32),
            runs.sgd,
            "dp",
            precision=precision,
            device_ids=[1, 0],
            max_grad_norm=10.0,
        )
    assert isinstance(model, DataParallel)
    assert {param.device.index for param in model.parameters()} == {1}
    x, y = (tensor.cuda(1) for tensor in runs.data(torch.float32).tensors)
    for size in (1, 5, 53):
        with engine.micro_step():
            output = model(x[:size])
            assert output.dtype == torch.float32
            assert output.device.index == 1
            engine.backward(F.cross_entropy(output, y[:size], reduction="sum"), size)
        assert engine.step().grad_norm is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_gpu_is_the_plain_model() -> None:
    plain = runs.net()
    model, _, engine = parallelize(plain, runs.sgd, "dp", device_ids=[0])
    assert model is plain
    assert type(engine).__name__ == "SingleEngine"

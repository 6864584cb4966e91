"""A traced step is what a real one takes, and what torch's own tracker says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer's first step would import it, and it sets a variable of the environment
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import profile
from torch.nn import functional

from phalanx.tools.fit.building import SmallValues
from phalanx.tools.fit.tracing import Moments, trace_optimizer, trace_step

BATCH = 64


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 700), nn.BatchNorm1d(700), nn.GELU(), nn.Dropout(0.1), nn.Linear(700, 50)
    )  # fmt: skip


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(BATCH, 300), torch.zeros(BATCH, dtype=torch.long)


def real_peak(make: Any) -> int:
    """The most that torch's CPU allocator had given out at one time in a second step."""
    with profile(use_kineto=True, profile_memory=True) as profiler:
        model = network()
        optimizer, (x, y) = make(model.parameters()), batch()
        for _ in range(2):
            mark = torch.zeros(1237)
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            del mark
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    now, history, begin = 0, [], 0
    for number, (_, size) in enumerate(events):
        now += size
        history.append(now)
        begin = number if size == 4 * 1237 else begin
    return max(history[begin:])


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_traced_peak_is_the_measured_one(kind: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return torch.optim.Adam(parameters)

    with FakeTensorMode():
        model, (x, y) = network(), batch()
        step = trace_step(model, (x, y), BATCH, lambda b: functional.cross_entropy(model(b[0]), b[1]), None)
        update = trace_optimizer(make(model.parameters()))
        fixed = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    weights = sum(p.numel() * 4 for p in network().parameters())
    forward = max(map(sum, step.moments)) + step.batch_bytes
    traced = fixed + update.state_bytes + max(forward, weights + update.temporary_bytes + step.batch_bytes)
    assert traced == pytest.approx(real_peak(make), rel=0.02)
    assert update.state_bytes == pytest.approx(weights * (1 if kind == "sgd" else 2), rel=0.001)


def test_torch_s_own_tracker_agrees() -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, (x, y) = network(), batch()
        step = trace_step(model, (x, y), BATCH, lambda b: functional.cross_entropy(model(b[0]), b[1]), None)
        fixed = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
        other, (x, y) = network(), batch()
        tracker: Any = MemTracker()
        tracker.track_external(other, x, y)
        with tracker:
            functional.cross_entropy(other(x), y).backward()
        theirs = sum(
            snapshot["Total"]
            for snapshot in tracker.get_tracker_snapshot("peak").values()
            if isinstance(snapshot, dict)
        )
    ours = fixed + step.batch_bytes + max(map(sum, step.moments))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_a_tied_weight_is_one() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
        model[1].weight = model[0].weight
        step = trace_step(model, torch.zeros(2, 100), 2, lambda x: model(x).sum(), None)
    assert max(gradients for gradients, _, _ in step.moments) == 100 * 100 * 4


def test_autocast_s_copies_of_weights_are_told_apart() -> None:
    with FakeTensorMode():
        model = nn.Linear(256, 256, bias=False)
        step = trace_step(model, torch.zeros(2, 256), 2, lambda x: model(x).sum(), torch.bfloat16)
    assert max(casts for _, casts, _ in step.moments) == 256 * 256 * 2


def test_moments_keep_what_can_be_the_peak() -> None:
    moments = Moments()
    for now in ((0, 0, 5), (1, 0, 4), (0, 0, 4), (2, 0, 5), (3, 1, 1)):
        moments.note(dict(zip(("gradient", "cast", "other"), now, strict=True)))
    assert sorted(moments.found) == [(2, 0, 5), (3, 1, 1)]


def test_small_tensors_have_values_while_a_model_is_built() -> None:
    with FakeTensorMode(), SmallValues():
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        counted = (torch.arange(6).reshape(2, 3) * 2).sum(dim=1).tolist()
        values = torch.zeros(3)
        values[1] = 7.0
        values += 1
        large = torch.zeros(1 << 20)
        nn.init.trunc_normal_(large)
        nn.init.trunc_normal_(torch.empty(10, 10), std=0.01)
        assert not bool((large > 3).any())
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert counted == [6, 24]

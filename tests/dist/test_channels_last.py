"""A model in ``channels_last`` trains by every strategy, also those that take row-major weights alone."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from phalanx.dist.parallel import parallelize
from tests.dist import engine_runs as runs
from tests.ranks import RankRunner


def _trained(rank: int, world_size: int, strategy: str, made: bool, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(
        memory_format=torch.channels_last
    )
    assert not model[0].weight.is_contiguous()
    optimizer: Any = SGD(model.parameters(), lr=0.1) if made else runs.sgd
    _, _, engine = parallelize(model, optimizer, strategy, **options)
    images, labels = torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 1, 0])
    for _ in range(2):
        with engine.micro_step():
            outputs = engine.model(images[rank::world_size])
            engine.backward(F.cross_entropy(outputs, labels[rank::world_size], reduction="sum"), 4)
        engine.step()
    return runs.weights(engine)


@pytest.mark.parametrize("made", [False, True])
def test_fsdp(run_ranks: RankRunner, made: bool) -> None:
    (expected,) = run_ranks(_trained, "single", made, {}, world_size=1, backend=None)
    for found in run_ranks(_trained, "fsdp", made, {}, world_size=2):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="no deepspeed")  # importing it sets variables
@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed(run_ranks: RankRunner, stage: int) -> None:
    (expected,) = run_ranks(_trained, "single", False, {}, world_size=1, backend=None)
    for found in run_ranks(_trained, "deepspeed", False, {"zero_stage": stage}, world_size=2):
        assert found == pytest.approx(expected, abs=1e-6)

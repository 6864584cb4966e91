"""An error of one rank in a part of phalanx.dist ends the others, and the report says which rank it was."""

from __future__ import annotations

import json

import pytest

from tests.launch.launching import Launcher

SCRIPT = """
import sys
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset
from phalanx.dist import CheckpointManager, ShardLoader, init_world, parallelize, rank_zero_first

world = init_world(timeout_s=60)
torch.manual_seed(0)


class Data(TensorDataset):
    def __getitem__(self, index):
        if where == "sample" and world.rank == 1:
            raise KeyError("a sample is gone")
        return super().__getitem__(index)


where = sys.argv[1]
if where == "first":
    with rank_zero_first():
        if world.is_rank_zero:
            raise OSError("no disk")
if where == "arguments":
    ShardLoader([1, 2], global_batch_size=-5 if world.rank == 1 else 2)
loader = ShardLoader(Data(torch.randn(32, 2), torch.randn(32, 1)), global_batch_size=8, shuffle=True)
model = nn.Linear(2, 1)
model, optimizer, engine = parallelize(model, SGD(model.parameters(), lr=0.1), loader=loader)
checkpoints = CheckpointManager("checkpoints", model=model, optimizer=optimizer, loader=loader)
for x, y in loader:
    nn.functional.mse_loss(model(x), y).backward()
    if where == "step" and world.rank == 1:
        raise FloatingPointError("the loss is nan")
    optimizer.step()
    optimizer.zero_grad()
checkpoints.save(value=object() if where == "save" and world.rank == 1 else 1)
"""


@pytest.mark.parametrize(
    ("where", "rank", "exception", "message"),
    [
        ("first", 0, "OSError", "no disk"),
        ("arguments", 1, "ValueError", "global_batch_size=-5: an integer of at least 1 is needed"),
        ("sample", 1, "KeyError", "a sample is gone"),
        ("step", 1, "FloatingPointError", "the loss is nan"),
        ("save", 1, "NotPlainError", "save(value=...) is a builtins.object"),
    ],
)
def test_the_others_end_and_the_first_is_named(
    launcher: Launcher, where: str, rank: int, exception: str, message: str
) -> None:
    done = launcher.run(
        launcher.script(SCRIPT), where, timeout_s=120
    )  # well below 10 minutes, the default patience
    assert done.returncode == 1, done.stderr
    first = json.loads((launcher.logs / "failure.json").read_text())["first"]
    assert (first["rank"], first["exception"].rpartition(".")[2]) == (rank, exception)
    assert message in first["message"]

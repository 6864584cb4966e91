"""Models of which each rank holds a part: saved sharded, resumed by any number of ranks and any strategy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from phalanx.dist import checkpoint_files as files
from phalanx.dist.checkpoint_shards import consolidate_weights
from phalanx.dist.checkpoints import CheckpointError, CheckpointManager, DamagedCheckpointsError
from phalanx.dist.shards import local_part
from phalanx.dist.state_dict import load_state_dict
from phalanx.dist.stored_tensors import StoredTensors
from tests.dist.checkpoint_runs import OPTIMIZERS
from tests.ranks import RankRunner


class Net(nn.Module):
    """Sizes that no world divides, a tied weight, a buffer and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(7, dtype=torch.float64)
        self.outer = nn.Linear(7, 5, bias=False, dtype=torch.float64)
        self.head = nn.Linear(5, 7, dtype=torch.float64)
        self.head.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.outer(torch.tanh(self.norm(self.inner(x)))))


class Job:
    """The net, sharded or not, and its manager; every rank sees all samples, so that any world does the same steps."""

    def __init__(self, folder: Path, kind: str, sharded: bool, **options: Any) -> None:
        torch.manual_seed(len(str(folder)))  # other weights than those saved, wherever they come from
        self.model: nn.Module = Net()
        if sharded:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            fully_shard(self.model, mesh=mesh)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.checkpoints = CheckpointManager(folder, model=self.model, optimizer=self.optimizer, **options)

    def step(self) -> float:
        x = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(6, 5)
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _save_and_go_on(rank: int, world_size: int, folder: str, sharded: bool) -> dict[str, float]:
    """Three steps, a save, and the loss of the step after the next: momentum and all have a part in it."""
    losses = {}
    for kind in OPTIMIZERS:
        job = Job(Path(folder) / kind, kind, sharded, asynchronous=kind == "adam")
        for _ in range(3):
            job.step()
        job.checkpoints.save(kind=kind)
        losses[kind] = [job.step() for _ in range(3)][-1]
        job.checkpoints.close()
    return losses


def _go_on(rank: int, world_size: int, folder: str, sharded: bool) -> dict[str, float]:
    losses = {}
    for path in sorted(Path(folder).iterdir()):
        kind = path.name
        job = Job(path, kind, sharded)
        restored = job.checkpoints.restore()
        assert restored.values == {"kind": kind}
        losses[kind] = [job.step() for _ in range(3)][-1]
        job.checkpoints.close()
    return losses


def _both(rank: int, world_size: int, whole: str, sharded: str) -> list[dict[str, float]]:
    return [_go_on(rank, world_size, folder, True) for folder in (whole, sharded)]


def _close(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items()}


def test_sharded_runs_go_on_on_other_worlds_and_unsharded_and_back(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    whole.mkdir()
    sharded.mkdir()
    expected = _save_and_go_on(0, 1, str(whole), False)
    two = run_ranks(_save_and_go_on, str(sharded), True, world_size=2)
    _close(two[0], _go_on(0, 1, str(sharded), False))
    for found in run_ranks(_both, str(whole), str(sharded), world_size=3):
        _close(found[0], expected)
        _close(found[1], two[0])
    path = sharded / "adam" / "step-1"
    assert sorted(os.listdir(path)) == [
        "manifest.json", "shard-0.safetensors", "shard-1.safetensors", "shards.json", "state.json",
    ]  # fmt: skip
    assert files.find_problems(path) == []
    _check_weights_alone(path, tmp_path / "weights.safetensors")
    _check_flipped_bits(path)


def _check_weights_alone(path: Path, file: Path) -> None:
    """The weights in one file, and by `load_state_dict`: both names of the tied weight are there."""
    consolidate_weights(path, file)
    model, other = Net(), Net()
    model.load_state_dict(load_file(file))
    load_state_dict(other, path)
    for first, second in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(first, second)
    assert "head.weight" in load_file(file)
    index = json.loads((path / files.SHARDS_FILE).read_text())["parts"]["model"]
    assert json.loads(index["metadata"]["aliases"]) == {"head.weight": "inner.weight"}
    assert [chunk["sizes"] for chunk in index["tensors"]["inner.weight"]["chunks"]] == [[4, 5], [3, 5]]


def _check_flipped_bits(path: Path) -> None:
    for name in sorted(os.listdir(path)):
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 4
        (path / name).write_bytes(content)
        assert files.find_problems(path), name
        content[len(content) // 2] ^= 4
        (path / name).write_bytes(content)
    assert files.find_problems(path) == []


def _step_for_ever(job: Job) -> None:
    while True:  # the ranks ask one another a few times a second
        job.step()
        job.checkpoints.maybe_save()


def _two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    job = Job(Path(folder) / "full", "sgd", True, asynchronous=True, every_steps=2)
    for _ in range(2):
        job.step()
        job.checkpoints.maybe_save()
    job.checkpoints.wait()
    write = files.write_tensors
    if rank == 1:
        files.write_tensors = _full  # type: ignore[assignment]
    job.step()
    job.checkpoints.save()
    with pytest.raises(CheckpointError) as caught:
        _step_for_ever(job)
    found["error"] = str(caught.value)
    files.write_tensors = write
    found["after the error"] = sorted(os.listdir(Path(folder) / "full"))
    job.checkpoints.save()
    job.checkpoints.wait()
    found["latest"] = getattr(job.checkpoints.latest(), "name", None) is not None
    found["problems"] = job.checkpoints.verify()
    x = torch.zeros(6, 5, dtype=torch.float64)
    job.model.eval()
    with torch.no_grad():
        job.model(x)  # leaves gathered weights in the shards' place
    job.checkpoints.save()
    found["restored"] = job.checkpoints.restore().step == job.checkpoints.state.current_step()
    job.checkpoints.close()
    return found


def _full(path: Path, *_: Any) -> files.FileRecord:
    raise OSError(28, os.strerror(28))


def test_an_error_while_one_rank_writes_is_told_to_all_and_nothing_is_published(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    def node(rank: int) -> dict[str, str]:  # both are local rank 0: files must go by the global one
        return {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        }  # fmt: skip

    first, second = run_ranks(_two_ranks, str(tmp_path), world_size=2, environ=node)
    assert "No space left on device" in second["error"]
    assert first["error"] == f"rank 1: {second['error']}"
    for found in (first, second):
        assert found["after the error"] == [".lock", "step-2"]
        assert (found["latest"], found["problems"], found["restored"]) == (True, [], True)


def test_whole_weights_are_shared_out_and_damaged_shards_named(tmp_path: Path) -> None:
    job = Job(tmp_path, "sgd", False)
    job.checkpoints.save()
    stored = StoredTensors(tmp_path / "step-1", "model")
    assert torch.equal(stored["head.weight"], local_part(job.model.state_dict()["head.weight"]))
    path = tmp_path / "step-1" / files.MODEL_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointsError, match="does not have the hash"):
        job.checkpoints.restore()

"""Each rank its own GPU, or an error on every rank before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from phalanx.dist import membership
from phalanx.dist.rank_device import choose_device
from phalanx.dist.rendezvous import refuse_differences
from phalanx.dist.world import (
    all_reduce_sum,
    init_world,
)
from tests.dist.launch_variables import torchrun_variables
from tests.ranks import RankRunner


@pytest.fixture(autouse=True)
def _forget_world() -> Iterator[None]:
    yield
    membership._current = None


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return pretend


def test_a_rank_takes_its_own_gpu(gpus) -> None:
    gpus(4)
    assert [choose_device(r, 4, None, None).index for r in range(4)] == [0, 1, 2, 3]
    assert choose_device(1, 4, None, "cpu").type == "cpu"


@pytest.mark.parametrize(("local_rank", "ranks", "visible"), [(3, 4, 2), (0, 4, 2), (3, 4, 1), (0, 4, 1)])
def test_more_ranks_than_gpus_is_an_error_on_every_rank(
    gpus, local_rank: int, ranks: int, visible: int
) -> None:
    gpus(visible)  # no modulo; torchrun with 4 ranks on one GPU
    with pytest.raises(ValueError, match=f"{ranks} ranks on this node, but CUDA shows {visible} GPU"):
        choose_device(local_rank, ranks, None, None)


def test_one_gpu_per_slurm_task_is_device_0_of_each(gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert choose_device(7, 8, None, None) == torch.device("cuda", 0)
    gpus(2)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES='7'"):
        choose_device(3, 4, None, None)


def test_nccl_without_gpus(gpus) -> None:
    gpus(0)
    with pytest.raises(ValueError, match="more ranks than GPUs with nccl"):
        choose_device(0, 2, "nccl", None)
    with pytest.raises(ValueError, match="CUDA shows no GPU"):
        choose_device(0, 1, None, "cuda")


def test_gpus_that_are_not_there(gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(
        UserWarning, match="CUDA_VISIBLE_DEVICES='7', but CUDA shows no GPU: running on the CPU"
    ):
        assert choose_device(0, 1, None, None).type == "cpu"
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES='7'"):
        choose_device(0, 1, None, "cuda")


def test_ranks_on_one_gpu_are_named_before_nccl_starts() -> None:
    peers = [
        {"world_size": 3, "backend": "cpu:gloo,cuda:nccl", "device_type": "cuda", "gpu": gpu} for gpu in "aba"
    ]
    with pytest.raises(ValueError, match="some share a GPU: ranks 0, 2: a"):
        refuse_differences(peers, 3)
    refuse_differences([{**peer, "backend": "gloo"} for peer in peers], 3)
    refuse_differences([{**peer, "gpu": str(i)} for i, peer in enumerate(peers)], 3)


def test_a_rank_without_gpu_among_others_is_named() -> None:
    peers = [{"world_size": 2, "backend": "x", "device_type": kind} for kind in ("cuda", "cpu")]
    with pytest.raises(ValueError, match="disagree on the device: rank 0: cuda; rank 1: cpu"):
        refuse_differences(peers, 2)


def _one_gpu(rank: int, world_size: int) -> list[object]:
    world = init_world(timeout_s=60)
    tensor = torch.ones(1, device=world.device)
    dist.all_reduce(tensor)
    return [str(world.device), world.backend, torch.cuda.current_device(), float(tensor), all_reduce_sum(2)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_rank_on_a_gpu(run_ranks: RankRunner) -> None:
    # the device is set, and bound to the group, before the first collective
    found = run_ranks(_one_gpu, world_size=1, backend=None, environ=torchrun_variables(1))
    assert found == [["cuda:0", "cpu:gloo,cuda:nccl", 0, 1.0, 2]]

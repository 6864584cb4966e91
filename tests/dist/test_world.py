"""World: joining, adopting, leaving."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.dist import membership
from phalanx.dist import world as world_module
from phalanx.dist.membership import backend_pairs
from phalanx.dist.rendezvous import name_ranks, place_on_node
from phalanx.dist.world import (
    RanksMissing,
    RendezvousError,
    all_reduce_sum,
    barrier,
    current_world,
    init_world,
    rank_zero_first,
    world_or_single,
)
from tests.dist.launch_variables import torchrun_variables
from tests.ranks import RankRunner


@pytest.fixture(autouse=True)
def _forget_world() -> Iterator[None]:
    yield
    membership._current = None


# ---- joining


def _join(rank: int, world_size: int) -> list[object]:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # a bare machine's
    world = init_world(timeout_s=30)
    assert init_world() is world is current_world() is world_or_single()
    return [
        world.rank,
        world.local_rank,
        world.node_rank,
        world.world_size,
        world.local_world_size,
        str(world.device),
        world.backend,
        world.source,
        world.is_rank_zero,
        os.environ.get("GLOO_SOCKET_IFNAME"),
        all_reduce_sum(rank),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default device is a GPU here")
def test_ranks_of_torchrun_join(run_ranks: RankRunner) -> None:
    found = run_ranks(_join, world_size=2, backend=None, environ=torchrun_variables(2))
    assert found == [[r, r, 0, 2, 2, "cpu", "gloo", "torchrun", r == 0, "lo", 1] for r in range(2)]


def _join_slurm(rank: int, world_size: int) -> list[object]:
    world = init_world(timeout_s=30, device="cpu")
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    return [world.source, world.rank, [os.environ[name] for name in names], all_reduce_sum(rank)]


def test_tasks_of_a_slurm_step_join_and_tell_other_libraries(run_ranks: RankRunner) -> None:
    job = str(os.getpid() * 97)

    def task(rank: int) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "3",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_NTASKS": "8",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
        }

    found = run_ranks(_join_slurm, world_size=2, backend=None, environ=task)
    port = found[0][2][-1]
    for rank in range(2):
        assert found[rank] == ["slurm", rank, [str(rank), "2", str(rank), "2", "0", "127.0.0.1", port], 1]


def _join_without_local_size(rank: int, world_size: int) -> list[object]:
    world = init_world(timeout_s=30, device="cpu")
    return [world.local_world_size, world.node_rank]


def test_ranks_per_node_are_counted_where_no_variable_says(run_ranks: RankRunner) -> None:
    variables = torchrun_variables(2)
    address = socket.gethostbyname(socket.gethostname())

    def by_hand(rank: int) -> dict[str, str]:
        kept = {k: v for k, v in variables(rank).items() if k not in ("LOCAL_WORLD_SIZE", "GROUP_RANK")}
        return {**kept, "MASTER_ADDR": address if not address.startswith("127.") else "0.0.0.0"}

    assert run_ranks(_join_without_local_size, world_size=2, backend=None, environ=by_hand) == [
        [2, 0],
        [2, 0],
    ]


def _world_of_one(rank: int, world_size: int) -> list[object]:
    world = init_world(device="cpu")
    return [world.source, world.backend, dist.is_initialized(), all_reduce_sum(3), "RANK" in os.environ]


def test_plain_python_is_a_world_of_one_without_a_group(run_ranks: RankRunner) -> None:
    assert run_ranks(_world_of_one, world_size=1, backend=None) == [["single", None, False, 3, False]]


def test_one_rank_of_a_launcher_has_a_group(run_ranks: RankRunner) -> None:
    found = run_ranks(_world_of_one, world_size=1, backend=None, environ=torchrun_variables(1))
    assert found == [["torchrun", "gloo", True, 3, True]]
    task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert run_ranks(_world_of_one, world_size=1, backend=None, environ=task) == [
        ["slurm", "gloo", True, 3, True]
    ]


def _late(rank: int, world_size: int) -> str:
    if rank == 1:
        time.sleep(4)
        return ""
    try:
        init_world(timeout_s=2, device="cpu")
    except RanksMissing as error:
        return str(error)
    return "joined"


def test_init_names_the_rank_that_does_not_come(run_ranks: RankRunner) -> None:
    message, _ = run_ranks(_late, world_size=2, backend=None, environ=torchrun_variables(2))
    assert message.startswith("init_world: rank 1 did not arrive within 2 s (rank 0 did)")
    assert "Fix:" in message


def _taken(rank: int, world_size: int) -> str:
    with socket.socket() as server:
        server.bind(("", int(os.environ["MASTER_PORT"])))
        server.listen()
        try:
            init_world(timeout_s=5, device="cpu")
        except RendezvousError as error:
            return str(error)
    return "joined"


def test_a_taken_port_is_named(run_ranks: RankRunner) -> None:
    variables = torchrun_variables(2)
    (message,) = run_ranks(_taken, world_size=1, backend=None, environ=variables)
    assert f"MASTER_PORT={variables(0)['MASTER_PORT']}: that port is taken" in message
    assert "Fix: export MASTER_PORT=" in message


def _disagree(rank: int, world_size: int) -> str:
    try:
        init_world(timeout_s=20, device="cpu", backend="gloo" if rank else "cpu:gloo")
    except ValueError as error:
        return str(error)
    return "joined"


def test_ranks_that_disagree_are_told_so_on_every_rank(run_ranks: RankRunner) -> None:
    for message in run_ranks(_disagree, world_size=2, backend=None, environ=torchrun_variables(2)):
        assert message.startswith("The ranks disagree on the backend: rank 0: cpu:gloo; rank 1: gloo.")


# ---- adopting


def _adopt(rank: int, world_size: int) -> list[object]:
    world = init_world()
    try:
        init_world(backend="nccl")
        problem = ""
    except ValueError as error:
        problem = str(error)
    barrier(timeout_s=20)
    return [
        world.source,
        world.rank,
        world.local_rank,
        world.local_world_size,
        init_world() is world,
        problem,
    ]


def test_a_group_that_exists_is_adopted(run_ranks: RankRunner) -> None:
    for rank, (source, *rest, problem) in enumerate(run_ranks(_adopt, world_size=2)):
        assert [source, *rest] == ["adopted", rank, rank, 2, True]
        assert "backend='nccl'" in problem
        assert "gloo" in problem


def _replace(rank: int, world_size: int) -> list[object]:
    first = init_world()
    dist.destroy_process_group()
    try:
        current_world()
        forgotten = False
    except RuntimeError:
        forgotten = True
    return [first.source, forgotten]


def test_a_destroyed_group_is_no_world(run_ranks: RankRunner) -> None:
    assert run_ranks(_replace, world_size=2) == [["adopted", True]] * 2


def test_no_world_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"call init_world\(\) first"):
        current_world()
    assert world_or_single().world_size == 1
    for name, value in torchrun_variables(2)(1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .*no world yet"):
        world_or_single()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="device='cuda:1'"):
        init_world(device="cuda:1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s=0"):
        init_world(timeout_s=0)
    with pytest.raises(ValueError, match="per='host'"), rank_zero_first("host"):  # type: ignore[arg-type]
        pass


def test_placing_on_nodes() -> None:
    peers = [{"host": host} for host in "aabab"]
    assert [place_on_node(peers, rank) for rank in range(5)] == [
        (0, 3, 0),
        (1, 3, 0),
        (0, 2, 1),
        (2, 3, 0),
        (1, 2, 1),
    ]


def test_names_of_ranks_and_backends() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([7, 0, 1, 2, 5]) == "ranks 0-2, 5, 7"
    assert backend_pairs("cpu:gloo,cuda:nccl") == [("cpu", "gloo"), ("cuda", "nccl")]
    assert backend_pairs("nccl") == [("cuda", "nccl")]


# ---- leaving, threads


LEAVES = """
import os, sys
from phalanx.dist.world import init_world, all_reduce_sum
init_world(timeout_s=30, device="cpu")
assert all_reduce_sum(1) == 2
if sys.argv[1] == "last" and os.environ["RANK"] == "1":
    from phalanx.dist.world import rank_zero_first
    import time; time.sleep(1)
    with rank_zero_first(): pass
elif sys.argv[1] == "last":
    from phalanx.dist.world import rank_zero_first
    with rank_zero_first(): pass
if os.environ["RANK"] == sys.argv[1]:
    raise SystemExit(7)
"""


@pytest.mark.parametrize("dies", ["none", "1", "last"])
def test_the_group_is_left_quietly_at_exit(tmp_path: Path, dies: str) -> None:
    variables = torchrun_variables(2)
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), dies],
            env={**os.environ, **variables(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    codes = []
    for rank in ranks:
        _, err = rank.communicate(timeout=60)
        codes.append(rank.returncode)
        assert "destroy_process_group" not in err
        assert "Traceback" not in err
    assert codes == ([0, 7] if dies == "1" else [0, 0])


def _threads(rank: int, world_size: int, late: bool) -> list[str]:
    torch.set_num_threads(1)
    if late:
        os.environ["OMP_NUM_THREADS"] = "3"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_world(device="cpu")
    return [str(warning.message) for warning in caught]


def test_threads_set_too_late_are_told(run_ranks: RankRunner) -> None:
    assert run_ranks(_threads, False, world_size=1, backend=None) == [[]]
    ((message,),) = run_ranks(_threads, True, world_size=1, backend=None)
    assert message.startswith("OMP_NUM_THREADS=3 was set after torch had read it: torch runs 1 threads.")


def test_describe() -> None:
    assert world_module.describe(world_or_single()).startswith("rank 0 of 1 (local 0, node 0) on ")

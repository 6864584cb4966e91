"""World: joining, adopting, and what ranks do together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.dist import membership
from phalanx.dist import world as world_module
from phalanx.dist.membership import backend_pairs
from phalanx.dist.rank_device import choose_device
from phalanx.dist.rendezvous import name_ranks, place_on_node, refuse_differences
from phalanx.dist.world import (
    RanksMissing,
    RankZeroFailed,
    RendezvousError,
    all_reduce_sum,
    barrier,
    current_world,
    gather_objects,
    init_world,
    rank_zero_first,
    world_or_single,
)
from tests.ranks import RankError, RankRunner


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def torchrun_variables(world_size: int, **more: str):
    """What torchrun sets for each rank of one node."""
    port = str(free_port())

    def of_rank(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **more,
        }

    return of_rank


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


# ---- devices


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


# ---- sums


def _sums(rank: int, world_size: int) -> list[object]:
    big = 2**53 + 1  # lost in a float64
    tensor = torch.tensor([[1, 2], [3, big]]) * (1 if rank else -1)
    whole, part, mixed, flag, matrix, single = all_reduce_sum(
        big, 0.1, 0 if rank == 0 else 0.5, rank == 0, tensor, torch.tensor(0.25, dtype=torch.float32)
    )
    lone = all_reduce_sum(-1 - rank)
    return [
        whole,
        part,
        mixed,
        flag,
        matrix.tolist(),
        single.item(),
        str(single.dtype),
        str(matrix.dtype),
        lone,
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_exact(run_ranks: RankRunner, world_size: int) -> None:
    n = world_size
    whole = (2**53 + 1) * n
    m = n - 2
    matrix = [[m, 2 * m], [3 * m, (2**53 + 1) * m]]
    expected = [
        whole,
        pytest.approx(0.1 * n),
        0.5 * (n - 1),
        1,
        matrix,
        0.25 * n,
        "torch.float64",
        "torch.int64",
    ]
    for got in run_ranks(_sums, world_size=world_size):
        assert got == [*expected, -n * (n + 1) // 2]


def test_sums_without_a_group() -> None:
    assert all_reduce_sum(3) == 3
    assert all_reduce_sum(2, 0.5) == (2, 0.5)
    assert all_reduce_sum(torch.tensor([True, True])).tolist() == [1, 1]
    with pytest.raises(ValueError, match="not str"):
        all_reduce_sum("3")
    with pytest.raises(ValueError, match="complex"):
        all_reduce_sum(torch.tensor(1j))
    with pytest.raises(ValueError, match="at least one"):
        all_reduce_sum()


def _gather(rank: int, world_size: int) -> list[object]:
    return gather_objects({"rank": rank, "words": "x" * rank})


def test_gathered_objects_are_in_rank_order(run_ranks: RankRunner) -> None:
    expected = [{"rank": rank, "words": "x" * rank} for rank in range(3)]
    assert run_ranks(_gather, world_size=3) == [expected] * 3
    assert gather_objects("mine") == ["mine"]


# ---- waiting


def _absent(rank: int, world_size: int) -> list[object]:
    barrier()
    if rank == 1:
        time.sleep(3)
        return []
    try:
        barrier(timeout_s=1)
    except RanksMissing as error:
        return [str(error), list(error.ranks)]
    return ["passed"]


def test_barrier_names_who_is_missing(run_ranks: RankRunner) -> None:
    first, _, third = run_ranks(_absent, world_size=3)
    assert first == third
    assert first[0].startswith("barrier: rank 1 did not arrive within 1 s (ranks 0, 2 did)")
    assert first[1] == [1]


def _barriers(rank: int, world_size: int) -> bool:
    slow = rank == 0
    for _ in range(20):
        started = time.monotonic()
        if slow:
            time.sleep(0.01)
        barrier(timeout_s=20)
        if time.monotonic() - started > 15:
            return False
    return True


def test_barriers_follow_each_other(run_ranks: RankRunner) -> None:
    assert run_ranks(_barriers, world_size=3) == [True] * 3


def _download(rank: int, world_size: int, per: str, fail_on: int | None) -> list[object]:
    world = init_world(timeout_s=30, device="cpu")
    log = Path("order.log")
    try:
        with rank_zero_first(per):  # type: ignore[arg-type]
            if rank == fail_on:
                raise OSError("disk is full")
            time.sleep(0.2 if world.local_rank == 0 else 0.0)
            with log.open("a") as file:
                file.write(f"{rank} ")
    except RankZeroFailed as error:
        return ["told", str(error).splitlines()[0]]
    except OSError as error:
        return ["own", str(error)]
    if fail_on is None:
        barrier()
    else:
        time.sleep(1)  # rank 0 serves the store here
    return ["done", ""]


def _two_nodes(world_size: int):
    variables = torchrun_variables(world_size)

    def of_rank(rank: int) -> dict[str, str]:
        place = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
        return {**variables(rank), **place}

    return of_rank


@pytest.mark.parametrize("per", ["node", "world"])
def test_rank_zero_goes_first(run_ranks: RankRunner, tmp_path: Path, per: str) -> None:
    found = run_ranks(_download, per, None, world_size=4, backend=None, environ=_two_nodes(4))
    assert found == [["done", ""]] * 4
    order = (tmp_path / "order.log").read_text().split()
    assert order[0] == "0"
    assert sorted(order) == ["0", "1", "2", "3"]
    if per == "node":
        assert order.index("2") < order.index("3")


@pytest.mark.parametrize(("fail_on", "told"), [(0, [1, 2, 3]), (2, [3])])
def test_a_failure_of_who_goes_first_reaches_those_who_wait(
    run_ranks: RankRunner, fail_on: int, told: list[int]
) -> None:
    found = run_ranks(_download, "node", fail_on, world_size=4, backend=None, environ=_two_nodes(4))
    for rank, outcome in enumerate(found):
        if rank == fail_on:
            assert outcome == ["own", "disk is full"]
        elif rank in told:
            assert outcome == ["told", f"rank {fail_on} failed in rank_zero_first: OSError: disk is full"]
        else:
            assert outcome == ["done", ""]


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


@pytest.fixture(autouse=True)
def _forget_world():
    yield
    membership._current = None


def test_describe() -> None:
    assert world_module.describe(world_or_single()).startswith("rank 0 of 1 (local 0, node 0) on ")


def test_an_error_in_a_rank_is_not_swallowed(run_ranks: RankRunner) -> None:
    with pytest.raises(RankError, match="disk"):
        run_ranks(_raise, world_size=2)


def _raise(rank: int, world_size: int) -> None:
    with rank_zero_first():
        raise OSError("disk")


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

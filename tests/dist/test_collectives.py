"""What ranks do together: exact sums, gathering, barriers that name who is missing, rank 0 first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from phalanx.dist import membership
from phalanx.dist.world import (
    RanksMissing,
    RankZeroFailed,
    all_reduce_sum,
    barrier,
    gather_objects,
    init_world,
    rank_zero_first,
)
from tests.dist.launch_variables import torchrun_variables
from tests.ranks import RankError, RankRunner


@pytest.fixture(autouse=True)
def _forget_world() -> Iterator[None]:
    yield
    membership._current = None


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


def test_an_error_in_a_rank_is_not_swallowed(run_ranks: RankRunner) -> None:
    with pytest.raises(RankError, match="disk"):
        run_ranks(_raise, world_size=2)


def _raise(rank: int, world_size: int) -> None:
    with rank_zero_first():
        raise OSError("disk")

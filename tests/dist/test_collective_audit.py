"""Collectives that do not match are named before their result is used."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from phalanx.dist import collective_audit
from phalanx.dist.collective_audit import CollectiveMismatch, audit_collectives
from phalanx.dist.collective_calls import KINDS, describe_call, explain_mismatch
from phalanx.dist.collectives import barrier
from phalanx.dist.rendezvous import RanksMissing
from phalanx.dist.world import init_world
from tests.dist.launch_variables import torchrun_variables
from tests.ranks import RankRunner


def over_tcp(run_ranks: RankRunner, function: Any, *args: Any, world_size: int) -> list[Any]:
    """As a launcher starts ranks: they meet in a TCPStore, which answers faster than a file."""
    environ = torchrun_variables(world_size)
    words = (function, *args)
    return run_ranks(_and_leave, *words, world_size=world_size, backend=None, environ=environ)


def _and_leave(rank: int, world_size: int, function: Any, *args: Any) -> Any:
    """Rank 0 serves the store: it must not leave while the others still compare."""
    value = function(rank, world_size, *args)
    barrier()
    return value


def _caught(function: Any) -> str:
    try:
        function()
    except CollectiveMismatch as error:
        return str(error)
    return "no error"


def _mismatches(rank: int, world_size: int) -> dict[str, str]:
    init_world(device="cpu")
    first = rank == 0

    def each(**calls: Any) -> dict[str, str]:
        found = {}
        for name, call in calls.items():
            found[name] = _caught(call)
            audit_collectives()  # an error ends it
        return found

    def waits() -> None:
        work = dist.all_reduce(torch.ones(4 - rank), async_op=True)
        work.wait()

    return each(
        shape=lambda: dist.all_reduce(torch.ones(4 - rank)),
        dtype=lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if first else torch.float32)),
        op=lambda: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if first else dist.ReduceOp.SUM),
        kind=lambda: dist.all_reduce(torch.ones(4)) if first else dist.broadcast(torch.ones(4), 0),
        root=lambda: dist.broadcast(torch.ones(4), src=rank),
        gathered=lambda: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2 + rank)),
        waits=waits,
    )


def test_what_differs_is_named_on_every_rank(run_ranks: RankRunner) -> None:
    one, other = over_tcp(run_ranks, _mismatches, world_size=2)
    assert one == other
    lines = one["shape"].splitlines()
    assert lines[0] == "all_reduce differs between ranks:"
    assert lines[1].startswith("  rank 0: all_reduce(SUM) of float32 [4], at test_collective_audit.py:")
    assert lines[2].startswith("  rank 1: all_reduce(SUM) of float32 [3], at test_collective_audit.py:")
    assert "gloo returns wrong values without an error" in lines[3]
    assert lines[4].startswith("Fix: ")
    assert "rank 0: all_reduce(SUM) of float64 [4]" in one["dtype"]
    assert "rank 0: all_reduce(MAX)" in one["op"]
    assert "rank 1: broadcast of float32 [4], root 0" in one["kind"]
    assert "`if rank == 0:`" in one["kind"]
    assert "root 1" in one["root"]
    assert "of float32 [3], taking [[2], [2]]" in one["gathered"]
    assert "rank 1: all_reduce(SUM) of float32 [3]" in one["waits"]


def _healthy(rank: int, world_size: int) -> list[Any]:
    init_world(device="cpu")
    before = dist.all_reduce
    assert hasattr(before, "__wrapped__")
    pair = dist.new_group([0, 1])
    values: list[Any] = []
    total = torch.ones(2) * rank
    dist.all_reduce(total)
    values.append(total.tolist())
    # A group that only some belong to, and calls that come in another order around a message.
    if rank < 2:
        mine = torch.ones(1)
        work = dist.all_reduce(mine, group=pair, async_op=True)
        if rank == 0:
            dist.send(torch.tensor([5.0]), 1)
        else:
            dist.recv(torch.empty(1), 0)
        work.wait()
        values.append(mine.tolist())
    dist.all_reduce(torch.ones(3, 1)) if rank else dist.all_reduce(torch.ones(3))  # a 1 more is no difference
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, "x" * (rank + 1))
    values.append(objects)
    rows = torch.full((world_size, 2), float(rank))
    out = torch.empty(world_size, 2)
    dist.all_to_all_single(out, rows)
    values.append(out[:, 0].tolist())
    box = [rank]
    dist.broadcast_object_list(box, src=1)
    values.append(box[0])
    return values


def test_calls_that_match_are_left_alone(run_ranks: RankRunner) -> None:
    found = over_tcp(run_ranks, _healthy, world_size=3)
    assert found[0] == [[3.0, 3.0], [2.0], ["x", "xx", "xxx"], [0.0, 1.0, 2.0], 1]
    assert found[2] == [[3.0, 3.0], ["x", "xx", "xxx"], [0.0, 1.0, 2.0], 1]


def _ddp(rank: int, world_size: int, steps: int) -> list[Any]:
    """DDP of a model whose batch norm and buckets communicate; counted is what is compared."""
    init_world(device="cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = SGD(model.parameters(), lr=0.1)
    audit = collective_audit._audit
    assert audit is not None
    active = []
    for _ in range(steps):
        loss = model(torch.ones(4, 4) * rank).sum()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
        active.append(audit.active)
    return [active, audit._audited, dist.all_reduce is audit._originals["all_reduce"]]


def test_it_ends_after_three_steps_and_leaves_ddp_alone(run_ranks: RankRunner) -> None:
    assert over_tcp(run_ranks, _ddp, 4, world_size=2) == [[[True, True, False, False], 3, True]] * 2


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which here are texts
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 2)  # type: ignore[union-attr]


def _own_hook(rank: int, world_size: int) -> float:
    init_world(device="cpu")
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    model.register_comm_hook(None, _hook)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    return float(next(model.parameters()).grad[0, 0])  # type: ignore[index]


def test_a_hook_of_the_users_own_runs_in_it(run_ranks: RankRunner) -> None:
    assert over_tcp(run_ranks, _own_hook, world_size=2) == [1.5, 1.5]


def _ends_apart(rank: int, world_size: int) -> float:
    """Rank 0 has stepped three times before the call, and rank 1 has not."""
    init_world(device="cpu")
    param = nn.Parameter(torch.ones(1))
    optimizer = SGD([param], lr=0.1)
    for _ in range(3 if rank == 0 else 1):
        param.grad = torch.ones(1)
        optimizer.step()
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.all_reduce(value)
    return float(value)


def test_ranks_that_end_it_at_different_times_do_not_wait_for_each_other(run_ranks: RankRunner) -> None:
    started = time.monotonic()
    assert over_tcp(run_ranks, _ends_apart, world_size=2) == [4.0, 4.0]
    assert time.monotonic() - started < 30


def _nobody_there(rank: int, world_size: int) -> str:
    init_world(device="cpu")
    membership = collective_audit.membership_in_force()
    assert membership is not None
    membership.timeout_s = 1.0
    text = "nothing"
    if rank != 1:
        try:
            dist.all_reduce(torch.ones(1))
        except RanksMissing as error:
            text = f"{error.ranks} {error}"
    else:
        time.sleep(4)
    audit_collectives(0)
    membership.timeout_s = 30.0
    return text


def test_a_rank_that_calls_none_is_named(run_ranks: RankRunner) -> None:
    found = over_tcp(run_ranks, _nobody_there, world_size=3)
    assert found[1] == "nothing"
    for text in (found[0], found[2]):
        assert text.startswith("(1,) all_reduce at test_collective_audit.py:")
        assert "rank 1 called no collective within" in text
        assert "ranks 0, 2 would have waited for ever" in text


def _imported_by_name(rank: int, world_size: int) -> str:
    from tests.dist import from_import

    init_world(device="cpu")
    return _caught(lambda: from_import.reduce_it(torch.ones(2 + rank)))


def test_functions_imported_by_name_are_seen_too(run_ranks: RankRunner) -> None:
    assert (
        "rank 1: all_reduce(SUM) of float32 [3], at from_import.py"
        in over_tcp(run_ranks, _imported_by_name, world_size=2)[0]
    )


def _off(rank: int, world_size: int) -> bool:
    init_world(device="cpu")
    audit_collectives(0)
    return hasattr(dist, "all_reduce") and collective_audit._audit is None


def test_it_can_be_switched_off(run_ranks: RankRunner) -> None:
    assert over_tcp(run_ranks, _off, world_size=2) == [True, True]


def test_without_ranks_nothing_happens() -> None:
    original = dist.all_reduce
    audit_collectives()
    assert dist.all_reduce is original


@pytest.mark.parametrize("steps", [-1, 1.5, "3", None, True])
def test_bad_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match=r"steps=.*\nFix: "):
        audit_collectives(steps)


# ---- the rule alone

SHAPES = st.lists(st.integers(0, 4), max_size=3)


@given(SHAPES, SHAPES, st.sampled_from(["all_reduce", "broadcast", "reduce"]))
def test_shapes_that_differ_by_more_than_ones_do_not_match(
    one: list[int], other: list[int], kind: str
) -> None:
    calls = {
        rank: {**describe_call(kind, {"tensor": torch.empty(shape)}, [0, 1]), "at": "a.py:1"}
        for rank, shape in enumerate((one, other))
    }
    equal = [size for size in one if size != 1] == [size for size in other if size != 1]
    assert (explain_mismatch(calls, [0, 1], "gloo") is None) == equal


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=3, max_size=3), st.booleans())
def test_splits_have_to_be_each_others(sends: list[list[int]], wrong: bool) -> None:
    calls = {}
    for rank in range(3):
        takes = [sends[other][rank] for other in range(3)]
        if wrong and rank == 1:
            takes[0] += 1
        arguments = {
            "input": torch.empty(sum(sends[rank]), 2),
            "output": torch.empty(sum(takes), 2),
            "input_split_sizes": sends[rank],
            "output_split_sizes": takes,
        }
        calls[rank] = {**describe_call("all_to_all_single", arguments, [0, 1, 2]), "at": "a.py:1"}
    assert (explain_mismatch(calls, [0, 1, 2], "nccl") is not None) == wrong


def test_every_kind_is_torchs() -> None:
    assert [kind for kind in KINDS if not hasattr(dist, kind)] == []

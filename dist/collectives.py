"""What ranks do together: sums, gathering, waiting, letting rank 0 go first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.dist.arguments import require_real, short
from phalanx.dist.membership import backend_pairs, membership_or_none
from phalanx.dist.rendezvous import let_others_read, wait_for_ranks

MOST_S = 10.0 * 365 * 24 * 3600  # seconds; beyond, the clock's arithmetic overflows
FIRST_TIMEOUT_S = 24 * 3600.0  # preparing data may take hours; a rank 0 that fails or dies is told otherwise


class RankZeroFailed(RuntimeError):
    """The rank that went first in `rank_zero_first` raised; the message names it and its error."""


def barrier(timeout_s: float | None = None) -> None:
    """Wait until every rank is here; one that does not come is named.

    It goes through the store and touches no device, so that it can neither pick a GPU nor hang in NCCL::

        barrier(timeout_s=60)   # RanksMissing: barrier: rank 3 did not arrive within 60 s (ranks 0-2 did).

    Collective: every rank must call it. Without a group it returns at once.

    Args:
        timeout_s: How long to wait, in seconds; by default the world's.

    Raises:
        RanksMissing: Ranks did not arrive; the message, and ``.ranks``, have them.
        RendezvousError: Rank 0 has ended.
        ValueError: ``timeout_s`` is no number above 0.
    """
    if timeout_s is not None:
        timeout_s = require_real("timeout_s", timeout_s, above=0, at_most=MOST_S, fix="seconds, such as 60")
    current = membership_or_none()
    if current is None or current.store is None:
        return
    world, store, call = current.world, current.store, current.next_call()
    patience_s = current.timeout_s if timeout_s is None else timeout_s
    store.set(f"barrier/{call}/{world.rank}", "here")
    wait_for_ranks(store, f"barrier/{call}", range(world.world_size), patience_s, "barrier")
    let_others_read(store, f"barrier/{call}", world.rank, world.world_size)


@contextlib.contextmanager
def rank_zero_first(per: Literal["node", "world"] = "node") -> Iterator[None]:
    """Run the body on rank 0, and only then on the others: for downloads and preparing files::

        with rank_zero_first():
            datasets.MNIST("data", download=True)   # the others find it on disk

    With ``per="node"`` the first rank of every other node comes second, and the rest third: right for folders that nodes
    share (they find the files) and for those they do not (they make their own).

    Collective: every rank must enter it. The body must not call collectives.

    Args:
        per: ``node``, or ``world`` when one copy serves all nodes.

    Raises:
        RankZeroFailed: On the ranks that waited, when the one they waited for raised. That rank raises its own error.
        ValueError: ``per`` is unknown.
    """
    if not isinstance(per, str) or per not in ("node", "world"):
        raise ValueError(f"per={short(per)}: say 'node' or 'world'")
    current = membership_or_none()
    if current is None or current.store is None or current.world.world_size == 1:
        yield
        return
    world, store, call = current.world, current.store, current.next_call()
    leads_node = per == "node" and world.local_rank == 0 and world.rank != 0
    mine = f"first/{call}/rank-0" if world.rank == 0 else f"first/{call}/node-{world.node_rank}"
    if world.rank != 0:
        problem = _leader_problem(store, f"first/{call}/rank-0")
        let_others_read(store, f"first/{call}", world.rank, world.world_size)
        if not problem and per == "node" and not leads_node and world.node_rank != 0:
            problem = _leader_problem(store, f"first/{call}/node-{world.node_rank}")
        if problem:
            raise RankZeroFailed(f"{problem}\nThis rank waited for it.\nFix: see that rank's own traceback")
    if world.rank != 0 and not leads_node:
        yield
        return
    try:
        yield
    except BaseException as error:
        what = f"rank {world.rank} failed in rank_zero_first: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            store.set(f"{mine}/0", what)
            if world.rank == 0:
                let_others_read(store, f"first/{call}", 0, world.world_size)
        raise
    store.set(f"{mine}/0", "")


def _leader_problem(store: Store, key: str) -> str:
    """Wait for who goes first; what went wrong there, empty when nothing did."""
    return wait_for_ranks(store, key, [0], FIRST_TIMEOUT_S, "rank_zero_first")[0].decode()


def gather_objects(obj: Any) -> list[Any]:
    """Every rank's object, in rank order, on every rank; ``[obj]`` without a group::

        hosts = gather_objects(socket.gethostname())   # ["node1", "node1", "node2", "node2"]

    Collective: every rank must call it. Objects are pickled, so trust the ranks; for numbers `all_reduce_sum` is cheaper.
    """
    current = membership_or_none()
    if current is None or current.group is None:
        return [obj]
    gathered: list[Any] = [None] * current.world.world_size
    dist.all_gather_object(gathered, obj)
    return gathered


Number = int | float | torch.Tensor


@overload
def all_reduce_sum(value: int, /) -> int: ...
@overload
def all_reduce_sum(value: float, /) -> float: ...
@overload
def all_reduce_sum(value: torch.Tensor, /) -> torch.Tensor: ...
@overload
def all_reduce_sum(first: Any, second: Any, /, *values: Any) -> tuple[Any, ...]: ...


def all_reduce_sum(*values: Any) -> Any:
    """The sum over all ranks of each value: one in, one out; several in, a tuple out.

    ::

        loss, correct, count = all_reduce_sum(loss_sum, num_correct, num_samples)
        accuracy = correct / count

    Whole numbers stay whole and exact (sums below 2**63 for tensors), others are summed in float64; a tensor comes back detached, on its own
    device, as int64 or float64. A number that is whole on one rank and not on another is summed as a float.

    Collective: every rank must call it, with as many values of the same shapes. One all-reduce, whatever is passed.
    Not in place. Without a group the values come back as they are summed.

    Raises:
        ValueError: No value was passed, or one is neither a number nor a tensor of real numbers.
    """
    if not values:
        raise ValueError(
            "all_reduce_sum() needs at least one value.\nFix: all_reduce_sum(loss_sum, num_samples)"
        )
    current = membership_or_none()
    packed = torch.cat([_pack(value) for value in values], dim=1)
    if current is not None and current.group is not None:
        on_cpu = "cpu" in {kind for kind, _ in backend_pairs(dist.get_backend_config())}
        packed = packed if on_cpu else packed.to(current.world.device)
        dist.all_reduce(packed)
        packed = packed.cpu()
    sums, start = [], 0
    for value in values:
        numel = value.numel() if isinstance(value, torch.Tensor) else 1
        sums.append(_unpack(packed[:, start : start + numel], value))
        start += numel
    return sums[0] if len(sums) == 1 else tuple(sums)


_HALF = 2**32


def _pack(value: Any) -> torch.Tensor:
    """Rows: float part, high and low halves of a whole number, whether it is a float.

    One float64 tensor for all kinds keeps the collective the same on every rank, also where a rank without data passes 0 for
    another's 0.0; halves of 32 bits stay exact for up to 2**21 ranks.
    """
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise ValueError(
                f"all_reduce_sum() sums real numbers, not a tensor of {value.dtype}.\n"
                "Fix: torch.view_as_real(tensor)"
            )
        flat = value.detach().reshape(-1)
        if flat.is_floating_point():
            flat = flat.to("cpu", torch.float64)
            nothing = torch.zeros_like(flat)
            return torch.stack([flat, nothing, nothing, torch.ones_like(flat)])
        flat = flat.to("cpu", torch.int64)
        high = torch.div(flat, _HALF, rounding_mode="floor")
        low = flat - high * _HALF
        nothing = torch.zeros(flat.shape, dtype=torch.float64)
        return torch.stack([nothing, high.double(), low.double(), nothing])
    if isinstance(value, float):
        return torch.tensor([[value], [0.0], [0.0], [1.0]], dtype=torch.float64)
    try:
        whole = int(value.__index__())
    except (AttributeError, TypeError):
        try:
            return torch.tensor([[float(value.__float__())], [0.0], [0.0], [1.0]], dtype=torch.float64)
        except (AttributeError, TypeError):
            raise ValueError(
                f"all_reduce_sum({short(value)}) sums numbers and tensors, not {type(value).__name__}.\n"
                "Fix: gather_objects() for other things"
            ) from None
    high_half, low_half = divmod(whole, _HALF)
    return torch.tensor([[0.0], [float(high_half)], [float(low_half)], [0.0]], dtype=torch.float64)


def _unpack(packed: torch.Tensor, like: Any) -> Any:
    floats, high, low, is_float = packed
    if isinstance(like, torch.Tensor):
        if like.is_floating_point() or bool((is_float > 0).any()):
            summed = floats + high * _HALF + low
        else:
            summed = high.long() * _HALF + low.long()
        return summed.reshape(like.shape).to(like.device)
    if float(is_float) > 0:
        return float(floats) + float(high) * _HALF + float(low)
    return int(high) * _HALF + int(low)

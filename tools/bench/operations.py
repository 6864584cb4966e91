"""The operations that are measured: buffers, the call, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.dist.membership import World

#: Values are small whole numbers, so that their sums are exact also in half precision.
_PATTERN = 5


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective on buffers of one size.

    Args:
        prepare: Fills the buffers.
        run: The call; returns once the result may be used (on a GPU, once it is queued).
        is_right: Whether the result is what it must be; after one ``prepare`` and one ``run``.
    """

    prepare: Callable[[], None]
    run: Callable[[], object]
    is_right: Callable[[], bool]


def values_of(rank: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """What rank ``rank`` puts in: known to every rank, and different for each."""
    numbers = torch.arange(count, device=like.device, dtype=torch.int64)
    return ((numbers + rank) % _PATTERN).to(like.dtype)


def summed(world_size: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' values: the pattern repeats, so that it takes no loop over the ranks."""
    rounds, rest = divmod(world_size, _PATTERN)
    numbers = torch.arange(count, device=like.device, dtype=torch.int64) % _PATTERN
    total = torch.full_like(numbers, rounds * sum(range(_PATTERN)))
    for rank in range(rest):
        total += (numbers + rank) % _PATTERN
    return total.to(like.dtype)


def operation(kind: str, size_bytes: int, dtype: torch.dtype, world: World) -> Operation:
    """A collective of ``size_bytes``, whose meaning `bandwidth.CONVENTIONS` gives."""
    like = torch.empty(0, dtype=dtype, device=world.device)
    return _MAKERS[kind](size_bytes // like.element_size(), like, world)


def _all_reduce(count: int, like: torch.Tensor, world: World) -> Operation:
    buffer = like.new_zeros(count)
    mine = values_of(world.rank, count, like)
    return Operation(
        prepare=lambda: _copy(mine, buffer),
        run=lambda: dist.all_reduce(buffer),
        is_right=lambda: _close(buffer, summed(world.world_size, count, like)),
    )


def _all_gather(count: int, like: torch.Tensor, world: World) -> Operation:
    part = count // world.world_size
    mine, whole = values_of(world.rank, part, like), like.new_zeros(count)
    return Operation(
        prepare=lambda: _clear(whole),
        run=lambda: dist.all_gather_into_tensor(whole, mine),
        is_right=lambda: all(
            _close(whole[rank * part : (rank + 1) * part], values_of(rank, part, like))
            for rank in range(world.world_size)
        ),
    )


def _reduce_scatter(count: int, like: torch.Tensor, world: World) -> Operation:
    part = count // world.world_size
    whole, mine = values_of(world.rank, count, like), like.new_zeros(part)
    here = slice(world.rank * part, (world.rank + 1) * part)
    return Operation(
        prepare=lambda: _clear(mine),
        run=lambda: dist.reduce_scatter_tensor(mine, whole),
        is_right=lambda: _close(mine, summed(world.world_size, count, like)[here]),
    )


def _broadcast(count: int, like: torch.Tensor, world: World) -> Operation:
    buffer = like.new_zeros(count)
    root = values_of(0, count, like)
    return Operation(
        prepare=lambda: _copy(root, buffer) if world.rank == 0 else _clear(buffer),
        run=lambda: dist.broadcast(buffer, src=0),
        is_right=lambda: _close(buffer, root),
    )


def _all_to_all(count: int, like: torch.Tensor, world: World) -> Operation:
    part = count // world.world_size
    sent, got = values_of(world.rank, count, like), like.new_zeros(count)
    here = slice(world.rank * part, (world.rank + 1) * part)
    return Operation(
        prepare=lambda: _clear(got),
        run=lambda: dist.all_to_all_single(got, sent),
        is_right=lambda: all(
            _close(got[rank * part : (rank + 1) * part], values_of(rank, count, like)[here])
            for rank in range(world.world_size)
        ),
    )


def _send_recv(count: int, like: torch.Tensor, world: World) -> Operation:
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    mine, got = values_of(world.rank, count, like), like.new_zeros(count)

    def run() -> None:
        if world.world_size == 1:
            got.copy_(mine)
            return
        calls = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    return Operation(
        prepare=lambda: _clear(got), run=run, is_right=lambda: _close(got, values_of(before, count, like))
    )


_MAKERS: dict[str, Callable[[int, torch.Tensor, World], Operation]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all-to-all": _all_to_all,
    "send-recv": _send_recv,
}


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _clear(target: torch.Tensor) -> None:
    target.zero_()


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal; in the half precisions, where many ranks' sums are rounded, to one part in fifty."""
    if found.dtype in (torch.float16, torch.bfloat16):
        return bool(torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.0))
    return bool(torch.equal(found, expected))

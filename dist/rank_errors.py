"""Work that may fail on one rank: the others must hear of it rather than wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.dist.checkpoint_errors import CheckpointError
from phalanx.dist.world import World, gather_objects

T = TypeVar("T")


def on_rank_zero(world: World, work: Callable[[], T]) -> T:
    """Rank 0's result on every rank; if it raises, every rank raises."""
    outcome: tuple[Any, str | None] = (None, None)
    failure: Exception | None = None
    if world.is_rank_zero:
        try:
            outcome = (work(), None)
        except Exception as error:  # whatever it is, the others must not wait for ever
            failure = error
            outcome = (None, _in_short(error))
    value, problem = gather_objects(outcome)[0]
    if failure is not None:
        raise failure
    if problem is not None:
        raise CheckpointError(f"rank 0: {problem}")
    result: T = value
    return result


def on_every_rank(world: World, work: Callable[[], T]) -> T:
    """This rank's result; if any rank raises, every rank raises."""
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    problems = gather_objects(None if failure is None else _in_short(failure))
    if failure is not None:
        raise failure
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"rank {rank}: {problem}")
    return result


def _in_short(error: BaseException) -> str:
    return str(error) or type(error).__name__

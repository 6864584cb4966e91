"""No launcher: one process, a world of its own."""

from __future__ import annotations

from phalanx.dist.environments.rank_environment import RankEnvironment


def single() -> RankEnvironment:
    """The environment of a plain ``python train.py``.

    >>> single().world_size
    1
    """
    return RankEnvironment(
        rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=None,
        source="single",
    )

"""No launcher: one process, a world of its own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from phalanx.dist.environments.rank_environment import RankEnvironment, is_loopback


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


def warn_of_meeting_place(environ: Mapping[str, str]) -> None:
    """Say that MASTER_ADDR alone makes no ranks: in a pod of several, each would train by itself.

    Args:
        environ: The variables to read.
    """
    address = environ.get("MASTER_ADDR", "").strip()
    if address and not is_loopback(address):
        warnings.warn(
            f"MASTER_ADDR={address} is set, but neither RANK nor WORLD_SIZE: running as one process, alone. Fix: export RANK, "
            "WORLD_SIZE and LOCAL_RANK as well, or start the ranks with `phalanx run`; for one process: unset MASTER_ADDR",
            stacklevel=3,
        )

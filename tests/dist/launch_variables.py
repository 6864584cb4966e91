"""The variables in which a launcher tells ranks who they are."""

from __future__ import annotations

import socket
from collections.abc import Callable


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def torchrun_variables(world_size: int, **more: str) -> Callable[[int], dict[str, str]]:
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

"""What a launcher tells one process about its place among the ranks."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Source = Literal["torchrun", "mpi", "slurm", "single"]


class InvalidRankEnvironment(ValueError):
    """The launcher's variables contradict each other, or only some of them are set."""


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """One process's place, as its launcher's variables give it.

    Args:
        rank: ``0 <= rank < world_size``.
        local_rank: Position among the ranks of this node.
        node_rank: Position of this node; None where no variable says (found out once ranks can talk).
        world_size: Number of ranks.
        local_world_size: Number of ranks on this node; None where no variable says.
        master_addr: Host that rank 0's store listens on.
        master_port: Its port; None with one rank when no port was set, since nobody needs to connect.
        source: Which launcher's variables were used.
    """

    rank: int
    local_rank: int
    node_rank: int | None
    world_size: int
    local_world_size: int | None
    master_addr: str
    master_port: int | None
    source: Source

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidRankEnvironment(
                f"{self.source}: rank {self.rank} is outside a world of {self.world_size} "
                f"(ranks 0 to {self.world_size - 1}).\n"
                "The ranks would wait for each other for ever.\n"
                "Fix: start every rank with its own RANK below WORLD_SIZE; `phalanx run` does."
            )
        ranks_here = self.local_world_size
        if ranks_here is not None and not 1 <= ranks_here <= self.world_size:
            raise InvalidRankEnvironment(
                f"{self.source}: {ranks_here} ranks on this node, but {self.world_size} in the whole world.\n"
                "Fix: LOCAL_WORLD_SIZE counts this node's ranks, WORLD_SIZE those of all nodes."
            )
        limit = self.world_size if ranks_here is None else ranks_here
        if not 0 <= self.local_rank < limit:
            raise InvalidRankEnvironment(
                f"{self.source}: local rank {self.local_rank} is outside this node's {limit} ranks.\n"
                "It would be given a device that another rank uses, or none.\n"
                "Fix: LOCAL_RANK counts from 0 on each node; it is not RANK."
            )


def refuse_contradictions(environ: Mapping[str, str], found: RankEnvironment, whose: str) -> None:
    """Raise when RANK, WORLD_SIZE or LOCAL_RANK, exported by hand, say something else than the launcher.

    Args:
        environ: The variables to read.
        found: What the launcher says.
        whose: Of which process, as in "this Slurm task's".
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    for name, value in zip(names, (found.rank, found.world_size, found.local_rank), strict=True):
        given = read_int(environ, name)
        if given is not None and given != value:
            missing = [other for other in names if not environ.get(other, "").strip()]
            raise InvalidRankEnvironment(
                f"{name}={given}, but {whose} is {value}, and {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing.\n"
                "Libraries that read one or the other would disagree about the world.\n"
                f"Fix: unset {name}, and let it be taken from the launcher"
            )


def read_int(
    environ: Mapping[str, str], name: str, *, minimum: int = 0, maximum: int | None = None
) -> int | None:
    """The variable as a whole number, None when it is unset or empty.

    Raises:
        InvalidRankEnvironment: It is not a whole number, or outside ``minimum..maximum``.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    digits = text[1:] if text[0] in "+-" else text
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidRankEnvironment(
            f"{name}={environ[name]!r} is not a whole number.\n"
            f"Fix: export {name}=<number>, or unset it and start the ranks with `phalanx run`."
        )
    value = int(text)
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"{minimum} or more" if maximum is None else f"between {minimum} and {maximum}"
        raise InvalidRankEnvironment(f"{name}={value}: it must be {allowed}.\nFix: export {name}=<number>")
    return value


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only ever mean this machine: ``localhost``, 127.0.0.0/8, ``::1``."""
    name = host.strip().strip("[]").lower()
    if name in {"localhost", "localhost.localdomain", "ip6-localhost"}:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

"""The world in force: who this rank is, and the group and store that it shares with the others."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.dist.arguments import short
from phalanx.dist.environments import InvalidRankEnvironment, detect, single
from phalanx.dist.rank_device import choose_device
from phalanx.dist.rendezvous import exchange, place_on_node, this_host


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks, as `init_world` returns it.

    >>> world = World(rank=5, local_rank=1, node_rank=1, world_size=8, local_world_size=4, device=torch.device("cpu"),
    ...     backend="gloo", source="torchrun")
    >>> world.is_rank_zero
    False

    Args:
        rank: ``0 <= rank < world_size``.
        local_rank: Position among this node's ranks.
        node_rank: Position of this node.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this node.
        device: The device of this rank; CUDA's current device when it is one.
        backend: The group's backend as torch names it; None without a group (a single process).
        source: What told: ``torchrun``, ``mpi``, ``slurm``, ``single``, or ``adopted`` for a group that was there.
    """

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str | None
    source: str

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, the one that writes and prints."""
        return self.rank == 0


@dataclass
class Membership:
    """The world in force, with what belongs to its group."""

    world: World
    group: dist.ProcessGroup | None
    store: Store | None
    timeout_s: float
    audited: bool = False  # the collectives of its first steps were, or are being, compared
    calls: int = 0  # barriers and the like so far: every rank makes the same calls in the same order

    def next_call(self) -> int:
        """A number for the next meeting in the store, the same on every rank."""
        self.calls += 1
        return self.calls


_current: Membership | None = None


def enter(membership: Membership) -> Membership:
    """Make ``membership`` the one in force."""
    global _current
    _current = membership
    return membership


def current_world() -> World:
    """The world of the last `init_world`.

    Raises:
        RuntimeError: There is none yet.
    """
    known = membership_in_force()
    if known is None:
        raise RuntimeError("There is no world yet.\nFix: call init_world() first, on every rank")
    return known.world


def world_or_single() -> World:
    """The current world, else an existing group adopted, else a world of one (without making a group).

    Collective only where a group is adopted for the first time and no variable says which ranks share a node.

    Raises:
        RuntimeError: Variables say that there are several ranks, but nobody has called `init_world`: each rank would take
            itself for the only one.
    """
    known = membership_in_force()
    if known is not None:
        return known.world
    if dist.is_available() and dist.is_initialized():
        return enter(adopt(None, 600)).world
    found = detect()
    if found.world_size > 1:
        raise RuntimeError(
            f"This is rank {found.rank} of {found.world_size} ({found.source}), but there is no world yet.\n"
            "Every rank would work as if it were the only one.\n"
            "Fix: call init_world() at the start of the script"
        )
    return single_world(None)


def membership_in_force() -> Membership | None:
    """The current world, dropped when its group was destroyed or replaced by somebody else."""
    global _current
    if _current is not None:
        exists = dist.is_available() and dist.is_initialized()
        group = dist.group.WORLD if exists else None
        if group is not _current.group:
            _current = None
    return _current


def check_world(world: object) -> None:
    """Raise unless ``world`` is one, or None.

    Raises:
        ValueError: It is something else, such as a number of ranks.
    """
    if world is not None and not (
        hasattr(world, "rank") and hasattr(world, "world_size") and hasattr(world, "device")
    ):
        raise ValueError(f"world={short(world)} is no World.\nFix: world=init_world(), or leave it out")


def single_world(device: str | None) -> World:
    """A world of one rank, without a group."""
    return World(
        rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        device=choose_device(0, 1, None, device),
        backend=None,
        source="single",
    )


def adopt(device: str | None, timeout_s: float) -> Membership:
    """The world of a group that somebody else made; they destroy it."""
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("phalanx", dist.distributed_c10d._get_default_store())
    backend = dist.get_backend_config()
    try:
        found = detect()
    except InvalidRankEnvironment:  # its maker knew better
        found = single.single()
    if (found.rank, found.world_size) != (rank, world_size) or found.local_world_size is None:
        facts = {"host": this_host()}
        peers = exchange(store, "adopted", rank, world_size, facts, timeout_s, "init_world")
        local_rank, ranks_here, node_rank = place_on_node(peers, rank)
    else:
        local_rank, ranks_here = found.local_rank, found.local_world_size
        node_rank = found.node_rank or 0
    chosen = _adopted_device(group, backend, device, local_rank, ranks_here)
    world = World(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=ranks_here,
        device=chosen,
        backend=str(dist.get_backend()),
        source="adopted",
    )
    export_variables(world, None, None)
    return Membership(world=world, group=group, store=store, timeout_s=timeout_s)


def _adopted_device(
    group: dist.ProcessGroup, backend: str, device: str | None, local_rank: int, ranks_here: int
) -> torch.device:
    bound = group.bound_device_id
    if bound is not None and device in (None, bound.type):
        return bound
    if "nccl" not in backend and device is None:
        return torch.device("cpu")
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if device != "cpu" and started and torch.cuda.current_device() != 0:
        return torch.device("cuda", torch.cuda.current_device())  # its maker has chosen already
    chosen = choose_device(local_rank, ranks_here, backend, device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def export_variables(world: World, master_addr: str | None, master_port: int | None) -> None:
    """Tell other libraries in this process what was found; what is set stays as it is."""
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.world_size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_world_size,
        "GROUP_RANK": world.node_rank,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
    }
    for name, value in values.items():
        if value is not None and not os.environ.get(name):
            os.environ[name] = str(value)


def membership_or_none() -> Membership | None:
    """What `world_or_single` finds, None for a world of one without a group."""
    world_or_single()
    return membership_in_force()


def backend_pairs(backend: str) -> list[tuple[str, str]]:
    """Device and backend of each part: ``cpu:gloo,cuda:nccl``; a bare name stands for its own device."""
    pairs = []
    for part in backend.lower().split(","):
        kind, colon, name = part.strip().partition(":")
        pairs.append((kind, name) if colon else ("cuda" if kind == "nccl" else "cpu", kind))
    return pairs

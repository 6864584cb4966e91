"""Where ranks meet: the key-value store, what they tell each other there, and waiting that names who is missing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from phalanx.dist.environments import RankEnvironment

LEAVE_TIMEOUT_S = 5.0


class RanksMissing(TimeoutError):
    """Some ranks did not arrive in time.

    Args:
        message: What was waited for, who came, who did not.
        ranks: The ranks that did not arrive.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RendezvousError(RuntimeError):
    """The store could not be opened, or rank 0's end of it is gone."""


def open_store(found: RankEnvironment, timeout_s: float) -> Store:
    """The store of a world that ``found`` describes; rank 0 serves it unless torchrun's agent does.

    Raises:
        RendezvousError: The port is taken, or nobody answers there within ``timeout_s``.
    """
    timeout = timedelta(seconds=timeout_s)
    if found.master_port is None:
        return PrefixStore("phalanx", HashStore())  # one rank: nobody else will connect
    where = f"MASTER_ADDR={found.master_addr} MASTER_PORT={found.master_port}"
    try:
        store: Store = TCPStore(
            found.master_addr,
            found.master_port,
            found.world_size,
            is_master=serves_store(found.rank),
            timeout=timeout,
            wait_for_workers=False,  # we wait ourselves, and name who is missing
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise RendezvousError(
                f"{where}: that port is taken on {socket.gethostname()}, probably by another run.\n"
                "The ranks of both runs would meet in one store.\n"
                "Fix: export MASTER_PORT=<a free port>, or start with `phalanx run`, which takes a free one"
            ) from None
        raise RendezvousError(
            f"{where}: rank {found.rank} reached nobody there in {timeout_s:g} s ({_first_line(error)}).\n"
            f"Fix: check that rank 0 is running on that host, and that {socket.gethostname()} can resolve and reach it"
        ) from None
    return PrefixStore(f"phalanx/{_attempt(found)}", store)


def serves_store(rank: int) -> bool:
    """Whether this process serves the store: rank 0, unless a launcher does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _attempt(found: RankEnvironment) -> str:
    """A prefix per restart, since torchrun keeps one store over restarts and new ranks would read the addresses of dead ones.

    Only on one node: agents of several nodes count their restarts apart, and would not meet.
    """
    if found.local_world_size == found.world_size:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return "0"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def wait_for_ranks(
    store: Store, prefix: str, ranks: Sequence[int], timeout_s: float, what: str
) -> dict[int, bytes]:
    """Wait until each of ``ranks`` has set ``<prefix>/<rank>``; returns what they set.

    Raises:
        RanksMissing: After ``timeout_s``, naming those that have not.
        RendezvousError: The store went away, usually with rank 0.
    """
    keys = [f"{prefix}/{rank}" for rank in ranks]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
        values = get_all(store, keys)
        return dict(zip(ranks, values, strict=True))
    except dist.DistNetworkError as error:
        raise RendezvousError(
            f"{what}: the store is gone ({_first_line(error)}); rank 0 or its launcher has ended.\n"
            "Fix: look for the first failure in rank 0's log"
        ) from None
    except RuntimeError as error:  # dist.DistStoreError; a FileStore raises a plain one
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        if not missing:
            raise
        here = [rank for rank in ranks if rank not in missing]
        raise RanksMissing(
            f"{what}: {name_ranks(missing)} did not arrive within {timeout_s:g} s "
            f"({name_ranks(here) if here else 'no rank'} did).\n"
            f"Fix: see where {name_ranks(missing)} stood: ended, stuck, or on a path that skips this call",
            missing,
        ) from error


def let_others_read(store: Store, name: str, rank: int, world_size: int) -> None:
    """Rank 0 may serve the store, so it waits here, briefly, until the others have read what it is about.

    Collective.
    """
    if rank != 0:
        store.set(f"{name}/seen/{rank}", "seen")
        return
    with contextlib.suppress(RanksMissing, RendezvousError):
        wait_for_ranks(store, f"{name}/seen", range(1, world_size), LEAVE_TIMEOUT_S, name)


def get_all(store: Store, keys: list[str]) -> list[bytes]:
    """The values of keys that are there."""
    try:
        return store.multi_get(keys)  # one round trip
    except RuntimeError:  # a FileStore has no such call
        return [store.get(key) for key in keys]


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``: consecutive ones joined.

    >>> name_ranks([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def this_host() -> str:
    """This machine or container, told apart from others even where host names repeat."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


def exchange(
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    facts: Mapping[str, object],
    timeout_s: float,
    what: str,
) -> list[dict[str, object]]:
    """Every rank's facts, by rank. Collective, through the store alone: no device is touched.

    Raises:
        RanksMissing: Naming the ranks that did not arrive.
    """
    store.set(f"{name}/{rank}", json.dumps(dict(facts)))
    values = wait_for_ranks(store, name, range(world_size), timeout_s, what)
    return [json.loads(values[other]) for other in range(world_size)]


def refuse_differences(peers: Sequence[Mapping[str, object]], world_size: int) -> None:
    """Raise, alike on every rank, when ranks disagree on the world or share a GPU under NCCL.

    Raises:
        ValueError: Naming the ranks and what each has.
    """
    for key, label in (("world_size", "world size"), ("backend", "backend"), ("device_type", "device")):
        groups = _ranks_by(peers, key)
        if len(groups) > 1:
            listed = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in groups.items())
            hint = (
                "see that each rank's CUDA_VISIBLE_DEVICES names a GPU that exists, or pass device='cpu' everywhere"
                if key == "device_type"
                else "start all ranks with the same command and environment"
            )
            raise ValueError(
                f"The ranks disagree on the {label}: {listed}.\n"
                "Their first collective would hang or fail.\n"
                f"Fix: {hint}"
            )
    shared = {
        gpu: ranks
        for gpu, ranks in _ranks_by(peers, "gpu").items()
        if gpu not in ("None", "") and len(ranks) > 1
    }
    if shared and "nccl" in str(peers[0].get("backend")):
        listed = "; ".join(f"{name_ranks(ranks)}: {gpu}" for gpu, ranks in shared.items())
        raise ValueError(
            f"{world_size} ranks, but some share a GPU: {listed}.\n"
            "NCCL refuses two ranks of a group on one GPU.\n"
            "Fix: start one rank per GPU (phalanx run --nproc-per-node=<GPUs>), or use backend='gloo'"
        )


def _ranks_by(peers: Sequence[Mapping[str, object]], key: str) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, peer in enumerate(peers):
        groups.setdefault(str(peer.get(key)), []).append(rank)
    return groups


def place_on_node(peers: Sequence[Mapping[str, object]], rank: int) -> tuple[int, int, int]:
    """(local_rank, local_world_size, node_rank) of ``rank`` by the hosts of all ranks, nodes in order of their first rank.

    >>> place_on_node([{"host": "a"}, {"host": "b"}, {"host": "a"}], 2)
    (1, 2, 0)
    """
    hosts = [str(peer.get("host")) for peer in peers]
    mine = hosts[rank]
    nodes = list(dict.fromkeys(hosts))
    return hosts[:rank].count(mine), hosts.count(mine), nodes.index(mine)

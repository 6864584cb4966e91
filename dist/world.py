"""The world: this process's rank, its device and its process group, and what ranks do together."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.dist.arguments import require_real, short
from phalanx.dist.collective_audit import start_first_audit
from phalanx.dist.collectives import (
    MOST_S,
    RankZeroFailed,
    all_reduce_sum,
    barrier,
    gather_objects,
    rank_zero_first,
)
from phalanx.dist.environments import RankEnvironment, detect
from phalanx.dist.membership import (
    Membership,
    World,
    adopt,
    backend_pairs,
    current_world,
    enter,
    export_variables,
    membership_in_force,
    single_world,
    world_or_single,
)
from phalanx.dist.order_audit import watch_orders
from phalanx.dist.rank_device import (
    choose_device,
    gpu_identity,
    no_gpu_for_nccl,
    physical_gpu,
    warn_of_late_threads,
)
from phalanx.dist.rendezvous import (
    RanksMissing,
    RendezvousError,
    exchange,
    let_others_read,
    open_store,
    place_on_node,
    refuse_differences,
    serves_store,
    this_host,
    wait_for_ranks,
)
from phalanx.dist.step_recorder import record_if_asked
from phalanx.dist.worker_audit import watch_workers

__all__ = [
    "RankZeroFailed",
    "RanksMissing",
    "RendezvousError",
    "World",
    "all_reduce_sum",
    "barrier",
    "current_world",
    "gather_objects",
    "init_world",
    "rank_zero_first",
    "world_or_single",
]

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 5.0  # a rank that ends must never wait long for its group to be taken down


def init_world(
    backend: str | None = None, timeout_s: float = 600, device: Literal["cpu", "cuda"] | None = None
) -> World:
    """Find this process's place among the ranks, take its device, and join the process group.

    Started by ``phalanx run``, torchrun, ``accelerate launch``, ``mpirun`` or ``srun`` it joins the others; started by plain ``python`` it is
    a world of one, without a group. A group that exists is adopted. Calling it again returns the same world::

        world = init_world()
        model.to(world.device)
        if world.is_rank_zero:
            print(f"{world.world_size} ranks")

    The device is set, and given to the group, before the first collective. RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT are exported where they are not set, so that other libraries agree. On one node,
    GLOO_SOCKET_IFNAME is set to the loopback interface where it is not set: gloo would otherwise look up
    this host's name, which need not resolve. The group is taken down when the process ends. In the first 3 steps, what ranks
    call in torch.distributed is compared, see `audit_collectives`.

    Collective: every rank must call it.

    Args:
        backend: By default ``gloo`` on the CPU and ``cpu:gloo,cuda:nccl`` with GPUs. ``gloo`` alone means the CPU unless
            ``device="cuda"``.
        timeout_s: How long to wait for the other ranks here, and in each later collective, in seconds.
        device: ``cpu``, ``cuda``, or None for CUDA where there is a GPU. Which GPU follows from the local rank.

    Raises:
        ValueError: Variables are partly set or contradict each other, there are more local ranks than GPUs, ranks share a GPU
            under NCCL, the ranks disagree, or an existing group has another backend.
        RanksMissing: Ranks did not arrive within ``timeout_s``; the message names them.
        RendezvousError: The port is taken, or rank 0 cannot be reached.
    """
    if not (device is None or (isinstance(device, str) and device in ("cpu", "cuda"))):
        raise ValueError(
            f"device={short(device)}: say 'cpu' or 'cuda'.\n"
            "Which GPU follows from the local rank; two ranks told the same one would share it.\n"
            "Fix: init_world(device='cuda'), and choose GPUs with `phalanx run --gpus` or CUDA_VISIBLE_DEVICES"
        )
    timeout_s = require_real("timeout_s", timeout_s, above=0, at_most=MOST_S, fix="seconds, such as 600")
    _check_backend(backend)
    record_if_asked()
    known = membership_in_force()
    if known is not None:
        _refuse_other_backend(known.world, backend, device)
        return known.world
    if dist.is_available() and dist.is_initialized():
        world = enter(adopt(device, timeout_s)).world
        _refuse_other_backend(world, backend, device)
        start_first_audit()
        watch_orders()
        watch_workers()
        return world
    found = detect()
    joined = (
        _single(found, backend, device)
        if found.source == "single"
        else _join(found, backend, device, timeout_s)
    )
    world = enter(joined).world
    start_first_audit()
    watch_orders()
    watch_workers()
    warn_of_late_threads()
    logger.info("%s", describe(world))
    return world


def _check_backend(backend: str | None) -> None:
    if backend is None:
        return
    known = {*dist.Backend.backend_list} - {"undefined"}
    parts = backend_pairs(backend) if isinstance(backend, str) else []
    unknown = [name for _, name in parts if name not in known]
    if not parts or unknown:
        raise ValueError(
            f"backend={short(backend)}: torch has no such backend.\n"
            "Fix: leave it out, or 'gloo', 'nccl', 'cpu:gloo,cuda:nccl'"
        )


def describe(world: World) -> str:
    """One line for a log: who this rank is and which physical GPU it has."""
    text = f"rank {world.rank} of {world.world_size} (local {world.local_rank}, node {world.node_rank}) on {world.device}"
    if world.device.type == "cuda":
        text += f" = {physical_gpu(world.device.index)}"
    return f"{text}, backend {world.backend}, from {world.source}"


def _single(found: RankEnvironment, backend: str | None, device: str | None) -> Membership:
    if backend is not None and "nccl" in backend.lower() and not torch.cuda.is_available():
        raise no_gpu_for_nccl(backend)
    return Membership(world=single_world(device), group=None, store=None, timeout_s=0)


def _join(found: RankEnvironment, backend: str | None, device: str | None, timeout_s: float) -> Membership:
    if device is None and backend is not None and "nccl" not in backend.lower():
        device = "cpu"
    ranks_here = found.local_world_size or 1
    chosen = choose_device(found.local_rank, ranks_here, backend, device)
    backend = (backend or ("gloo" if chosen.type == "cpu" else "cpu:gloo,cuda:nccl")).lower()
    if "nccl" in backend and chosen.type != "cuda":
        raise no_gpu_for_nccl(backend)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # before the store, the group and every collective
    store = open_store(found, timeout_s)
    facts = {
        "host": this_host(),
        "world_size": found.world_size,
        "backend": backend,
        "device_type": chosen.type,
        "gpu": gpu_identity(chosen.index) if chosen.type == "cuda" else None,
    }
    peers = exchange(store, "peers", found.rank, found.world_size, facts, timeout_s, "init_world")
    try:
        refuse_differences(peers, found.world_size)
    except ValueError:
        let_others_read(store, "peers", found.rank, found.world_size)
        raise
    _, counted, node_rank = place_on_node(peers, found.rank)
    world = World(
        rank=found.rank,
        local_rank=found.local_rank,
        node_rank=node_rank if found.node_rank is None else found.node_rank,
        world_size=found.world_size,
        local_world_size=found.local_world_size or counted,
        device=chosen,
        backend=backend,
        source=found.source,
    )
    export_variables(world, found.master_addr, found.master_port)
    if "gloo" in backend and world.local_world_size == world.world_size:
        _keep_gloo_on_loopback()
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=chosen if chosen.type == "cuda" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    _leave_at_exit(group, store, world)
    return Membership(world=world, group=group, store=store, timeout_s=timeout_s)


def _keep_gloo_on_loopback() -> None:
    """Gloo looks up the host's own name for its address, which fails where that does not resolve."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    try:
        flags = int(Path("/sys/class/net/lo/flags").read_text(), 16)
    except (OSError, ValueError):
        return
    if flags & 1:  # up
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _leave_at_exit(group: dist.ProcessGroup, store: Store, world: World) -> None:
    pid = os.getpid()

    def leave() -> None:
        if os.getpid() != pid or not dist.is_initialized() or dist.group.WORLD is not group:
            return
        if world.rank == 0 and serves_store(world.rank) and getattr(sys, "last_value", None) is None:
            # The store ends with rank 0, so it goes last, unless it failed: that must show at once.
            with contextlib.suppress(Exception):
                wait_for_ranks(store, "left", range(1, world.world_size), LEAVE_TIMEOUT_S, "leaving")
        # NCCL waits for collectives that peers which died will never join: give up then, the process ends
        # anyway. Nothing else may wait in that thread: one that came back to Python while the interpreter is
        # taken down would abort the process.
        worker = threading.Thread(target=_destroy, name="phalanx-leave", daemon=True)
        worker.start()
        worker.join(LEAVE_TIMEOUT_S)
        if not worker.is_alive():
            with contextlib.suppress(Exception):  # the store may be gone
                store.set(f"left/{world.rank}", "left")

    atexit.register(leave)


def _destroy() -> None:
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _refuse_other_backend(world: World, backend: str | None, device: str | None) -> None:
    if device is not None and world.device.type != device:
        raise ValueError(
            f"init_world(device={device!r}), but this world's device is {world.device}.\n"
            "Fix: ask for the device in the first call"
        )
    if backend is None or world.backend is None:
        return
    existing = dist.get_backend_config() if dist.is_initialized() else world.backend
    missing = [pair for pair in backend_pairs(backend) if pair not in backend_pairs(existing)]
    if missing:
        raise ValueError(
            f"init_world(backend={backend!r}), but the process group that exists has {existing!r}.\n"
            "Its collectives would not run where you asked.\n"
            "Fix: leave backend out to use that group, or make it with the backend you want"
        )

"""A benchmark as each rank runs it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from phalanx.dist.collective_audit import audit_collectives
from phalanx.dist.collectives import gather_objects
from phalanx.dist.membership import World
from phalanx.dist.world import init_world
from phalanx.tools.bench import report as lines
from phalanx.tools.bench.measuring import measure_latency, measure_sizes
from phalanx.tools.bench.settings import BenchSettings
from phalanx.tools.bench.stragglers import slowest_pair, slowest_rank
from phalanx.tools.usage import CannotFinish


def run_rank(settings: BenchSettings, show: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and return the report; rank 0 shows the lines as they come. Collective.

    Raises:
        CannotFinish: The backend cannot do this.
    """
    world = _world(settings)
    about = _about(settings, world)
    say = show if world.is_rank_zero else _silent
    for line in lines.head_lines(about):
        say(line)
    measure = measure_latency if settings.kind == "latency" else measure_sizes
    results = []
    try:
        for result in measure(settings, world):
            results.append(result)
            say(lines.result_line(result))
        slow = {"slowest_rank": slowest_rank(world), "slowest_pair": slowest_pair(world)}
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise _cannot(settings, world, error) from error
    found = {**about, "results": results, **slow, "correct": all(result["correct"] for result in results)}
    for line in lines.foot_lines(found):
        say(line)
    return found


def leave() -> bool:
    """Take the group down, here and now, since nothing is under way any more; whether this was rank 0. Collective."""
    rank = torch.distributed.get_rank()
    gather_objects(None)
    torch.distributed.destroy_process_group()
    return rank == 0


def _silent(line: str) -> None:
    """Ranks other than 0."""


def _world(settings: BenchSettings) -> World:
    if settings.backend == "nccl" and not torch.cuda.is_available():
        raise CannotFinish("--backend nccl: no GPU is visible to torch here.", fix="--backend gloo")
    world = init_world(backend=settings.backend, device="cpu" if settings.backend == "gloo" else None)
    if world.world_size == 1 and not torch.distributed.is_initialized():
        store = HashStore()
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    audit_collectives(0)  # it would be timed as well
    return world


def _about(settings: BenchSettings, world: World) -> dict[str, Any]:
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    hosts = gather_objects(socket.gethostname())
    return {
        "schema": lines.SCHEMA,
        "benchmark": settings.kind,
        "world_size": world.world_size,
        "nodes": len(set(hosts)),
        "hosts": hosts,
        "backend": "nccl" if world.device.type == "cuda" else "gloo",
        "device": device,
        "dtype": settings.dtype,
        "iterations": settings.iterations,
        "warmup": settings.warmup,
        "torch_version": str(torch.__version__),
    }


def _cannot(settings: BenchSettings, world: World, error: Exception) -> CannotFinish:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in first:
        return CannotFinish(f"rank {world.rank}: memory is full: {first}", fix="a smaller --max-bytes")
    return CannotFinish(
        f"{settings.kind} of {settings.dtype} on rank {world.rank}: {first}",
        fix="another --dtype or --backend, or a newer torch; the others may have failed because this rank did",
    )

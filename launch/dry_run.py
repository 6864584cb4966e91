"""`phalanx run --dry-run`: what would run, in words."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from phalanx.launch.placement import Placement
from phalanx.launch.spec import RunSpec

#: Variables that each rank gets, beside those in the description; as torchrun sets them.
_RANK_VARIABLES = (
    "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK, ROLE_NAME, "
    "ROLE_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_*"
)


def description(spec: RunSpec, placement: Placement) -> str:
    """The job as `--dry-run` shows it: a line per rank, and what all of them share."""
    return "\n".join(_lines(spec, placement))


def _lines(spec: RunSpec, placement: Placement) -> Iterator[str]:
    count = spec.nproc_per_node
    yield f"Would start {count} rank{'s' * (count > 1)} on this node:"
    yield _row("command", shlex.join(_command(spec)))
    for local_rank in range(count):
        yield _row(
            f"rank {local_rank}" if spec.nnodes_max == 1 else f"local rank {local_rank}",
            _rank(spec, placement, local_rank),
        )
    yield _row("environment", _RANK_VARIABLES)
    if spec.gpus is not None:
        yield _row("", f"CUDA_VISIBLE_DEVICES={','.join(spec.gpus)}")
    yield _row("threads", placement.threads)
    yield _row("nodes", _nodes(spec))
    yield _row("meeting", _meeting(spec))
    yield _row("start", "forked from a process that holds torch" if spec.preload else "new Python processes")
    yield _row("restarts", str(spec.max_restarts))
    yield _row("log folder", str(spec.log_dir))
    for note in spec.notes:
        yield _row("note", note)


def _row(title: str, text: str) -> str:
    return f"  {title:12} {text}"


def _command(spec: RunSpec) -> list[str]:
    if spec.target.kind == "command":
        return [spec.target.name, *spec.args]
    flag = ["-m"] if spec.target.kind == "module" else []
    return [sys.executable, "-u", *flag, spec.target.name, *spec.args]


def _rank(spec: RunSpec, placement: Placement, local_rank: int) -> str:
    device = placement.devices[local_rank] if local_rank < len(placement.devices) else "CPU"
    shown = 0 if spec.virtual_local_rank else local_rank
    rank = f"RANK={local_rank} " if spec.nnodes_max == 1 else ""
    return f"{rank}LOCAL_RANK={shown} on {device}"


def _nodes(spec: RunSpec) -> str:
    if spec.nnodes_max == 1:
        return "1"
    count = (
        str(spec.nnodes_max)
        if spec.nnodes_min == spec.nnodes_max
        else f"{spec.nnodes_min} to {spec.nnodes_max}"
    )
    mine = "numbered by the rendezvous" if spec.node_rank is None else f"this is node {spec.node_rank}"
    return f"{count}, {mine}"


def _meeting(spec: RunSpec) -> str:
    if spec.standalone:
        return "on this node, at a free port"
    if spec.rdzv_backend == "static":
        return f"static, at {spec.master_addr}:{spec.master_port}"
    return f"{spec.rdzv_backend}, at {spec.rdzv_endpoint}, job {spec.rdzv_id}"

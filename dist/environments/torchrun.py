"""torchrun's variables: what ``phalanx run``, torchrun and ``accelerate launch`` set for each rank."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.dist.environments.rank_environment import (
    InvalidRankEnvironment,
    RankEnvironment,
    is_loopback,
    read_int,
)

IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def is_set(environ: Mapping[str, str], name: str) -> bool:
    """Whether the variable has a value; an empty one counts as unset, as shells leave them so."""
    return bool(environ.get(name, "").strip())


def from_environ(environ: Mapping[str, str]) -> RankEnvironment | None:
    """The rank that torchrun's variables describe, None when none of them is set.

    ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` say who this is, ``MASTER_ADDR`` and ``MASTER_PORT`` where the
    ranks meet (one rank alone needs neither). A missing ``LOCAL_RANK`` is filled in where only one
    answer is possible: one rank in all, one rank per node (``LOCAL_WORLD_SIZE=1``), or one node (``LOCAL_WORLD_SIZE``
    equal to ``WORLD_SIZE``, or a loopback ``MASTER_ADDR``). Otherwise it is asked for: ``RANK % GPUs``
    is wrong as soon as nodes differ.

    >>> from_environ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).local_rank
    1

    Raises:
        InvalidRankEnvironment: Only some variables are set (the message names the others), one is not a
            number, or they contradict each other.
    """
    if not any(is_set(environ, name) for name in IDENTITY):
        return None
    rank, world_size = read_int(environ, "RANK"), read_int(environ, "WORLD_SIZE", minimum=1)
    local_rank, ranks_here = read_int(environ, "LOCAL_RANK"), read_int(environ, "LOCAL_WORLD_SIZE", minimum=1)
    master_addr = environ.get("MASTER_ADDR", "").strip()
    master_port = read_int(environ, "MASTER_PORT", minimum=1, maximum=65535)
    missing = [name for name in ("RANK", "WORLD_SIZE") if not is_set(environ, name)]
    one_node = world_size is not None and (
        world_size == 1 or ranks_here == world_size or is_loopback(master_addr)
    )
    if local_rank is None:
        if one_node:
            local_rank = rank
        elif ranks_here == 1:
            local_rank = 0
        else:
            missing.append("LOCAL_RANK")
    if world_size != 1:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not is_set(environ, name)]
    if missing or rank is None or world_size is None or local_rank is None:
        raise _partly_set(environ, missing)
    if ranks_here is None and one_node:
        ranks_here = world_size
    _refuse_lone_nodes(environ, master_addr, world_size)
    return RankEnvironment(
        rank=rank,
        local_rank=local_rank,
        node_rank=_node_rank(environ, rank, local_rank, world_size, ranks_here),
        world_size=world_size,
        local_world_size=ranks_here,
        master_addr=master_addr or "127.0.0.1",
        master_port=master_port,
        source="torchrun",
    )


def _node_rank(
    environ: Mapping[str, str], rank: int, local_rank: int, world_size: int, ranks_here: int | None
) -> int | None:
    for name in ("GROUP_RANK", "NODE_RANK"):
        node_rank = read_int(environ, name)
        if node_rank is not None:
            return node_rank
    if ranks_here == world_size:
        return 0
    if ranks_here == 1:
        return rank
    return None


def _partly_set(environ: Mapping[str, str], missing: list[str]) -> InvalidRankEnvironment:
    names = (*IDENTITY, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = " ".join(f"{name}={environ[name]}" for name in names if is_set(environ, name))
    advice = "Fix: start the ranks with `phalanx run` or torchrun, which set all of them"
    if missing == ["LOCAL_RANK"]:
        advice = (
            "Fix: export LOCAL_RANK=<position among this node's ranks>, or LOCAL_WORLD_SIZE=1 when every node "
            "has one rank"
        )
    else:
        advice += f"; for one process: unset {' '.join(name for name in IDENTITY if is_set(environ, name))}"
    return InvalidRankEnvironment(
        f"{found}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.\n"
        "This process cannot tell its place among the ranks, and the others would wait for it.\n"
        f"{advice}"
    )


def _refuse_lone_nodes(environ: Mapping[str, str], master_addr: str, world_size: int) -> None:
    """A loopback MASTER_ADDR on several Slurm nodes: every node would train a world of its own."""
    if world_size == 1 and not master_addr:
        return
    refuse_loopback_across_nodes(environ, master_addr)


def refuse_loopback_across_nodes(environ: Mapping[str, str], master_addr: str) -> None:
    """Raise when Slurm started this on several nodes and ``MASTER_ADDR`` points each node at itself."""
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        nodes = read_int(environ, name, minimum=1)
        if nodes is not None:
            break
    else:
        return
    if read_int(environ, "GROUP_WORLD_SIZE") == nodes:
        return  # agents of all nodes have met, and one of them found this address: all nodes are one machine
    if nodes > 1 and is_loopback(master_addr):
        raise InvalidRankEnvironment(
            f"MASTER_ADDR={master_addr} on {name}={nodes} nodes: every node would reach only itself.\n"
            f"There would be {nodes} separate runs of one node each, not one run of {nodes}.\n"
            "Fix: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1), or leave it "
            f"unset under srun; to train on this node alone: export {name}=1"
        )

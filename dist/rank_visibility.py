"""One process, one device: what each local rank's environment has to be. No torch needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.dist.arguments import require_int, short
from phalanx.dist.gpus import Gpu
from phalanx.dist.visibility import (
    VARIABLE,
    InvalidVisibleDevices,
    entries_of,
    listed_inventory,
    read_environ,
)


def visible_devices_per_rank(
    local_world_size: int,
    environ: Mapping[str, str] | None = None,
    inventory: int | Sequence[Gpu] | None = None,
) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES of each local rank, where ranks cannot share one list; None where they can.

    CUDA shows a process one MIG instance at most, so that with a list of two the rank 1 has no ``cuda:1``. Each rank gets
    its own, as ``cuda:0``:

    >>> visible_devices_per_rank(2, {"CUDA_VISIBLE_DEVICES": "MIG-aaaa,MIG-bbbb"}, 1)
    ['MIG-aaaa', 'MIG-bbbb']
    >>> visible_devices_per_rank(2, {"CUDA_VISIBLE_DEVICES": "0,1"}, 2) is None
    True

    Collectives between MIG instances are not generally supported: NCCL may refuse them, gloo works.

    Args:
        local_world_size: Ranks on this node, 1 or more.
        environ: The variables to read, by default this process's.
        inventory: This node's GPUs: how many, or a list; None asks NVML.

    Raises:
        ValueError: ``local_world_size`` is no such number.
        InvalidVisibleDevices: There are more ranks than instances, or one is named twice or unknown.
    """
    try:
        local_world_size = require_int("local_world_size", local_world_size, at_least=1)
    except ValueError:
        raise ValueError(
            f"local_world_size={short(local_world_size)}: a number of ranks is 1 or more.\nFix: the ranks of this node"
        ) from None
    value = read_environ(environ).get(VARIABLE, "")
    entries = entries_of(value)
    if not all(entry.startswith("MIG-") for entry in entries):
        return None
    names = [_full_name(entry, value, listed_inventory(inventory) or []) for entry in entries]
    for name, entry in zip(names, entries, strict=True):
        if names.count(name) > 1:
            raise InvalidVisibleDevices(
                f"{VARIABLE}={value!r}: {entry!r} is there twice; CUDA would hide every GPU.\nFix: name each instance once"
            )
    if len(names) < local_world_size:
        raise InvalidVisibleDevices(
            f"{VARIABLE}={value!r} has {len(names)} MIG instance{'s' * (len(names) > 1)} for {local_world_size} ranks on this "
            f"node.\nLOCAL_RANK {len(names)} and up would have no device.\n"
            f"Fix: start {len(names)} ranks, or name more instances (nvidia-smi -L lists them)"
        )
    return names[:local_world_size]


def _full_name(entry: str, value: str, gpus: Sequence[Gpu]) -> str:
    known = [uuid for gpu in gpus for uuid in gpu.mig_uuids]
    fitting = [uuid for uuid in known if uuid.startswith(entry)]
    if len(fitting) == 1 or not known or "/" in entry:
        return fitting[0] if len(fitting) == 1 else entry
    raise InvalidVisibleDevices(
        f"{VARIABLE}={value!r}: {entry!r} fits {len(fitting)} of this node's {len(known)} MIG instances.\n"
        "Fix: nvidia-smi -L lists them"
    )

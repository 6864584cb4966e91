"""Which rank writes which part of which tensor, by torch.distributed.checkpoint's plan.

Each rank writes one safetensors file, ``shard-<rank>.safetensors``, and rank 0 an index, ``shards.json``,
that says of every tensor its dtype, shape and the boxes it lies in. A tensor that several ranks hold alike is
written by one of them. Nothing is pickled, and the reader may be any number of ranks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.dist.arguments import require_path
from phalanx.dist.checkpoint_files import DTYPES, SHARDS_FILE
from phalanx.dist.shards import is_sharded
from phalanx.dist.stored_tensors import StoredTensors
from phalanx.dist.world import World, gather_objects

Parts = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class ShardPlan:
    """What this rank writes, and the index of what all of them write."""

    file: str
    tensors: dict[str, Tensor]
    index: dict[str, Any]


def any_sharded(parts: Parts) -> bool:
    """Whether some tensor is held in parts, so that no rank can write it alone."""
    return any(is_sharded(tensor) for tensors in parts.values() for tensor in tensors.values())


def shard_file(rank: int) -> str:
    """The name of what a rank writes."""
    return f"shard-{rank}.safetensors"


def plan_shards(parts: Parts, metadata: Mapping[str, Mapping[str, str]], world: World) -> ShardPlan:
    """Share the writing out among ranks; nothing is copied or written.

    Collective: every rank must call it, with the same names.

    Raises:
        ValueError: The ranks' parts do not make up whole tensors.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    # One flat dict of tensors needs none of the planner's flattening; the index holds what its metadata would.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    flat = {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
    planner.set_up_planner(flat, None, world.is_rank_zero)
    # Every rank makes the same global plan from what all of them have; there is nothing to send back.
    plans, all_metadata = planner.create_global_plan(gather_objects(planner.create_local_plan()))
    mine = {
        _key(item.index.fqn, item.index.offset): planner.resolve_data(item)
        for item in planner.finish_plan(plans[world.rank]).items
    }
    written_by = {
        _key(item.index.fqn, item.index.offset): shard_file(rank)
        for rank, plan in enumerate(plans)
        for item in plan.items
    }
    index: dict[str, Any] = {
        part: {"metadata": dict(metadata.get(part, {})), "tensors": {}} for part in parts
    }
    for fqn, stored in all_metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        part, _, name = fqn.partition("/")
        chunks = [
            {"file": written_by[key], "key": key, "offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
            for chunk in stored.chunks
            for key in (_key(fqn, chunk.offsets),)
        ]
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        index[part]["tensors"][name] = {
            "dtype": DTYPES.get(dtype, dtype),
            "shape": list(stored.size),
            "chunks": chunks,
        }
    tensors = {key: tensor for key, tensor in mine.items() if isinstance(tensor, Tensor)}
    return ShardPlan(shard_file(world.rank), tensors, {"parts": index})


def _key(fqn: str, offset: Any) -> str:
    """A chunk's name in its file: the tensor's, and where the chunk begins."""
    return f"{fqn}@{','.join(map(str, offset or ()))}"


def with_tensors(plan: ShardPlan, tensors: dict[str, Tensor]) -> ShardPlan:
    """The plan over copies of its tensors."""
    return dataclasses.replace(plan, tensors=tensors)


def consolidate_weights(checkpoint: str | os.PathLike[str], file: str | os.PathLike[str]) -> Path:
    """Make one ``.safetensors`` file of a checkpoint's weights, for tools that know neither phalanx nor shards.

    Names that share a tensor in the model are both in the file, so that it loads strictly::

        consolidate_weights("checkpoints/step-500", "weights.safetensors")
        model.load_state_dict(safetensors.torch.load_file("weights.safetensors"))

    It runs in one process, needs no process group, and holds one tensor in memory at a time.

    Args:
        checkpoint: A ``step-<N>`` folder, sharded or not.
        file: What to write; replaced if it exists.

    Raises:
        MissingCheckpointError: The folder is not there.
        DamagedFileError: A tensor is not what was written.
    """
    from phalanx.dist.checkpoint_files import write_tensors
    from phalanx.dist.checkpoint_sources import MissingCheckpointError

    folder, path = require_path("checkpoint", checkpoint), require_path("file", file)
    if not any((folder / name).is_file() for name in ("model.safetensors", SHARDS_FILE)):
        raise MissingCheckpointError(f"{folder}: no checkpoint folder.\nFix: name one called step-<N>")
    stored = StoredTensors(folder, "model")
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write_tensors(temporary, stored.on_meta(), {}, stored.__getitem__)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path

"""phalanx.dist: from one device to many ranks, in your own training loop.

Names load on first use, so importing this package imports neither torch nor NVML.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.dist.augment import Cutout as Cutout
    from phalanx.dist.augment import HorizontalFlip as HorizontalFlip
    from phalanx.dist.augment import Normalize as Normalize
    from phalanx.dist.augment import RandomCrop as RandomCrop
    from phalanx.dist.augment import Shift as Shift
    from phalanx.dist.augment import augment_batch as augment_batch
    from phalanx.dist.augment_policies import RandAugment as RandAugment
    from phalanx.dist.augment_policies import TrivialAugment as TrivialAugment
    from phalanx.dist.batch_samplers import ShardBatchSampler as ShardBatchSampler
    from phalanx.dist.bisect import bisect_divergence as bisect_divergence
    from phalanx.dist.checkpoint_shards import consolidate_weights as consolidate_weights
    from phalanx.dist.checkpoints import CheckpointManager as CheckpointManager
    from phalanx.dist.checkpoints import Restored as Restored
    from phalanx.dist.collective_audit import audit_collectives as audit_collectives
    from phalanx.dist.devices import Gpu as Gpu
    from phalanx.dist.devices import VisibleDevices as VisibleDevices
    from phalanx.dist.devices import select_devices as select_devices
    from phalanx.dist.devices import visible_devices as visible_devices
    from phalanx.dist.devices import visible_devices_per_rank as visible_devices_per_rank
    from phalanx.dist.engines.engine import Engine as Engine
    from phalanx.dist.engines.engine import StepInfo as StepInfo
    from phalanx.dist.epochs import set_epoch as set_epoch
    from phalanx.dist.iterable import shard_iterable as shard_iterable
    from phalanx.dist.length_buckets import LengthBucketSampler as LengthBucketSampler
    from phalanx.dist.loaders import ShardLoader as ShardLoader
    from phalanx.dist.metrics import Accuracy as Accuracy
    from phalanx.dist.metrics import Mean as Mean
    from phalanx.dist.numerics import NumericsWarning as NumericsWarning
    from phalanx.dist.parallel import parallelize as parallelize
    from phalanx.dist.plan import Plan as Plan
    from phalanx.dist.plan import Progress as Progress
    from phalanx.dist.samplers import ShardSampler as ShardSampler
    from phalanx.dist.seeds import class_weights as class_weights
    from phalanx.dist.seeds import seed_everything as seed_everything
    from phalanx.dist.state_dict import Match as Match
    from phalanx.dist.state_dict import canonical_keys as canonical_keys
    from phalanx.dist.state_dict import load_state_dict as load_state_dict
    from phalanx.dist.state_dict import match_state_dict as match_state_dict
    from phalanx.dist.state_dict import unwrap as unwrap
    from phalanx.dist.sync_batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
    from phalanx.dist.sync_batch_norm import revert_sync_batchnorm as revert_sync_batchnorm
    from phalanx.dist.tensor_loader import TensorLoader as TensorLoader
    from phalanx.dist.weighted_sampler import WeightedShardSampler as WeightedShardSampler
    from phalanx.dist.world import World as World
    from phalanx.dist.world import all_reduce_sum as all_reduce_sum
    from phalanx.dist.world import barrier as barrier
    from phalanx.dist.world import gather_objects as gather_objects
    from phalanx.dist.world import init_world as init_world
    from phalanx.dist.world import rank_zero_first as rank_zero_first

_HOME = {
    "Accuracy": "metrics",
    "CheckpointManager": "checkpoints",
    "Cutout": "augment",
    "Engine": "engines.engine",
    "Gpu": "devices",
    "HorizontalFlip": "augment",
    "LengthBucketSampler": "length_buckets",
    "Match": "state_dict",
    "Mean": "metrics",
    "Normalize": "augment",
    "NumericsWarning": "numerics",
    "Plan": "plan",
    "Progress": "plan",
    "RandAugment": "augment_policies",
    "RandomCrop": "augment",
    "Restored": "checkpoints",
    "ShardBatchSampler": "batch_samplers",
    "ShardLoader": "loaders",
    "ShardSampler": "samplers",
    "Shift": "augment",
    "StepInfo": "engines.engine",
    "TensorLoader": "tensor_loader",
    "TrivialAugment": "augment_policies",
    "VisibleDevices": "devices",
    "WeightedShardSampler": "weighted_sampler",
    "World": "world",
    "all_reduce_sum": "world",
    "audit_collectives": "collective_audit",
    "augment_batch": "augment",
    "barrier": "world",
    "bisect_divergence": "bisect",
    "canonical_keys": "state_dict",
    "class_weights": "seeds",
    "consolidate_weights": "checkpoint_shards",
    "convert_sync_batchnorm": "sync_batch_norm",
    "gather_objects": "world",
    "init_world": "world",
    "load_state_dict": "state_dict",
    "match_state_dict": "state_dict",
    "parallelize": "parallel",
    "rank_zero_first": "world",
    "revert_sync_batchnorm": "sync_batch_norm",
    "seed_everything": "seeds",
    "select_devices": "devices",
    "set_epoch": "epochs",
    "shard_iterable": "iterable",
    "unwrap": "state_dict",
    "visible_devices": "devices",
    "visible_devices_per_rank": "devices",
}

__all__ = [
    "Accuracy",
    "CheckpointManager",
    "Cutout",
    "Engine",
    "Gpu",
    "HorizontalFlip",
    "LengthBucketSampler",
    "Match",
    "Mean",
    "Normalize",
    "NumericsWarning",
    "Plan",
    "Progress",
    "RandAugment",
    "RandomCrop",
    "Restored",
    "ShardBatchSampler",
    "ShardLoader",
    "ShardSampler",
    "Shift",
    "StepInfo",
    "TensorLoader",
    "TrivialAugment",
    "VisibleDevices",
    "WeightedShardSampler",
    "World",
    "all_reduce_sum",
    "audit_collectives",
    "augment_batch",
    "barrier",
    "bisect_divergence",
    "canonical_keys",
    "class_weights",
    "consolidate_weights",
    "convert_sync_batchnorm",
    "gather_objects",
    "init_world",
    "load_state_dict",
    "match_state_dict",
    "parallelize",
    "rank_zero_first",
    "revert_sync_batchnorm",
    "seed_everything",
    "select_devices",
    "set_epoch",
    "shard_iterable",
    "unwrap",
    "visible_devices",
    "visible_devices_per_rank",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Every parameter of every public name, how to call it with one argument replaced, and what it takes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import phalanx.dist as library
from phalanx.dist.bisect import NothingRecorded
from tests.dist.wrong_values import (
    Takes,
    any_of,
    flag,
    kind,
    nothing,
    or_none,
    real,
    text,
    whole,
)

IMAGES = torch.zeros(4, 1, 6, 6, dtype=torch.uint8)
LABELS = torch.arange(4)
DATA = TensorDataset(torch.arange(8.0).view(8, 1))
SEED = whole(-(1 << 63), most=1 << 200)


def _net() -> nn.Module:
    return nn.Linear(1, 1)


def augmented(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make a transform and carry it out."""

    def call(**arguments: Any) -> Any:
        return library.augment_batch(IMAGES, [make(**arguments)], key=1, positions=np.arange(4))

    return call


def listed(make: Callable[..., Any], **defaults: Any) -> Callable[..., Any]:
    """Make an iterable and go through it."""
    return lambda **arguments: list(make(**{**defaults, **arguments}))


def called(make: Callable[[], Any], method: str, **defaults: Any) -> Callable[..., Any]:
    """Call a method of a fresh object."""
    return lambda **arguments: getattr(make(), method)(**{**defaults, **arguments})


def positional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass what comes by name by place."""
    return lambda **arguments: function(*arguments.values())


def parallel(**arguments: Any) -> Any:
    model = _net()
    given = {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), **arguments}
    return library.parallelize(**given)


def manager(**arguments: Any) -> Any:
    model = _net()
    with tempfile.TemporaryDirectory() as folder:
        given = {"folder": folder, "model": model, "optimizer": SGD(model.parameters(), lr=0.1), **arguments}
        library.CheckpointManager(**given)


def restored(**arguments: Any) -> None:
    model = _net()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = library.CheckpointManager(
            folder, model=model, optimizer=SGD(model.parameters(), lr=0.1)
        )
        checkpoints.restore(**arguments)


def bisected(**arguments: Any) -> None:
    """What fails is told as `NothingRecorded`, which says that the arguments were taken."""
    with contextlib.suppress(NothingRecorded):
        library.bisect_divergence(**{"start_ranks": lambda world_size, variables: 1, **arguments})


def first(**arguments: Any) -> None:
    with library.rank_zero_first(**arguments):
        pass


def only_none(value: Any) -> bool:
    """What it takes besides are objects that no row makes."""
    return value is None


def empty(value: Any) -> bool:
    """A list or tuple without elements."""
    return isinstance(value, (list, tuple)) and not value


def several(value: Any) -> bool:
    """An array or a tensor with dims."""
    return isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim > 0


def numbers(value: Any) -> bool:
    """One or more numbers of at least 0 in one dim."""
    if not isinstance(value, (list, tuple)) and not several(value):
        return False
    found = np.asarray(value)
    return found.ndim == 1 and found.size > 0 and found.dtype.kind in "iuf" and bool((found >= 0).all())


def real_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_complex()


def no_plain_value(value: Any) -> bool:
    return not isinstance(value, (str, bytes, int, float, complex, type))


def kind_of_scheduler(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


RANK, WORLD = whole(0, 7), whole(8)  # the other being 8 and 7
SHARE = {"rank": 7, "world_size": 8}
TAIL, PATH, FILL = nothing, text, whole(0, 255)
TABLE: dict[str, tuple[Callable[..., Any], dict[str, Takes]]] = {
    # ---- what a step sees
    "ShardSampler": (
        listed(library.ShardSampler, num_items=20, **SHARE),
        {
            "num_items": whole(),
            "rank": RANK,
            "world_size": WORLD,
            "shuffle": flag,
            "seed": or_none(SEED),
            "tail": TAIL,
        },
    ),
    "ShardSampler.set_epoch": (
        called(lambda: library.ShardSampler(5, 0, 2), "set_epoch"),
        {"epoch": whole()},
    ),
    "ShardSampler.state_dict": (
        called(lambda: library.ShardSampler(5, 0, 2), "state_dict"),
        {"consumed": or_none(whole())},
    ),
    "ShardSampler.load_state_dict": (
        called(lambda: library.ShardSampler(5, 0, 2), "load_state_dict"),
        {"state": nothing},
    ),
    "WeightedShardSampler": (
        listed(library.WeightedShardSampler, weights=[1, 2], **SHARE),
        {
            "weights": numbers,
            "num_samples": or_none(whole(1)),
            "rank": RANK,
            "world_size": WORLD,
            "replacement": flag,
            "seed": SEED,
            "tail": TAIL,
        },
    ),
    "LengthBucketSampler": (
        listed(library.LengthBucketSampler, lengths=[1] * 9, global_batch_size=8, **SHARE),
        {
            "lengths": any_of(empty, numbers),
            "global_batch_size": whole(8),
            "max_tokens": only_none,
            "rank": RANK,
            "world_size": nothing,
            "shuffle": flag,
            "seed": SEED,
            "tail": TAIL,
            "pool_size": or_none(whole(1)),
        },
    ),
    "ShardBatchSampler": (
        listed(library.ShardBatchSampler, sampler=[[0], [1]], **SHARE),
        {
            "sampler": any_of(kind(list, tuple), several),  # what is in it is its own affair
            "rank": RANK,
            "world_size": WORLD,
            "split_batches": flag,
            "seed": SEED,
            "tail": TAIL,
            "epoch_length": or_none(whole(1)),
        },
    ),
    "shard_iterable": (
        listed(library.shard_iterable, iterable=[1, 2], **SHARE),
        {
            "iterable": any_of(kind(str, bytes, list, tuple, dict), several),
            "rank": RANK,
            "world_size": WORLD,
            "batch_size": whole(1),
            "seed": or_none(SEED),
            "tail": TAIL,
        },
    ),
    "ShardLoader": (
        listed(library.ShardLoader, dataset=DATA, global_batch_size=4),
        {
            "dataset": any_of(kind(str, bytes, list, tuple, dict), several),
            "global_batch_size": whole(1),
            "micro_batch_size": or_none(whole(1)),
            "shuffle": flag,
            "seed": SEED,
            "tail": TAIL,
            "virtual_ranks": or_none(whole(1, 1 << 16)),
            "sampler": or_none(any_of(kind(list, tuple, dict), several)),
            "world": only_none,
        },
    ),
    "ShardLoader.load_state_dict": (
        called(lambda: library.ShardLoader(DATA, global_batch_size=4), "load_state_dict"),
        {"state": nothing},
    ),
    "TensorLoader": (
        lambda **given: list(library.TensorLoader(IMAGES, LABELS, **{"global_batch_size": 4, **given})),
        {
            "global_batch_size": whole(1),
            "micro_batch_size": or_none(whole(1)),
            "shuffle": flag,
            "seed": SEED,
            "tail": TAIL,
            "virtual_ranks": or_none(whole(1, 1 << 16)),
            "sampler": or_none(any_of(kind(list, tuple, dict), several)),
            "augment": or_none(empty),
            "device": only_none,
            "world": only_none,
        },
    ),
    "Plan": (
        partial(library.Plan, num_items=10, global_batch_size=4, shards=2),
        {
            "num_items": whole(),
            "global_batch_size": whole(1),
            "shards": whole(1),
            "seed": or_none(SEED),
            "tail": TAIL,
            "shuffle": flag,
        },
    ),
    "Plan.positions": (
        called(lambda: library.Plan(64, 4, shards=8), "positions", epoch=0, step=0, v=0),
        {"epoch": whole(most=1 << 200), "step": whole(0, 15), "v": whole(0, 7)},
    ),
    "Plan.key": (
        called(lambda: library.Plan(64, 4, shards=8), "key", epoch=0, step=0, v=0, purpose="loop"),
        {"epoch": whole(), "step": whole(), "v": whole(), "purpose": kind(str)},
    ),
    "Progress": (
        library.Progress,
        {"epoch": whole(), "step_in_epoch": whole(), "step": whole(), "skipped": whole()},
    ),
    "set_epoch": (
        lambda **given: library.set_epoch(**{"loader": DataLoader(DATA), "epoch": 1, **given}),
        {"epoch": whole(), "loader": no_plain_value},
    ),
    # ---- augmentation
    "Cutout": (
        augmented(partial(library.Cutout, size=2)),
        {"size": whole(1, 1 << 20), "fill": FILL},
    ),
    "HorizontalFlip": (augmented(library.HorizontalFlip), {"p": real(-0.1, 1)}),
    "RandomCrop": (
        augmented(partial(library.RandomCrop, padding=2)),
        {"padding": whole(0, 1 << 20), "mode": nothing, "fill": FILL},
    ),
    "Shift": (
        augmented(partial(library.Shift, vertical=1, horizontal=1)),
        {"vertical": whole(0, 1 << 20), "horizontal": whole(0, 1 << 20), "fill": FILL},
    ),
    "Normalize": (
        augmented(partial(library.Normalize, mean=0.5, std=0.5)),
        {
            "mean": any_of(real(), numbers),
            "std": any_of(real(0), numbers),
        },
    ),
    "RandAugment": (
        augmented(library.RandAugment),
        {
            "num_ops": whole(0, 1 << 16),
            "magnitude": whole(0, 30),
            "num_magnitude_bins": whole(10, 1 << 16),
            "fill": FILL,
        },
    ),
    "TrivialAugment": (
        augmented(library.TrivialAugment),
        {"num_magnitude_bins": whole(2, 1 << 16), "fill": FILL},
    ),
    "augment_batch": (
        lambda **given: library.augment_batch(
            **{
                "images": IMAGES,
                "transforms": [library.HorizontalFlip()],
                "key": 1,
                "positions": LABELS.numpy(),
                **given,
            }
        ),
        {
            "images": nothing,
            "transforms": empty,
            "key": SEED,
            "positions": nothing,
        },
    ),
    # ---- devices
    "Gpu": (
        lambda **given: library.Gpu(**{"index": 0, **given}),
        {
            "index": whole(),
            "uuid": kind(str),
            "pci_bus_id": kind(str),
            "name": kind(str),
            "problem": kind(str),
            "cuda_ordinal": or_none(whole(most=1 << 200)),
            "memory_total_bytes": or_none(whole(most=1 << 200)),
            "memory_used_bytes": or_none(whole(most=1 << 200)),
            "mig_uuids": empty,
            "busy_migs": empty,
            "processes": or_none(kind(list, tuple)),
            "compute_mode": or_none(kind(str)),
        },
    ),
    "visible_devices": (
        lambda **given: library.visible_devices(**{"environ": {}, "inventory": 2, **given}),
        {
            "environ": or_none(kind(dict)),
            "inventory": or_none(any_of(whole(0, 4096), empty)),
        },
    ),
    "VisibleDevices.to_physical": (
        called(lambda: library.visible_devices({}, 8), "to_physical"),
        {"logical": whole(0, 7)},
    ),
    "VisibleDevices.to_logical": (
        called(lambda: library.visible_devices({}, 8), "to_logical"),
        {"physical": whole(0, 7)},
    ),
    "select_devices": (
        lambda **given: library.select_devices(
            **{"spec": "cpu", "environ": {}, "inventory": [library.Gpu(0)], "lock_folder": None, **given}
        ),
        # What is to be chosen from is not read for "cpu": it is of `visible_devices`.
        {"spec": nothing, "environ": or_none(kind(dict)), "lock_folder": or_none(PATH)},
    ),
    "visible_devices_per_rank": (
        lambda **given: library.visible_devices_per_rank(
            **{"local_world_size": 1, "environ": {"CUDA_VISIBLE_DEVICES": "MIG-a"}, "inventory": 2, **given}
        ),
        {
            "local_world_size": whole(1, 1),
            "environ": or_none(kind(dict)),
            "inventory": or_none(any_of(whole(0, 4096), empty)),
        },
    ),
    # ---- ranks
    "init_world": (
        library.init_world,
        {"backend": only_none, "timeout_s": real(0, 1e8), "device": only_none},
    ),
    "all_reduce_sum": (
        positional(library.all_reduce_sum),
        {
            "value": any_of(kind(int, float, np.number, np.bool_), real_tensor),
        },
    ),
    "barrier": (library.barrier, {"timeout_s": or_none(real(0, 1e8))}),
    "rank_zero_first": (first, {"per": nothing}),
    "audit_collectives": (library.audit_collectives, {"steps": whole()}),
    "seed_everything": (
        lambda **given: library.seed_everything(**{"seed": 1, **given}),
        {"seed": whole(0, (1 << 32) - 1), "deterministic": flag},
    ),
    "class_weights": (
        lambda **given: library.class_weights(**{"targets": [0, 1], **given}),
        {
            "targets": any_of(whole(0, 100), numbers),
            "num_classes": or_none(whole(2, 1 << 31)),
        },
    ),
    "Accuracy": (library.Accuracy, {"topk": whole(1)}),
    "Accuracy.update": (
        called(library.Accuracy, "update", predictions=torch.zeros(2, 3), targets=LABELS[:2]),
        {"predictions": nothing, "targets": several, "count": or_none(whole(0, 2))},
    ),
    "Mean.update": (
        called(library.Mean, "update", value=1.0),
        {
            "value": any_of(kind(int, float, np.number, np.bool_), real_tensor),
            "weight": any_of(real(-0.1), real_tensor),
        },
    ),
    # ---- models
    "parallelize": (
        parallel,
        {
            "model": nothing,
            "optimizer": callable,  # a function that returns none raises what it raises
            "strategy": nothing,
            "precision": nothing,
            "max_grad_norm": or_none(real(0)),
            "virtual_ranks": or_none(whole(1, 1 << 16)),
            "loader": only_none,
            "device": only_none,
            "sync_batch_norm": flag,
        },
    ),
    "convert_sync_batchnorm": (
        lambda **given: library.convert_sync_batchnorm(**{"model": nn.BatchNorm1d(2), **given}),
        {"model": nothing, "loader": only_none},
    ),
    "revert_sync_batchnorm": (library.revert_sync_batchnorm, {"model": nothing}),
    "unwrap": (library.unwrap, {"model": nothing}),
    "canonical_keys": (
        library.canonical_keys,
        {"model_or_keys": any_of(empty, kind(dict), several)},
    ),
    "match_state_dict": (
        lambda **given: library.match_state_dict(**{"source": {"w": LABELS}, "target": ["w"], **given}),
        {
            "source": nothing,
            "target": any_of(empty, kind(dict)),
            "rules": empty,
            "ignore_mismatched": kind(bool),
        },
    ),
    "load_state_dict": (
        lambda **given: library.load_state_dict(**{"model": _net(), "source": _net().state_dict(), **given}),
        {
            "model": nothing,
            "source": nothing,
            "strict": kind(bool),
            "ignore_mismatched": kind(bool),
            "rules": empty,
        },
    ),
    # ---- checkpoints
    "CheckpointManager": (
        manager,
        {
            "folder": PATH,
            "model": nothing,
            "optimizer": nothing,
            "loader": only_none,
            "scheduler": or_none(kind_of_scheduler),
            "keep": or_none(any_of(whole(1), whole(-1, -1))),
            "every_steps": or_none(whole(1)),
            "every_s": or_none(real(0)),
            "asynchronous": or_none(flag),
            "patience_s": real(0),
        },
    ),
    "CheckpointManager.restore": (restored, {"else_from": or_none(PATH)}),
    "consolidate_weights": (
        lambda **given: library.consolidate_weights(
            **{"checkpoint": "nowhere", "file": "nowhere/file", **given}
        ),
        {"checkpoint": nothing, "file": nothing},
    ),
    "bisect_divergence": (
        bisected,
        {
            "start_ranks": callable,
            "world_sizes": numbers,
            "steps": whole(1),
            "tolerance": or_none(real(-0.1)),
            "dropout": flag,
            "folder": or_none(PATH),
        },
    ),
}

# Read by other tests, and by no table, with the reason.
LEFT_OUT = {
    "Engine": "made by parallelize",
    "Match": "a result",
    "Mean": "no parameter",
    "NumericsWarning": "a warning",
    "Restored": "a result",
    "StepInfo": "a result",
    "VisibleDevices": "a result",
    "World": "a result",
    "gather_objects": "any object is right",
}
READ_ELSEWHERE = {"select_devices": {"inventory"}, "all_reduce_sum": set[str]()}

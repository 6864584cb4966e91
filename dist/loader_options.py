"""What loaders may be given, and what they answer to the rest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from torch.utils.data import IterableDataset

from phalanx.dist.epochs import sharded_part
from phalanx.dist.plan import require_int

_OPTIONS = frozenset(
    {
        "collate_fn",
        "in_order",
        "multiprocessing_context",
        "num_workers",
        "persistent_workers",
        "pin_memory",
        "pin_memory_device",
        "prefetch_factor",
        "timeout",
        "worker_init_fn",
    }
)

_REFUSED = {
    "batch_size": (
        "it does not say whether that is over all ranks or on each: the learning rate would fit one of the two.\n"
        "Fix: global_batch_size={value!r} (samples of a step over all ranks) or micro_batch_size={value!r} "
        "(samples of a forward pass on each rank)"
    ),
    "batch_sampler": (
        "its batches would come whole to every rank.\n"
        "Fix: global_batch_size= with shuffle=True or sampler=, from which each step's share is cut"
    ),
    "drop_last": 'Fix: tail="drop" leaves out the short last step, tail="uneven" (default) shares it',
    "generator": (
        "the order and every random key depend on seed= alone, so that ranks agree and a run can be resumed.\n"
        "Fix: seed=generator.initial_seed()"
    ),
}


def check_options(options: Mapping[str, Any], *, owner: str) -> None:
    """Refuse what a DataLoader would take and a loader by steps cannot; ``owner`` is the class that was given it."""
    for name, value in options.items():
        _refuse_batching(name, value, owner)
        if name not in _OPTIONS:
            raise TypeError(f"{owner} has no option {name!r}{_nearest(name, _OPTIONS)}")
    if not options.get("in_order", True):
        raise ValueError(
            f"{owner}(in_order=False): which samples a step sees would depend on which worker is faster.\n"
            "Fix: leave it out"
        )


def refuse_options(options: Mapping[str, Any], *, owner: str) -> None:
    """The same where there is no DataLoader inside: none of its options means anything."""
    for name, value in options.items():
        _refuse_batching(name, value, owner)
        if name not in _OPTIONS:
            raise TypeError(f"{owner} has no option {name!r}{_nearest(name, ())}")
        raise TypeError(
            f"{owner} has no option {name!r}: batches are gathered from memory, without workers or collation.\n"
            "Fix: leave it out, or use ShardLoader, which takes DataLoader's options"
        )


def _refuse_batching(name: str, value: Any, owner: str) -> None:
    if name in _REFUSED:
        raise ValueError(f"{owner}({name}={value!r}): {_REFUSED[name].format(value=value)}")


def _nearest(name: str, options: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [*options, "global_batch_size", "micro_batch_size"], n=1)
    return f": {near[0]!r}?" if near else "."


def check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{type(dataset).__name__} is an IterableDataset: it has no positions to share, every rank would "
            "train on all of it.\n"
            "Fix: a dataset with __len__ and __getitem__; or torch's DataLoader(shard_iterable(dataset, "
            "batch_size=n), batch_size=n), which shares a stream"
        )
    single = getattr(dataset, "ndim", 1) == 0  # a tensor without dims has both methods all the same
    if (
        not isinstance(dataset, Sized)
        or not hasattr(dataset, "__getitem__")
        or isinstance(dataset, type)
        or single
    ):
        raise ValueError(
            f"{type(dataset).__name__} has no __len__ or no __getitem__: ranks cannot agree on their shares.\n"
            "Fix: a map-style dataset"
        )


def check_sampler(sampler: Any, shuffle: bool, *, owner: str) -> None:
    if shuffle:
        raise ValueError(
            f"{owner} got sampler= and shuffle=True: both say the order.\nFix: leave out one of the two"
        )
    name = type(sampler).__name__
    if knows_whole_epochs(sampler):
        return
    part = sharded_part(sampler)
    if part is not None or getattr(sampler, "is_sharded", False):
        raise ValueError(
            f"sampler={name} gives one rank's share already, and {owner} would share that again: with W "
            "ranks each would see 1/W of 1/W of the data.\n"
            "Fix: leave sampler= out and pass shuffle=True, or keep the sampler with torch's DataLoader"
        )
    if not isinstance(sampler, Sized) or getattr(sampler, "ndim", 1) == 0:
        raise ValueError(
            f"sampler={name} has no __len__: how many steps an epoch has would be unknown.\n"
            "Fix: a sampler with __len__"
        )


def knows_whole_epochs(sampler: Any) -> bool:
    """Whether a sampler for ranks also says what the others take: by ``indices_at`` and ``epoch_length``."""
    return hasattr(sampler, "indices_at") and hasattr(sampler, "epoch_length")


def samples_of_epoch(dataset: Any, sampler: Any, global_batch_size: int, *, owner: str) -> int:
    """How many samples all ranks together see in an epoch.

    Raises:
        ValueError: The sampler makes batches of another size.
    """
    if not knows_whole_epochs(sampler):
        return len(dataset if sampler is None else sampler)
    theirs = getattr(sampler, "global_batch_size", global_batch_size)
    if theirs != global_batch_size:
        said = f"global_batch_size={theirs}" if theirs else f"max_tokens={sampler.max_tokens}"
        fix = (
            f"global_batch_size={theirs} here"
            if theirs
            else f"{type(sampler).__name__}(lengths, global_batch_size=...)"
        )
        raise ValueError(
            f"sampler={type(sampler).__name__} was made with {said}, {owner} cuts steps of {global_batch_size} "
            f"samples: its batches of similar lengths would be torn apart.\nFix: {fix}; or give it to torch's "
            "DataLoader as batch_sampler="
        )
    return int(sampler.epoch_length)


def resolve_batch_sizes(
    global_batch_size: int | None, micro_batch_size: int | None, shards: int, *, owner: str
) -> tuple[int, int | None]:
    if global_batch_size is not None:
        global_batch_size = require_int("global_batch_size", global_batch_size, at_least=1)
    if micro_batch_size is not None:
        micro_batch_size = require_int("micro_batch_size", micro_batch_size, at_least=1)
    if global_batch_size is not None:
        return global_batch_size, micro_batch_size
    if micro_batch_size is not None:
        return micro_batch_size * shards, micro_batch_size
    raise ValueError(
        f"{owner} got no batch size.\n"
        "Fix: global_batch_size= (samples of a step over all ranks) or micro_batch_size= (samples of a forward "
        "pass on each rank)"
    )

"""Comparing what ranks hold before they train on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

if TYPE_CHECKING:
    from phalanx.dist.world import World

Fingerprint = dict[str, Any]

_SAMPLED_BYTES = 64 * 1024
_PIECES = 64  # where in a tensor's memory those bytes are read
_MAX_DEPTH = 16


def hash_values(values: Any) -> str:
    """A hash of a sequence: exact for integers in any container, by ``repr`` for others."""
    if isinstance(values, range):
        return _digest(repr(values).encode())
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    array = None
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):
        pass
    if array is not None and array.dtype.kind in "iub":
        return _digest(array.astype(np.int64, copy=False).tobytes())
    return _digest(repr(list(values)).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _sampled_bytes(tensor: torch.Tensor, limit: int) -> str:
    """A hash of up to ``limit`` bytes of a tensor, in pieces spread evenly over it."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return "not read"
    if tensor.numel() == 0:
        return _digest(b"")
    rows = tensor.detach()
    if rows.dim() == 0:
        rows = rows.reshape(1)
    count = rows.shape[0]
    row_bytes = rows.numel() // count * rows.element_size()
    wanted = min(count, limit // row_bytes)
    if wanted == 0:  # not one whole row: the start of a few
        picked = rows[:: max(1, count // _PIECES)][:_PIECES]
        length = max(1, limit // _PIECES // rows.element_size())
        picked = torch.stack([row.reshape(-1)[:length] for row in picked])
    else:
        picked = rows[torch.linspace(0, count - 1, wanted, dtype=torch.float64).long().to(rows.device)]
    data = picked.cpu().contiguous().reshape(-1).view(torch.uint8)
    return _digest(data.numpy().tobytes())


def dataset_fingerprint(dataset: Any) -> Fingerprint:
    """What a dataset holds, as plain values by name, cheap and without fetching a single sample.

    Lengths, types, a hash of the indices of (nested) ``Subset`` objects, the parts of ``ConcatDataset``
    and ``StackDataset``, shapes and up to 64 KiB of the values of ``TensorDataset``. A dataset that
    wraps another one in an attribute is followed into it.

    >>> data = TensorDataset(torch.arange(4.0))
    >>> one, other = Subset(data, [0, 1]), Subset(data, [0, 2])
    >>> a, b = dataset_fingerprint(one), dataset_fingerprint(other)
    >>> [name for name in a if a[name] != b[name]]
    ['dataset.indices']
    """
    found: Fingerprint = {}
    _describe(dataset, "dataset", found, set(), 0)
    return found


def _describe(dataset: Any, name: str, found: Fingerprint, seen: set[int], depth: int) -> None:
    if id(dataset) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(dataset))
    found[f"{name}.type"] = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    try:
        found[f"{name}.length"] = len(dataset)
    except TypeError:
        found[f"{name}.length"] = None
    if isinstance(dataset, Subset):
        found[f"{name}.indices"] = hash_values(dataset.indices)
    elif isinstance(dataset, TensorDataset):
        limit = _SAMPLED_BYTES // max(1, len(dataset.tensors))
        for number, tensor in enumerate(dataset.tensors):
            found[f"{name}.tensors[{number}].shape"] = tuple(tensor.shape)
            found[f"{name}.tensors[{number}].dtype"] = str(tensor.dtype)
            found[f"{name}.tensors[{number}].values"] = _sampled_bytes(tensor, limit)
        return
    for part_name, part in _parts(dataset):
        _describe(part, f"{name}.{part_name}", found, seen, depth + 1)


def _parts(dataset: Any) -> list[tuple[str, Any]]:
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        parts = dataset.datasets
        named = parts.items() if isinstance(parts, dict) else enumerate(parts)
        return [(f"datasets[{key!r}]", part) for key, part in named]
    attributes = getattr(dataset, "__dict__", {})
    return [(name, value) for name, value in sorted(attributes.items()) if isinstance(value, Dataset)]


def audit_same_dataset(dataset: Any, world: World, *, settings: Mapping[str, Any] | None = None) -> None:
    """Make sure that every rank holds the same dataset and settings. Collective over all ranks.

    ::

        audit_same_dataset(train_dataset, init_world())

    Args:
        dataset: Map style; no sample is fetched.
        world: Where this rank stands.
        settings: More values that have to be equal, by name.

    Raises:
        ValueError: On every rank alike, when ranks differ: which ranks, in what, and what to do.
    """
    if world.world_size == 1:
        return
    from phalanx.dist.world import gather_objects

    try:
        mine: Fingerprint = {**dataset_fingerprint(dataset), **(settings or {})}
    except Exception as error:  # a rank that left here would leave the others waiting
        mine = {"error": f"{type(error).__name__}: {error}"}
    message = explain_differences(gather_objects(mine))
    if message is not None:
        raise ValueError(message)


def audit_same_model(model: nn.Module, world: World) -> None:
    """Make sure that every rank has built the same model: names, shapes and dtypes of parameters and buffers. Collective.

    ::

        audit_same_model(model, init_world())

    `parallelize` does it before it wraps the model, since DDP itself compares shapes in order, without names. Only a
    hash travels, unless models differ.

    Raises:
        ValueError: On every rank alike, when ranks differ: names, with the shape that each rank has.
    """
    if world.world_size == 1 or not torch.distributed.is_initialized():
        return
    from phalanx.dist.world import gather_objects

    mine = model_description(model)
    hashes = gather_objects(hash_values(list(mine.items())))
    if len(set(hashes)) > 1:
        raise ValueError(explain_models(gather_objects(mine)))


def model_description(model: nn.Module) -> dict[str, str]:
    """Each parameter and buffer in words, by name, in order.

    >>> model_description(nn.Linear(2, 1))
    {'weight': 'float32 [1, 2]', 'bias': 'float32 [1]'}
    """
    described = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        try:
            shape = str(list(tensor.shape))
        except (RuntimeError, ValueError):  # a lazy module's, before its first forward
            shape = "of no shape yet"
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        described[name] = f"{str(tensor.dtype).removeprefix('torch.')} {shape}{' (frozen)' if frozen else ''}"
    return described


def explain_models(descriptions: list[dict[str, str]]) -> str:
    """In words, how the ranks' models differ from rank 0's."""
    from phalanx.dist.rendezvous import name_ranks

    first = descriptions[0]
    names = list(dict.fromkeys(name for described in descriptions for name in described))
    differing = [name for name in names if any(each.get(name) != first.get(name) for each in descriptions)]
    lines = []
    for name in differing[:8]:
        ranks_by_form: dict[str, list[int]] = {}
        for rank, described in enumerate(descriptions):
            ranks_by_form.setdefault(described.get(name, "not there"), []).append(rank)
        lines.append(
            f"{name}: " + "; ".join(f"{name_ranks(ranks)}: {form}" for form, ranks in ranks_by_form.items())
        )
    if len(differing) > 8:
        lines.append(f"and {len(differing) - 8} more")
    if not differing:
        lines.append("the same names, in another order")
    return (
        "Ranks have built different models:\n  "
        + "\n  ".join(lines)
        + "\nGradients of different parameters would be added up, or the ranks would wait for each other for ever.\n"
        "Fix: build the model from the same settings on every rank; sizes taken from data (classes, vocabulary) have to be "
        "those of the whole dataset"
    )


def explain_differences(fingerprints: list[Fingerprint]) -> str | None:
    """In words, which ranks' fingerprints differ from rank 0's and in what; None when all are equal."""
    broken = {rank: print_["error"] for rank, print_ in enumerate(fingerprints) if "error" in print_}
    if broken:
        return "the dataset could not be looked at: " + "; ".join(
            f"rank {rank}: {error}" for rank, error in broken.items()
        )
    first = fingerprints[0]
    ranks_by_name: dict[str, list[int]] = {}
    for rank, other in enumerate(fingerprints):
        for name in [*first, *(name for name in other if name not in first)]:
            if first.get(name) != other.get(name):
                ranks_by_name.setdefault(name, []).append(rank)
    if not ranks_by_name:
        return None
    lines = [_one_difference(name, ranks, fingerprints) for name, ranks in ranks_by_name.items()]
    kinds = {_kind(name) for name in ranks_by_name}
    fixes = [_FIXES[kind] for kind in ("indices", "length", "values", "type", "settings") if kind in kinds]
    return (
        "Ranks were given different data:\n  "
        + "\n  ".join(lines)
        + "\nSamples would be repeated or never seen, or one rank would train on another's validation samples.\n"
        + f"Fix: {fixes[0]}"
    )


_FIXES = {
    "indices": "the same split on every rank: random_split(..., generator=torch.Generator().manual_seed(0))",
    "length": "the same files on every node, and no rank-dependent filtering before ShardLoader, which does the "
    "sharing itself",
    "values": "the same data on every rank: seed what generates it, or load the same files",
    "type": "the same dataset on every rank",
    "settings": "the same arguments on every rank; a seed must not depend on the rank",
}


def _kind(name: str) -> str:
    if not name.startswith("dataset."):
        return "settings"
    end = name.rpartition(".")[2]
    return {"indices": "indices", "length": "length", "type": "type"}.get(end, "values")


def _one_difference(name: str, ranks: list[int], fingerprints: list[Fingerprint]) -> str:
    who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
    kind = _kind(name)
    if kind == "indices":
        return f"{who} other indices than rank 0 ({name}): an unseeded random_split?"
    if name.endswith(".values"):
        return f"{who} other values than rank 0 ({name})"
    values = ", ".join(f"rank {rank}: {fingerprints[rank].get(name)!r}" for rank in [0, *ranks[:4]])
    what = {"length": "another number of samples", "type": "another kind of dataset"}.get(
        kind, f"another {name}"
    )
    return f"{who} {what} than rank 0 ({name}: {values})"

"""Batches on their way to the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The batch with every tensor in it on ``device``: tuples, lists and mappings keep their kind.

    What is there already is not copied, and what is no tensor and has no ``to`` stays as it is.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, (str, bytes)):
        return batch
    if isinstance(batch, tuple):
        moved = [to_device(part, device, non_blocking=non_blocking) for part in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else tuple(moved)
    if isinstance(batch, list):
        return [to_device(part, device, non_blocking=non_blocking) for part in batch]
    if callable(getattr(batch, "to", None)):  # a batch class of the user's, PackedSequence, BatchEncoding
        return batch.to(device)
    if isinstance(batch, Mapping):
        parts = {key: to_device(part, device, non_blocking=non_blocking) for key, part in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    return batch


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from _tensors(part)


def move_ahead(pairs: Iterator[tuple[T, Any]], device: torch.device) -> Iterator[tuple[T, Any]]:
    """The pairs with their second part on ``device``; on CUDA the copy of the next one runs meanwhile."""
    if device.type == "cpu":
        return pairs
    if device.type != "cuda":
        return ((first, to_device(batch, device)) for first, batch in pairs)
    return _move_on_a_side_stream(pairs, device)


def _move_on_a_side_stream(pairs: Iterator[tuple[T, Any]], device: torch.device) -> Iterator[tuple[T, Any]]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    under_way: tuple[T, Any, torch.cuda.Event] | None = None

    def arrived(first: T, batch: Any, copied: torch.cuda.Event) -> tuple[T, Any]:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        for tensor in _tensors(batch):
            if tensor.is_cuda:
                tensor.record_stream(current)  # its memory came from the side stream's pool
        return first, batch

    for first, batch in pairs:
        with torch.cuda.stream(stream):
            moved = to_device(batch, device, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        if under_way is not None:
            yield arrived(*under_way)
        under_way = (first, moved, copied)
    if under_way is not None:
        yield arrived(*under_way)

"""Batches on their way to the device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils.data import (
    TensorDataset,
)

import phalanx.dist.transfer
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.transfer import move_ahead, to_device
from tests.dist.loading import numbers, world


def test_batches_on_the_cpu_are_not_copied() -> None:
    kept: list[torch.Tensor] = []

    def collate(samples: list[Any]) -> torch.Tensor:
        kept.append(torch.stack([sample[0] for sample in samples]))
        return kept[-1]

    loader = ShardLoader(numbers(8), global_batch_size=4, collate_fn=collate, world=world())
    assert all(batch is kept[-1] for batch in loader)


def test_moving_keeps_the_kind_of_every_container() -> None:
    from collections import OrderedDict, namedtuple

    point = namedtuple("point", "x y")
    batch = {
        "a": [torch.ones(2), "text", 3],
        "b": point(torch.ones(1), None),
        "c": OrderedDict(d=(torch.ones(1),)),
    }
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1:] == ["text", 3]
    assert type(moved["b"]) is point
    assert moved["b"].x.device.type == "meta"
    assert type(moved["c"]) is OrderedDict
    assert moved["c"]["d"][0].device.type == "meta"
    assert batch["a"][0].device.type == "cpu"  # type: ignore[index]


def test_batches_are_moved_to_the_loaders_device() -> None:
    loader = ShardLoader(numbers(8), global_batch_size=4, pin_memory=False, world=world())
    loader.device = torch.device("meta")
    assert [batch[0].device.type for batch in loader] == ["meta", "meta"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_cuda_are_those_of_the_cpu(num_workers: int) -> None:
    dataset = TensorDataset(torch.randn(1000, 512))
    here = ShardLoader(dataset, global_batch_size=64, shuffle=True, world=world())
    there = ShardLoader(dataset, global_batch_size=64, shuffle=True, num_workers=num_workers, world=world())
    there.device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(2):
        for (a,), (b,) in zip(here, there, strict=True):
            assert b.is_cuda
            torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]  # later copies must not reach into a batch in use
            assert torch.equal(a, (b * 1).cpu())
            assert here.progress == there.progress


def test_the_next_copy_starts_before_a_batch_is_handed_out_and_each_waits_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of calls on CUDA, told by stand-ins for its streams."""
    log: list[str] = []

    class Event:
        def record(self, stream: object) -> None:
            self.name = log[-1].removeprefix("copy ")

    class Stream:
        def wait_event(self, event: Event) -> None:
            log.append(f"wait {event.name}")

    def copy(batch: str, device: torch.device, *, non_blocking: bool) -> str:
        assert non_blocking
        log.append(f"copy {batch}")
        return batch

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(phalanx.dist.transfer, "to_device", copy)
    pairs = iter([(1, "a"), (2, "b"), (3, "c")])
    for first, _ in move_ahead(pairs, torch.device("cuda", 0)):
        log.append(f"use {first}")
    assert log == ["copy a", "copy b", "wait a", "use 1", "copy c", "wait b", "use 2", "wait c", "use 3"]

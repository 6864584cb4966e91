"""The worked example in the docstring of each public name runs."""

from __future__ import annotations

import doctest
import functools
import gc
import importlib
import inspect
import os
import re
import signal
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import phalanx.dist as library
from phalanx.dist.stop_signals import STOP_SIGNALS
from tests.conftest import ROOT

SOURCES = sorted(
    path.relative_to(ROOT).with_suffix("")
    for path in (ROOT / "dist").rglob("*.py")
    if ">>>" in path.read_text()
)
NO_EXAMPLE = {"NumericsWarning": "a warning"}
# Blocks that show output or a table rather than code.
OUTPUT = ("tail=", "CollectiveMismatch:")


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_sessions(source: Path) -> None:
    module = importlib.import_module("phalanx." + ".".join(source.parts).removesuffix(".__init__"))
    found = doctest.testmod(module, extraglobs={"nn": nn})
    assert found.attempted > 0
    assert found.failed == 0


def blocks_of(name: str) -> list[str]:
    """The indented blocks after ``::`` in a docstring that has no session."""
    text = (inspect.getdoc(getattr(library, name)) or "") + "\n"
    if ">>>" in text:
        return []
    found = re.findall(r"::\n\n((?:    .*\n|\n)+)", text)
    return [block for block in map(textwrap.dedent, found) if not block.startswith(OUTPUT)]


WITH_BLOCKS = [name for name in library.__all__ if blocks_of(name)]


def test_every_public_name_has_an_example() -> None:
    bare = [
        name
        for name in library.__all__
        if name not in NO_EXAMPLE
        and not blocks_of(name)
        and ">>>" not in (getattr(library, name).__doc__ or "")
    ]
    assert bare == []


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    """An example's `maybe_save` takes signals over, as in a script, which it outlives here."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a script has at hand where it calls one of ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dataset = TensorDataset(torch.randn(100, 4), torch.arange(100) % 3)
    loader = library.ShardLoader(dataset, global_batch_size=50, shuffle=True)
    model = nn.Linear(4, 3)
    optimizer = Adam(model.parameters())
    saved = library.CheckpointManager("checkpoints", model=model, optimizer=optimizer)
    (tmp_path / "saved").symlink_to("checkpoints")
    library_names = {name: getattr(library, name) for name in library.__all__}
    gpus = [library.Gpu(index, f"GPU-{index}") for index in range(4)]
    choose = functools.partial(library.select_devices, inventory=gpus, lock_folder=tmp_path / "locks")
    return {
        **library_names, "dataset": dataset, "train_loader": loader, "loader": loader, "test_loader": loader,
        "model": model, "optimizer": optimizer, "loss_fn": cross_entropy, "cross_entropy": cross_entropy, "epochs": 1,
        "accuracy": 0.9, "Adam": Adam, "DataLoader": DataLoader, "loss_sum": 2.0, "num_correct": 3, "num_samples": 4,
        "socket": socket, "os": os, "subprocess": subprocess, "checkpoints": saved,
        # Only their own tests start GPUs, ranks and downloads.
        "select_devices": lambda spec: choose(spec, environ={}),
        "bisect_divergence": lambda start_ranks, sizes: sizes if callable(start_ranks) else None,
        "datasets": SimpleNamespace(MNIST=lambda folder, download: None),
    }  # fmt: skip


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_blocks(name: str, names: dict[str, Any]) -> None:
    if name in {"Engine", "StepInfo"}:
        model, optimizer, engine = library.parallelize(
            names["model"], names["optimizer"], loader=names["loader"]
        )
        names.update(model=model, optimizer=optimizer, engine=engine)
    if name == "StepInfo":
        x, y = next(iter(names["loader"]))
        engine.backward(cross_entropy(model(x), y, reduction="sum"), names["loader"].global_count)
    if name == "consolidate_weights":
        import safetensors.torch

        names["safetensors"] = safetensors
        path = names["checkpoints"].save()
        path.rename(path.with_name("step-500"))
    for block in blocks_of(name):
        exec(compile(block, f"{name}'s docstring", "exec"), names)
    names.clear()  # loaders end their workers when nobody holds them
    gc.collect()

"""seed_everything covers every generator; class_weights weighs classes, not ranks."""

from __future__ import annotations

import doctest
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phalanx.dist.seeds
from phalanx.dist.seeds import class_weights, seed_everything


@pytest.fixture(autouse=True)
def _torch_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else torch sets it, in deterministic mode
    monkeypatch.setattr(phalanx.dist.seeds, "_said", set())
    benchmark = torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.backends.cudnn.benchmark = benchmark
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)


def _draws() -> list[list[float]]:
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]]


def test_all_generators_repeat() -> None:
    assert seed_everything(5) == 5
    first = _draws()
    seed_everything(6)
    assert all(one != other for one, other in zip(_draws(), first, strict=True))
    seed_everything(5)
    assert _draws() == first


def test_every_cuda_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    seed_everything(9)
    assert seeds == [9]


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.5, "1", None, True])
def test_bad_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="Fix: seed_everything"):
        seed_everything(seed)


def test_numpy_integers_are_seeds() -> None:
    assert type(seed_everything(np.int64(3))) is int


@pytest.mark.parametrize("benchmark", [False, True])
def test_what_happens_to_cudnn_benchmark_is_said_once(
    benchmark: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.backends.cudnn.benchmark = benchmark
    with caplog.at_level(logging.INFO):
        seed_everything(0)
        seed_everything(0)
    assert torch.backends.cudnn.benchmark is benchmark
    assert caplog.text.count("cudnn.benchmark stays " + ("on" if benchmark else "off")) == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        seed_everything(0, deterministic=True)
    assert torch.backends.cudnn.benchmark is False
    assert torch.are_deterministic_algorithms_enabled()
    assert "cudnn.benchmark is off" in caplog.text


@pytest.mark.parametrize(("started", "warned"), [(False, False), (True, True)])
def test_cublas_is_told_in_time_or_a_warning_says_so(
    started: bool, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    with caplog.at_level(logging.WARNING):
        seed_everything(0, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert ("when CUDA started" in caplog.text) is warned
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_the_docstring_example() -> None:
    assert doctest.testmod(phalanx.dist.seeds).failed == 0


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_classes_weigh_alike_and_samples_one_on_average(make: Any) -> None:
    targets = [0] * 90 + [2] * 10
    weights = class_weights(make(targets), num_classes=4)
    assert weights.dtype == torch.float32
    assert weights[1] == weights[3] == 0
    assert weights[targets].mean().item() == pytest.approx(1)
    assert 90 * weights[0].item() == pytest.approx(10 * weights[2].item())


@pytest.mark.parametrize(
    ("targets", "num_classes", "named"),
    [([], None, "integers"), ([0.5], None, "integers"), ([0, -1], None, "-1"), ([0, 3], 3, "to 2")],
)
def test_targets_that_are_no_classes_are_refused(
    targets: list[Any], num_classes: int | None, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        class_weights(targets, num_classes)

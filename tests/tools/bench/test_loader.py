"""A user's loader, measured."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from phalanx.tools.bench.loader import measure_loader, samples_in
from phalanx.tools.usage import CannotFinish, UsageMistake

SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        sum(range(20_000))  # the dataset's own work
        return {"x": torch.ones(3), "y": index}

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(12.0))

def plain():
    return DataLoader(Numbers(), batch_size=8, shuffle=True)

def batched():
    return DataLoader(Numbers(), batch_sampler=[[0, 1], [2, 3, 4]])

def stream():
    return DataLoader(Stream(), batch_size=4)

def shard(num_workers):
    from phalanx.dist import ShardLoader
    return ShardLoader(Numbers(), micro_batch_size=8, shuffle=True, num_workers=num_workers)

def listed():
    return [torch.ones(5, 2), torch.ones(5, 2)]

def empty():
    return []

def broken():
    raise KeyError("images")

number = 3
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "my_loaders.py"
    path.write_text(textwrap.dedent(SCRIPT))
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(path)


@pytest.mark.parametrize(
    ("name", "samples"), [("plain", 8.0), ("batched", 2.5), ("stream", 4.0), ("shard", 8.0)]
)
def test_samples_and_where_the_time_goes(script: str, name: str, samples: float) -> None:
    report = measure_loader(f"{script}:{name}", [0], batches=10, warmup=0)
    (result,) = report["results"]
    assert result["samples_per_s"] == pytest.approx(samples * result["batches_per_s"], rel=0.11)
    assert set(report["where"]) == {"dataset", "collate", "order_and_transfer"}
    assert sum(report["where"].values()) == pytest.approx(1.0, abs=0.02)
    if name in ("plain", "shard"):
        assert report["where"]["dataset"] > report["where"]["collate"]


def test_worker_counts_are_tried_one_after_the_other(script: str) -> None:
    report = measure_loader(f"{script}:plain", [0, 1], batches=6, warmup=1)
    assert [result["workers"] for result in report["results"]] == [0, 1]
    assert report["advice"].startswith("num_workers=")


def test_what_is_no_dataloader_is_measured_as_it_is(script: str) -> None:
    report = measure_loader(f"{script}:listed", [0, 2, 4], batches=5, warmup=0)
    assert [result["workers"] for result in report["results"]] == [None]
    assert (report["where"], report["loader"]) == ({}, "list")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("empty", "gave no batch"),
        ("broken", "KeyError: 'images'"),
        ("number", "has no function number"),
        ("plian", ":plain"),
    ],
)
def test_loaders_that_cannot_be_measured(script: str, target: str, message: str) -> None:
    with pytest.raises((CannotFinish, UsageMistake)) as caught:
        measure_loader(f"{script}:{target}", [0], batches=2, warmup=0)
    assert message in str(caught.value)


@pytest.mark.parametrize("target", ["train.py", "nowhere.py:make", ":make", "train.py:", "train.py:a b"])
def test_what_names_no_loader(target: str) -> None:
    with pytest.raises(UsageMistake, match="Fix: phalanx bench loader"):
        measure_loader(target, [0], batches=1, warmup=0)


def test_samples_of_a_batch() -> None:
    assert samples_in({"ids": ["a", "b"], "x": torch.ones(4, 2)}) == 4
    assert samples_in([torch.ones(3, 1), torch.ones(9)]) == 3
    assert samples_in("text") is None

"""The confusion matrix: exact counts over all ranks, the same mistakes on any number of them, pictures and numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from phalanx.recipes.confusion import MISTAKES, Confusion
from phalanx.recipes.training import evaluate
from tests.ranks import RankRunner

ITEMS, CLASSES = 103, 4


class _Fixed(nn.Module):
    """Scores that are fixed by the image."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :CLASSES] * 3


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(ITEMS, 1, 3, 3, generator=generator)
    return TensorDataset(images, torch.randint(0, CLASSES, (ITEMS,), generator=generator))


def _found(rank: int, world_size: int) -> tuple[list[list[int]], list[Any]]:
    from phalanx.dist import ShardLoader, init_world

    init_world()
    confusion = Confusion("abcd")
    evaluate(_Fixed(), ShardLoader(_data(), global_batch_size=10), confusion)
    return confusion.counts, [
        (mistake.label, mistake.said, mistake.sureness, mistake.image.flatten().tolist())
        for mistake in confusion.mistakes
    ]


def test_counts_and_mistakes_are_those_of_one_process(run_ranks: RankRunner) -> None:
    images, labels = _data().tensors
    said = _Fixed()(images).argmax(1)
    expected = [[0] * CLASSES for _ in range(CLASSES)]
    for label, word in zip(labels.tolist(), said.tolist(), strict=True):
        expected[label][word] += 1
    (alone,) = run_ranks(_found, world_size=1)
    assert alone[0] == expected
    assert len(alone[1]) == MISTAKES
    sureness = _Fixed()(images)[said != labels].softmax(1).amax(1)
    surest = sureness.sort(descending=True).values[:MISTAKES]
    assert [mistake[2] for mistake in alone[1]] == pytest.approx(surest.tolist())
    for found in run_ranks(_found, world_size=3):
        assert found == alone


def test_pictures_are_drawn(tmp_path: Path) -> None:
    confusion = Confusion([f"class {number}" for number in range(40)])
    confusion.update(torch.eye(40), torch.arange(40).roll(1), torch.rand(40, 3, 8, 8))
    confusion.gather()
    assert [name for name, _ in confusion.draw(tmp_path)] == ["confusion", "mistakes"]
    for name in ("confusion", "mistakes"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_mistake_there_is_no_picture_of_mistakes(tmp_path: Path) -> None:
    confusion = Confusion("ab")
    confusion.update(torch.eye(2), torch.arange(2), torch.rand(2, 1, 8, 8))
    confusion.gather()
    assert confusion.counts == [[1, 0], [0, 1]]
    assert [name for name, _ in confusion.draw(tmp_path)] == ["confusion"]
    empty = Confusion("ab")
    empty.gather()
    assert empty.draw(tmp_path) == []


def test_the_test_line_and_tensorboard_have_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from phalanx.dist import Progress
    from phalanx.recipes.metrics_log import MetricsLog
    from phalanx.recipes.runs import RunFolder

    confusion = Confusion("ab")
    confusion.update(torch.eye(2), torch.tensor([0, 0]), torch.rand(2, 1, 8, 8))
    confusion.gather()
    run = RunFolder(tmp_path)
    log = MetricsLog(run, Progress(0, 0, 0, 0))
    log.write("test", 1, 7, {"loss": 0.5, "accuracy": 0.5}, confusion)
    log.close()
    assert json.loads(run.metrics.read_text())["confusion"] == [[1, 1], [0, 0]]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["images"] == ["confusion/test", "mistakes/test"]
    for name in events.Tags()["images"]:
        assert events.Images(name)[0].encoded_image_string.startswith(b"\x89PNG")

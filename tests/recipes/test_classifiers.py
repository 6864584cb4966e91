"""Classifiers: auxiliary heads, the average, and mixed batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from phalanx.recipes.classifiers import Classifier, loss_of, mixed


def test_auxiliary_heads_count_three_tenths() -> None:
    logits, first, second = (torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(3))
    labels = torch.tensor([0, 1, 2, 0])
    loss, found = loss_of("googlenet", (logits, first, second), labels, 0.0)
    expected = [F.cross_entropy(each, labels, reduction="sum") for each in (logits, first, second)]
    assert float(loss) == pytest.approx(float(expected[0] + 0.3 * (expected[1] + expected[2])))
    assert found is logits


def test_the_average_follows_and_is_what_is_tested() -> None:
    model = Classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(3, 2, bias=False)), averaged=True, channels_last=False
    )
    assert [name for name, _ in model.named_parameters()] == ["network.1.weight"]
    before = model.network[1].weight.detach().clone()  # type: ignore[index]
    with torch.no_grad():
        model.network[1].weight += 1  # type: ignore[index]
    model.follow(0.9, step=10_000)
    images = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    pixels = ((images.float() - model.mean) / model.std).flatten(1)
    assert torch.allclose(model.eval()(images), pixels @ (before + 0.1).T, atol=1e-5)
    assert torch.allclose(model.train()(images), pixels @ (before + 1).T, atol=1e-5)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0)])
def test_labels_are_mixed_as_the_pixels_are(mixup: float, cutmix: float) -> None:
    labels = torch.arange(4)
    images = F.one_hot(labels, 4).float()[:, :, None, None].expand(4, 4, 16, 16)  # a channel for each class
    for seed in range(5):
        torch.manual_seed(seed)
        pictures, targets = mixed(images, labels, 4, mixup, cutmix)
        assert torch.allclose(pictures.mean((2, 3)), targets, atol=1e-5)
        assert torch.allclose(targets.sum(1), torch.ones(4))
    assert mixed(images, labels, 4, 0.0, 0.0)[1] is labels

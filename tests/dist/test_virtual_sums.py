"""Sums in one fixed binary tree, and buffers of virtual ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from phalanx.dist.virtual_buffers import StepBuffers
from phalanx.dist.virtual_ranks import virtual_range
from phalanx.dist.virtual_sums import Layout, Slot, TreeSum
from tests.ranks import RankRunner

SIZES = [(8, 1), (6, 1), (5, 1), (7, 1), (2, 2), (8, 2), (5, 5), (10, 5)]


def _leaves(virtual_ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.randint(-6, 6, (virtual_ranks, 1), generator=generator)
    leaves = list(torch.randn(virtual_ranks, 37, generator=generator) * scales)
    for leaf in leaves:
        leaf[0] = -0.0
    return leaves


def _by_hand(leaves: Sequence[Tensor]) -> Tensor:
    """Neighbours in pairs, level by level; who has none goes up."""
    level = list(leaves)
    while len(level) > 1:
        pairs = [sum(level[at : at + 2][1:], level[at]) for at in range(0, len(level), 2)]
        level = pairs
    return level[0]


def _sum(rank: int, world_size: int, virtual_ranks: int) -> tuple[list[int], int]:
    like = torch.empty(37)
    tree = TreeSum(Layout(1, [like], []), world_size)
    leaves = _leaves(virtual_ranks)
    for _ in range(2):  # the second time in memory that has been used
        for v in virtual_range(virtual_ranks, rank, world_size):
            slot, add = tree.leaf()
            if add:
                slot.gradients[0].add_(leaves[v])
                tree.carry()
            else:
                slot.gradients[0].copy_(leaves[v])
        total = tree.total()
        bits = total.gradients[0].clone().view(torch.int32).tolist()
        tree.release(total)
    return bits, tree.slots


def _sums(rank: int, world_size: int) -> list[tuple[list[int], int]]:
    return [_sum(rank, world_size, v) for v, w in SIZES if w == world_size]


@pytest.mark.parametrize("world_size", sorted({w for _, w in SIZES}))
def test_every_world_size_sums_in_the_same_tree(run_ranks: RankRunner, world_size: int) -> None:
    virtual = [v for v, w in SIZES if w == world_size]
    if world_size == 1:
        ranks = [_sums(0, 1)]
    else:
        ranks = run_ranks(_sums, world_size=world_size)
    for found in ranks:
        for v, (bits, slots) in zip(virtual, found, strict=True):
            expected = _by_hand(_leaves(v))
            assert bits == expected.view(torch.int32).tolist(), v
            # log2(V / W) + 1 copies of the gradients, the room for what is received among them
            assert slots <= math.ceil(math.log2(v / world_size)) + 1 + (v == world_size > 1), v


def test_the_order_shows_in_the_bits() -> None:
    """Else the test above could not fail."""
    leaves = _leaves(8)
    one_by_one = leaves[0]
    for leaf in leaves[1:]:
        one_by_one = one_by_one + leaf
    assert not torch.equal(one_by_one, _by_hand(leaves))


def test_slots_are_laid_out_as_parameters_are() -> None:
    image = torch.empty(4, 3, 5, 5).to(memory_format=torch.channels_last)
    gappy = torch.empty(6, 8)[:, :4]
    tensors = [
        torch.empty(3),
        image,
        torch.empty(2, 5).double(),
        gappy,
        torch.empty(0),
        torch.empty(4, 1).t(),
    ]
    layout = Layout(7, tensors, [torch.empty(3), torch.empty(()).double()])
    slot = Slot(layout, world_size=3)
    assert slot.scalars.dtype == torch.float64
    assert [view.shape for view in slot.gradients] == [tensor.shape for tensor in tensors]
    assert slot.gradients[1].stride() == image.stride()
    assert slot.gradients[3].is_contiguous()
    assert all(view.data_ptr() % 64 == 0 for view in slot.gradients if view.numel())
    assert all(len(flat) % 3 == 0 for flat in slot.flats.values())
    number = 1.0
    for view in [slot.scalars, *slot.gradients, *slot.others]:
        view.fill_(number)
        number += 1
    for number, view in enumerate([slot.scalars, *slot.gradients, *slot.others], 1):
        assert (view == number).all()  # nobody's memory is another's
    assert {dtype: region.unique().tolist() for dtype, region in slot.regions.items()} == {
        torch.float32: [0.0, 8.0],
        torch.float64: [0.0, 9.0],
    }


class _Counting(nn.Module):
    """Batch norm, and buffers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("constant", torch.tensor([0.1, float("inf"), -0.7]))
        self.register_buffer("coarse", torch.tensor([0.1]).half())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)  # another tensor in its place
        result: Tensor = self.norm(x)
        if len(x) == 6:
            self.norm(x)  # the counters differ
        return result


def test_buffers_start_alike_and_end_as_the_mean() -> None:
    torch.manual_seed(0)
    model = _Counting()
    batches = [torch.randn(4 + v, 3) * (v + 1) for v in range(3)]
    buffers = StepBuffers(model, 1, 0)
    layout = Layout(2 + buffers.scalars, [], buffers.floats)
    tree = TreeSum(layout, 1)
    buffers.begin(layout)
    expected = []
    for v, batch in enumerate([*batches, torch.randn(1, 3).expand(2, 3)]):  # the last has no samples
        if v:
            buffers.put_back()
        assert torch.equal(model.norm.running_mean, torch.zeros(3))  # type: ignore[arg-type]
        assert model.norm.num_batches_tracked == 0
        model(batch)
        expected.append(model.norm.running_var.clone())  # type: ignore[union-attr]
        slot, add = tree.leaf()
        buffers.leave(slot, add=add, counts=v < 3, first=v == 0)
        if add:
            tree.carry()
    buffers.finish(tree.total(), 3)
    torch.testing.assert_close(model.norm.running_var, torch.stack(expected[:3]).mean(0))
    assert model.norm.num_batches_tracked == 1  # virtual rank 0's
    assert model.seen.tolist() == [4, 4]  # virtual rank 0's
    assert model.constant.tolist() == torch.tensor([0.1, float("inf"), -0.7]).tolist()
    assert model.coarse.tolist() == torch.tensor([0.1]).half().tolist()
    assert model.mask.tolist() == [True, False]

"""A run of a tensor's elements as boxes: all of them, once, in order, each in one piece of memory."""

from __future__ import annotations

import doctest
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist import flat_parts
from phalanx.dist.flat_parts import FlatPart, flat_boxes
from phalanx.dist.shards import cut, is_sharded, local_pieces, share_into

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def test_examples() -> None:
    assert doctest.testmod(flat_parts).attempted > 0
    assert doctest.testmod(flat_parts).failed == 0


@given(SHAPES, st.data())
def test_boxes_are_the_run_and_lie_in_one_piece(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(start, prod(shape)))
    boxes = [cut(whole, box) for box in flat_boxes(shape, start, end)]
    assert [value for box in boxes for value in box.reshape(-1).tolist()] == list(range(start, end))
    assert all(box.is_contiguous() for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.integers(1, 6), st.data())
def test_a_tensor_shared_out_among_ranks_and_put_together(
    shape: tuple[int, ...], world_size: int, data: st.DataObject
) -> None:
    whole, again = torch.rand(shape), torch.full(shape, torch.nan)
    cuts = sorted(
        data.draw(st.lists(st.integers(0, prod(shape)), min_size=world_size - 1, max_size=world_size - 1))
    )
    for start, end in zip([0, *cuts], [*cuts, prod(shape)], strict=True):
        part = FlatPart(torch.empty(end - start), start, shape)
        share_into(part, whole)
        assert torch.equal(part.run, whole.reshape(-1)[start:end])
        for box, piece in local_pieces(part):
            cut(again, box).copy_(piece)
    assert torch.equal(again, whole)


def test_it_looks_like_the_whole_tensor_and_cannot_be_computed_with() -> None:
    part = FlatPart(torch.ones(3, dtype=torch.bfloat16), 2, (4, 5))
    assert is_sharded(part)
    assert (part.shape, part.numel(), part.dtype, part.element_size()) == ((4, 5), 20, torch.bfloat16, 2)
    assert repr(part) == "FlatPart(3 of (4, 5) from 2)"
    with pytest.raises(TypeError, match="not to compute with"):
        part.sum()

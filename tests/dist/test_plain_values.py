"""Plain values come back exactly as they were, and what is not plain is named."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist.plain_values import NotPlainError, decode, encode

_KEYS = st.one_of(
    st.text(max_size=4), st.integers(), st.sampled_from(["$tuple", "$dict", "$float", "$tensor"])
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(_KEYS, inner, max_size=3),
        st.dictionaries(_KEYS, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


def _same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(_same(first[key], second[key]) for key in first)
    return bool(first == second)


@given(_VALUES)
def test_values_survive_json_with_their_types(value: Any) -> None:
    text = json.dumps(encode(value, "value"), allow_nan=False)
    assert _same(decode(json.loads(text)), value)


def test_not_a_number_survives() -> None:
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan, "loss"), allow_nan=False))))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (torch.tensor(2.5), 2.5),
        (np.float32(0.25), 0.25),
    ],
)
def test_scalars_of_numpy_and_torch_become_python_numbers(value: Any, expected: Any) -> None:
    found = decode(encode({"metric": value}, "values"))["metric"]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("value", [object(), Path("x"), b"bytes", {1, 2}, np.arange(3), torch.ones(2), len])
def test_what_is_not_plain_is_named_with_its_place(value: Any) -> None:
    with pytest.raises(NotPlainError, match=r"save\(history=\.\.\.\)\[0\]\['x'\] is a "):
        encode([{"x": value}], "save(history=...)")


def test_tensors_go_elsewhere_and_are_found_again() -> None:
    kept: dict[str, Any] = {}

    def keep(where: str, tensor: Any) -> str:
        kept[where] = tensor
        return where

    value = {"dirs": [torch.ones(2), 3], "t": torch.tensor(1.0)}
    found = decode(json.loads(json.dumps(encode(value, "s", keep))), kept.__getitem__)
    assert found["dirs"][0] is value["dirs"][0]
    assert found["dirs"][1] == 3
    assert found["t"] is value["t"]

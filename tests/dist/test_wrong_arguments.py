"""Every parameter of every public name, with values of every kind: a ValueError with a remedy, or it is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment

import phalanx.dist as library
from tests.dist.wrong_arguments import LEFT_OUT, READ_ELSEWHERE, TABLE
from tests.dist.wrong_values import Row, parameters_of, refuses

ROWS: list[Row] = [
    (call, name, takes) for call, parameters in TABLE.values() for name, takes in parameters.items()
]
IDS = [f"{name}({parameter})" for name, (_, parameters) in TABLE.items() for parameter in parameters]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a path without a folder would write goes there; generators are put back."""
    monkeypatch.chdir(tmp_path)
    states = torch.get_rng_state(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_what_a_parameter_does_not_take_is_refused_with_a_remedy(row: Row) -> None:
    refuses(row)


NUMBERS = [row for row in ROWS if row[2](np.int64(7)) or row[2](torch.tensor(7)) or row[2](np.float64(0.25))]


@pytest.mark.parametrize(
    "row", NUMBERS, ids=[name for row, name in zip(ROWS, IDS, strict=True) if row in NUMBERS]
)
def test_numbers_of_numpy_and_torch_are_numbers(row: Row) -> None:
    call, parameter, takes = row
    for value in (np.int64(7), np.float64(0.25), torch.tensor(7)):
        if takes(value):
            call(**{parameter: value})


def test_every_parameter_of_every_public_name_is_in_the_table_or_has_its_reason() -> None:
    missing = []
    for name in library.__all__:
        if name in LEFT_OUT:
            continue
        asked = TABLE[name][1] if name in TABLE else {}
        there = parameters_of(getattr(library, name))
        missing += [
            f"{name}({parameter})"
            for parameter in sorted(there - set(asked) - READ_ELSEWHERE.get(name, set()))
        ]
    assert missing == []

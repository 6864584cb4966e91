"""The nearest names to what was typed."""

from __future__ import annotations

import pytest

from phalanx.tools.usage import UsageMistake, nearest

NAMES = ["--nproc-per-node", "--nnodes", "--node-rank", "--no-preload", "--max-restarts", "--gpus"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--nproc-per-nod", ["--nproc-per-node"]),
        ("--nproc", ["--nproc-per-node"]),
        ("--gpu", ["--gpus"]),
        ("--max-retarts", ["--max-restarts"]),
        ("--zzz", []),
    ],
)
def test_nearest_option(typed: str, expected: list[str]) -> None:
    assert nearest(typed, NAMES) == expected


def test_nearest_ignores_case_and_order() -> None:
    assert (
        nearest("MNITS", ["rnn", "mnist", "cifar"])
        == nearest("mnits", ["cifar", "mnist", "rnn"])
        == ["mnist"]
    )


def test_a_mistake_ends_with_its_fix() -> None:
    assert str(UsageMistake("x: wrong.", fix="y")) == "x: wrong.\nFix: y"

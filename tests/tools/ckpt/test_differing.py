"""Two checkpoints compared, in one format or two, down to single values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from phalanx.tools.ckpt import open_checkpoint
from phalanx.tools.ckpt.differing import Compared, diff, fixable
from tests.tools.ckpt.samples import write_all


def compared(tmp_path: Path, first: Any, second: Any, **options: Any) -> Compared:
    for name, content in (("a.pt", first), ("b.pt", second)):
        torch.save(content, tmp_path / name)
    return diff(open_checkpoint(tmp_path / "a.pt"), open_checkpoint(tmp_path / "b.pt"), **options)


def test_formats_do_not_matter(tmp_path: Path) -> None:
    files = write_all(tmp_path)
    assert diff(
        open_checkpoint(files["bare.pt"]), open_checkpoint(files["bare.safetensors"]), weights_only=True
    ).same
    assert diff(open_checkpoint(files["zip.pt"]), open_checkpoint(files["legacy.pt"])).same
    assert diff(open_checkpoint(files["zip.pt"]), open_checkpoint(files["module.pt"]), weights_only=True).same


def test_one_value_of_many_is_found(tmp_path: Path) -> None:
    first = torch.randn(1000, 3000)  # several pieces
    second = first.clone()
    second[999, 2999] += 0.5
    found = compared(tmp_path, {"a": first, "b": first}, {"a": second, "b": first.t().contiguous().t()})
    (difference,) = found.different
    assert (difference.key, difference.what, difference.count, found.equal) == ("a", "values", 1, 1)
    assert abs((difference.max_abs or 0) - 0.5) < 1e-6


def test_keys_shapes_types_and_other_values(tmp_path: Path) -> None:
    first = {"w": {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, "epoch": 1, "lr": [0.1]}
    second = {
        "w": {"a": torch.ones(2).double(), "b": torch.ones(4), "d": torch.ones(1)},
        "epoch": 2,
        "lr": [0.1],
    }
    found = compared(tmp_path, first, second)
    assert (found.only_first, found.only_second) == (["w.c"], ["w.d"])
    assert [(difference.key, difference.what) for difference in found.different] == [
        ("w.a", "dtype"),
        ("w.b", "shape"),
    ]
    assert found.other == [("epoch", 1, 2)]


def test_tolerances_cross_types(tmp_path: Path) -> None:
    values = torch.randn(5000)
    first, second = {"a": values}, {"a": values.to(torch.bfloat16)}
    assert compared(tmp_path, first, second, rtol=0.01).same
    assert not compared(tmp_path, first, second, rtol=1e-4).same


def test_nan_is_nan_and_zero_is_zero(tmp_path: Path) -> None:
    nan = float("nan")
    assert compared(tmp_path, {"a": torch.tensor([nan, 0.0])}, {"a": torch.tensor([nan, -0.0])}).same
    (difference,) = compared(tmp_path, {"a": torch.tensor([nan])}, {"a": torch.tensor([1.0])}).different
    assert difference.max_abs is None


def test_through_wrappers(tmp_path: Path) -> None:
    first, second = {"module.a.weight": torch.ones(2)}, {"a.weight": torch.ones(2)}
    assert not compared(tmp_path, first, second).same
    assert compared(tmp_path, first, second, weights_only=True).same
    files = [open_checkpoint(tmp_path / name) for name in ("a.pt", "b.pt")]
    assert fixable(files[0], files[1]) == "'module' removed from 1 of 1 keys"


def test_large_integers_are_compared_exactly(tmp_path: Path) -> None:
    big = 1 << 60
    for name, value in (("a", big), ("b", big + 1)):
        save_file({"n": torch.tensor([value])}, tmp_path / f"{name}.safetensors")
    files = [open_checkpoint(tmp_path / f"{name}.safetensors") for name in "ab"]
    assert len(diff(files[0], files[1]).different) == 1

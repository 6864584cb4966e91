"""What trainers and people really write into files, and what is passed for a state dict by mistake."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.dist.state_dict import (
    AmbiguousKeysError,
    CheckpointFileError,
    KeysDifferError,
    StateDictError,
    load_state_dict,
    match_state_dict,
)


def _net_keys(prefix: str = "") -> dict[str, torch.Tensor]:
    return {
        f"{prefix}{key}": value
        for key, value in nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict().items()
    }


def _flat(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{key.replace('.', '_')}": value for key, value in _net_keys().items()}


@pytest.mark.parametrize(
    ("source", "container"),
    [
        ({"state_dict": {**_net_keys(), **_flat("ema_")}}, "state_dict"),  # buffers: no dot in their names
        ({"state_dict": {**_net_keys("model."), "ema_model.n_averaged": torch.tensor(3)}}, "state_dict"),
        ({"state_dict": _net_keys("module."), "state_dict_ema": _net_keys("module.")}, "state_dict"),
        ({"state_dict_ema": _net_keys("module.")}, "state_dict_ema"),
        ({"module": _net_keys("module."), "ds_config": {}, "param_shapes": {}}, "module"),
        ({"params": _net_keys(), "params_ema": _net_keys()}, "params"),
        (
            {"run": {"trainer": {"saved": {"model": _net_keys("model._orig_mod.")}}}},
            "run/trainer/saved/model",
        ),
        (
            {"model": None, "state_dict": _net_keys(), "optimizer": {"state": {}, "param_groups": []}},
            "state_dict",
        ),
        (_net_keys("base_model.model."), None),
        (_net_keys("module._forward_module._orig_mod.module."), None),
    ],
)
def test_what_trainers_write_loads_into_the_bare_model(source: dict[str, Any], container: str | None) -> None:
    match = load_state_dict(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), source)
    assert (match.missing, match.unexpected, match.container) == ([], [], container)


def test_one_state_dict_under_two_entries_is_no_ambiguity() -> None:
    model = nn.Linear(2, 2)
    match = match_state_dict({"model": model.state_dict(), "state_dict": model.state_dict()}, nn.Linear(2, 2))
    assert match.container == "model"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}, "It is an optimizer's state"),
        ({"models": [{"weight": torch.ones(2, 2)}]}, r"Fix: .*source\['models'\]\[0\]"),
        (
            {"weight": np.ones((2, 2)), "bias": np.ones(2)},
            "holds a numpy.ndarray where the model has a tensor",
        ),
        (nn.LazyLinear(2).state_dict(), "a lazy parameter that has no shape"),
        ({}, "none of its 0 keys"),
    ],
)
def test_what_is_no_state_dict_of_a_model_is_told_from_one_that_does_not_fit(
    source: dict[str, Any], message: str
) -> None:
    with pytest.raises(StateDictError, match=message):
        load_state_dict(nn.Linear(2, 2), source, strict=False)


def test_skipping_every_tensor_for_its_shape_is_no_load() -> None:
    with pytest.raises(KeysDifferError, match="nothing is left to load"):
        load_state_dict(nn.Linear(2, 2), nn.Linear(3, 3).state_dict(), ignore_mismatched=True)


def test_lazy_parameters_take_what_is_loaded() -> None:
    trained = nn.LazyLinear(3)
    trained(torch.ones(1, 2))
    fresh = nn.LazyLinear(3)
    load_state_dict(fresh, {f"module.{key}": value for key, value in trained.state_dict().items()})
    assert torch.equal(fresh.weight, trained.weight)


def test_tied_weights_may_both_be_nan() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

    values = {key: torch.full((2, 2), float("nan")) for key in ("first.weight", "second.weight")}
    assert load_state_dict(Tied(), values).matched == 2
    values["second.weight"][0, 0] = 1.0
    with pytest.raises(AmbiguousKeysError, match="share one tensor"):
        load_state_dict(Tied(), values)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (r"^backbone\.", "is no rename rule"),
        (None, "is no rename rule"),
        ([("a", "b", "c")], "is no rename rule"),
        ([(b"a", "b")], "is no rename rule"),
        ([("(", "")], "is not a regular expression"),
        ([("weight", r"\3")], "invalid group reference 3"),
    ],
)
def test_rules_that_are_none_are_named(rules: Any, message: str) -> None:
    with pytest.raises(StateDictError, match=message):
        match_state_dict({"weight": torch.ones(2)}, {"weight": torch.ones(2)}, rules=rules)


WEIGHTS = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}


def _html(path: Path) -> None:
    path.write_text("<!DOCTYPE html><title>404</title>")


def _pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")


def _gzipped(path: Path) -> None:
    path.write_bytes(gzip.compress(b"PK" * 40))


def _numpys(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, weight=np.ones((2, 2)))


def _program(path: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), path)


def _bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(WEIGHTS, protocol=2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_html, "a web page.*\nFix: download the file itself"),
        (_pointer, "Git LFS.*\nFix: git lfs pull"),
        (_gzipped, "compressed.\nFix: gunzip"),
        (_numpys, r"numpy's archive of arrays.\nFix: pass .*numpy.load"),
        (_program, r"a TorchScript archive.*Nothing of it was run.\nFix: .*torch.jit.load"),
        (_bare_pickle, "holds pickled objects other than tensors.*torch.storage._load_from_bytes"),
    ],
)
def test_files_that_are_something_else(write: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    write(path)
    with pytest.raises(CheckpointFileError, match=message):
        load_state_dict(nn.Linear(2, 2), path)


@pytest.mark.parametrize(
    "source", ["https://host/weights.pth", "", "a\0b", b"weights.pth", None, 3, nn.Linear(2, 2)]
)
def test_what_is_no_source_is_told_without_looking_for_a_file(source: Any) -> None:
    with pytest.raises(StateDictError, match="Fix: "):
        match_state_dict(source, ["weight"])

"""Other people's files: names as well-known trainers write them, weights in several files, where tensors land."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.dist.checkpoint_sources import (
    CheckpointFileError,
    DamagedFileError,
    MissingCheckpointError,
    read_file,
)
from phalanx.dist.state_dict import (
    AmbiguousKeysError,
    FlattenedShardsError,
    KeysDifferError,
    NothingMatchedError,
    load_state_dict,
    match_state_dict,
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def named(prefix: str, model: nn.Module) -> dict[str, Tensor]:
    return {prefix + key: value.clone() for key, value in model.state_dict().items()}


def _files(model: nn.Module) -> dict[str, Any]:
    """What trainers write, and the entry that the weights are found under."""
    plain = named("", model)
    return {
        "lightning": (
            {"epoch": 3, "state_dict": named("model.", model), "optimizer_states": [{}]},
            "state_dict",
        ),
        "lightning, compiled": ({"state_dict": named("model._orig_mod.", model), "loops": {}}, "state_dict"),
        "fabric": ({"model": named("_forward_module.", model), "iter": 7}, "model"),
        "deepspeed": (
            {"module": plain, "optimizer": None, "ds_version": "0.16.0", "skipped_steps": 0},
            "module",
        ),
        "timm": (
            {"arch": "n", "state_dict": plain, "state_dict_ema": named("", net()), "metric": 0.5},
            "state_dict",
        ),
        "torchvision": (
            {"model": named("module.", model), "model_ema": {"n_averaged": torch.tensor(3)}},
            "model",
        ),
        "trainer with all": (
            {"net": plain, "optimizer": {"state": {}, "param_groups": []}, "acc": 1.0},
            "net",
        ),
        "swa": ({"n_averaged": torch.tensor(2), **named("module.", model)}, None),
        "fsdp": (named("_fsdp_wrapped_module.", model), None),
        "checkpointed": (named("_checkpoint_wrapped_module.", model), None),
    }


@pytest.mark.parametrize("trainer", list(_files(net())))
def test_files_of_well_known_trainers_load_as_they_are(tmp_path: Path, trainer: str) -> None:
    model, other = net(), net()
    content, entry = _files(model)[trainer]
    torch.save(content, tmp_path / "file.pt")
    match = load_state_dict(other, tmp_path / "file.pt")
    assert (match.container, match.missing, match.unexpected) == (entry, [], [])
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)


def _moco(model: nn.Module) -> dict[str, Any]:
    """A contrastive pair of encoders under DDP, with a projection and a queue: two answers fit."""
    state = {**named("module.encoder_q.", model), **named("module.encoder_k.", net())}
    return {"epoch": 200, "arch": "n", "state_dict": {**state, "module.queue": torch.zeros(2, 5)}}


def test_of_two_encoders_in_a_file_the_one_that_is_meant_is_asked_for() -> None:
    model, other = net(), net()
    source = _moco(model)
    with pytest.raises(AmbiguousKeysError) as caught:
        load_state_dict(other, source, strict=False)
    assert "'encoder_q.'" in str(caught.value)
    assert "'encoder_k.'" in str(caught.value)
    match = load_state_dict(other, source, strict=False, rules=[(r"^encoder_q\.", "")])
    assert match.missing == []
    assert len(match.unexpected) == len(model.state_dict()) + 1
    assert torch.equal(other.state_dict()["0.weight"], model.state_dict()["0.weight"])


def test_not_strict_loads_what_fits_and_says_what_did_not() -> None:
    model, other = net(), net()
    source = {key: value for key, value in model.state_dict().items() if not key.startswith("2.")}
    source["aux.weight"] = torch.zeros(1)
    before = other.state_dict()["2.weight"].clone()
    with pytest.raises(KeysDifferError, match=r"2\.weight"):
        load_state_dict(other, source)
    match = load_state_dict(other, source, strict=False)
    assert (match.missing, match.unexpected) == (["2.weight", "2.bias"], ["aux.weight"])
    assert torch.equal(other.state_dict()["0.weight"], source["0.weight"])
    assert torch.equal(other.state_dict()["2.weight"], before)
    with pytest.raises(NothingMatchedError):
        load_state_dict(other, {"aux.weight": torch.zeros(1)}, strict=False)
    with pytest.raises(FlattenedShardsError):
        load_state_dict(other, {"_fsdp_wrapped_module._flat_param": torch.zeros(9)}, strict=False)


def _split(folder: Path, model: nn.Module, kind: str) -> Path:
    """Two files and an index, as Hugging Face's libraries write large models."""
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    if kind == "bin":
        names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    table = {key: names[number % 2] for number, key in enumerate(model.state_dict())}
    for name in names:
        part = {key: value for key, value in model.state_dict().items() if table[key] == name}
        save_file(part, folder / name) if kind == "safetensors" else torch.save(part, folder / name)
    index = folder / (
        "model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json"
    )
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_in_several_files_are_put_together(tmp_path: Path, kind: str) -> None:
    model, other = net(), net()
    index = _split(tmp_path, model, kind)
    for source in (index, tmp_path):
        load_state_dict(other, source)
        assert torch.equal(other.state_dict()["2.weight"], model.state_dict()["2.weight"])


def test_a_split_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    index = _split(tmp_path, net(), "safetensors")
    table = json.loads(index.read_text())
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    with pytest.raises(MissingCheckpointError, match=r"1 of its 2 files(?s:.*)model-00002-of-00002"):
        read_file(index)
    (tmp_path / "away").rename(tmp_path / "model-00002-of-00002.safetensors")
    index.write_text(
        json.dumps({"weight_map": {**table["weight_map"], "3.weight": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(DamagedFileError, match=r"3\.weight"):
        read_file(index)
    index.write_text(json.dumps({"weight_map": {"0.weight": "../secret.pt"}}))
    with pytest.raises(CheckpointFileError, match="not a file beside it"):
        read_file(index)
    index.write_text("[1")
    with pytest.raises(DamagedFileError, match="not an index"):
        read_file(index)


def test_files_are_read_to_the_cpu_wherever_they_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each rank would take memory on the GPU that the file names."""
    places: list[object] = []
    load = torch.load

    def noting(*args: Any, **options: Any) -> Any:
        places.append((options.get("map_location"), options.get("weights_only")))
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", noting)
    for name, zipped in (("zip.pt", True), ("legacy.pt", False)):
        torch.save(net().state_dict(), tmp_path / name, _use_new_zipfile_serialization=zipped)
        read_file(tmp_path / name)
    assert places == [("cpu", True)] * 2
    assert os.listdir(tmp_path)


def test_a_match_for_names_alone_needs_no_model() -> None:
    match = match_state_dict({"module.a.weight": torch.zeros(1)}, ["a.weight"])
    assert list(match.state_dict) == ["a.weight"]

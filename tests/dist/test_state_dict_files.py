"""Files of weights are read by what they hold, never running code; what cannot be read is named."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.dist.state_dict import (
    DamagedFileError,
    MissingCheckpointError,
    PickledCodeError,
    StateDictError,
    load_state_dict,
    match_state_dict,
)
from tests.dist.state_dict_nets import Net


@pytest.mark.parametrize("name", ["weights.pt", "weights.bin", "weights.safetensors", "weights.ckpt"])
def test_files_are_read_by_content(tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file

    model, path = Net(), tmp_path / name
    if name.endswith("safetensors"):
        save_file(model.state_dict(), path)
    else:
        torch.save(
            {"epoch": 1, "state_dict": model.state_dict()},
            path,
            _use_new_zipfile_serialization=name[-1] != "t",
        )
    other = Net()
    load_state_dict(other, path)
    assert torch.equal(other.fc.weight, model.fc.weight)


class Payload:
    """Unpickling this creates a file: proof that pickled code was run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("kind", ["zip", "legacy", "bare pickle"])
def test_pickled_code_is_named_and_never_run(tmp_path: Path, kind: str) -> None:
    path, trace = tmp_path / "evil.pt", tmp_path / "was-run"
    content = {"model": Net().state_dict(), "config": Payload(str(trace))}
    if kind == "bare pickle":
        path.write_bytes(pickle.dumps(content["config"]))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(PickledCodeError, match=r"posix\.mkdir.*\n.*Nothing of it was run"):
        load_state_dict(Net(), path)
    assert not trace.exists()


def test_blocked_types_name_only_what_is_blocked(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "metrics.pt"
    torch.save({"model": Net().state_dict(), "best": np.float64(0.5)}, path)
    with pytest.raises(PickledCodeError) as caught:
        match_state_dict(path, Net())
    named = str(caught.value).splitlines()[0].rpartition(": ")[2].split(", ")
    assert any(name.endswith("multiarray.scalar") for name in named)
    assert all(name.startswith("numpy") for name in named)


@pytest.mark.parametrize("name", ["cut.pt", "cut.safetensors", "cut-legacy.pt"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98])
def test_a_cut_or_empty_file_is_named(tmp_path: Path, name: str, share: float) -> None:
    from safetensors.torch import save_file

    path = tmp_path / name
    if name.endswith("safetensors"):
        save_file(Net().state_dict(), path)
    else:
        torch.save(Net().state_dict(), path, _use_new_zipfile_serialization="legacy" not in name)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    model = Net()
    before = model.fc.weight.clone()
    with pytest.raises(DamagedFileError, match=name):
        load_state_dict(model, path)
    assert torch.equal(model.fc.weight, before)


def test_a_missing_file_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpointError, match="no such file"):
        load_state_dict(Net(), tmp_path / "nothing.pt")
    (tmp_path / "notes.pt").write_text("hello, this is text")
    with pytest.raises(DamagedFileError, match="neither a torch nor a safetensors file"):
        load_state_dict(Net(), str(tmp_path / "notes.pt"))
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    with pytest.raises(StateDictError, match="holds a Tensor"):
        load_state_dict(Net(), tmp_path / "tensor.pt")


def test_a_folder_of_checkpoints_asks_for_one_of_them(tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"step-{step}").mkdir()
    with pytest.raises(MissingCheckpointError, match=r"e\.g\. .*step-10"):
        load_state_dict(Net(), tmp_path)

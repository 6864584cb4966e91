"""Between formats, values, ties and versions stay; what cannot be kept is told."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.dist import CheckpointManager, load_state_dict
from phalanx.tools.ckpt import BadCheckpoint, open_checkpoint
from phalanx.tools.ckpt.converting import convert, kind_of
from phalanx.tools.ckpt.differing import diff
from phalanx.tools.ckpt.verifying import verify
from phalanx.tools.usage import UsageMistake
from tests.tools.ckpt.samples import Tied, trained, tutorial, write_all


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "bare.safetensors", "module.pt", "dcp", "step-7"])
def test_every_format_into_every_other(tmp_path: Path, name: str) -> None:
    files = write_all(tmp_path)
    model, optimizer = trained()
    source = files.get(name, tmp_path / name)
    if name == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.save(tutorial(model, optimizer), checkpoint_id=source, no_dist=True)
    if name == "step-7":
        convert(open_checkpoint(files["bare.pt"]), source, "phalanx")
    targets = [tmp_path / "out" / target for target in ("a.pt", "a.safetensors", "step-3")]
    targets[0].parent.mkdir()
    for target in targets:
        found = convert(open_checkpoint(source, values=True), target, kind_of(str(target), None))
        assert found.tensors == 7
        assert verify(target).problems == []
    model.load_state_dict(torch.load(targets[0], weights_only=True), strict=True)
    model.load_state_dict(load_file(targets[1]), strict=True)
    assert load_state_dict(Tied(), targets[2]).missing == []
    original = open_checkpoint(source, values=True)
    for one, two in itertools.combinations([original, *map(open_checkpoint, targets)], 2):
        assert diff(one, two, weights_only=True).same


def test_our_folder_is_a_starting_point(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(tutorial(model, optimizer), tmp_path / "a.pt")
    convert(open_checkpoint(tmp_path / "a.pt"), tmp_path / "step-3", "phalanx")
    fresh = Tied()
    manager = CheckpointManager(tmp_path / "run", model=fresh, optimizer=torch.optim.Adam(fresh.parameters()))
    manager.restore(else_from=tmp_path / "step-3")
    assert torch.equal(fresh.norm.running_mean, model.norm.running_mean)
    manager.close()


def test_a_dcp_folder_of_several_parts_is_put_together(tmp_path: Path) -> None:
    """Rows from two ranks, and columns, which lie criss-cross."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata

    whole = torch.arange(24.0).reshape(4, 6)
    parts = {
        "rows": whole[:1],
        "rows2": whole[1:],
        "left": whole[:, :2].clone(),
        "right": whole[:, 2:].clone(),
    }
    dcp.save(parts, checkpoint_id=tmp_path / "dcp", no_dist=True)
    index = tmp_path / "dcp" / ".metadata"
    import pickle

    metadata: Metadata = pickle.loads(index.read_bytes())
    joined = {
        "by_row": (("rows", (0, 0)), ("rows2", (1, 0))),
        "by_column": (("left", (0, 0)), ("right", (0, 2))),
    }
    for key, pieces in joined.items():
        entry = metadata.state_dict_metadata[pieces[0][0]]
        chunks = []
        for name, offset in pieces:
            chunk = metadata.state_dict_metadata[name].chunks[0]
            chunk.offsets = torch.Size(offset)
            chunks.append(chunk)
            (place,) = [index for index in metadata.storage_data if index.fqn == name]
            moved = type(place)(key, torch.Size(offset))
            metadata.storage_data[moved] = metadata.storage_data.pop(place)
            metadata.state_dict_metadata.pop(name)
        entry.size, entry.chunks = torch.Size([4, 6]), chunks
        metadata.state_dict_metadata[key] = entry
    index.write_bytes(pickle.dumps(metadata))
    convert(open_checkpoint(tmp_path / "dcp", values=True), tmp_path / "a.pt", "pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(loaded["by_row"], whole)
    assert torch.equal(loaded["by_column"], whole)


def test_views_and_strides_stay_what_they_are(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    content = {
        "turned": base.reshape(10, 100).t(), "part": base[5:8], "same": base[5:8], "last": base[900:].reshape(10, 10)[:, ::3],
        "empty": torch.zeros(0, 4), "number": torch.tensor(3), "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "wide": torch.zeros(3, dtype=torch.uint16), "float8": torch.ones(4).to(torch.float8_e4m3fn),
    }  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    for target in (tmp_path / "b.pt", tmp_path / "b.safetensors"):
        convert(open_checkpoint(tmp_path / "a.pt"), target, kind_of(target.name, None))
        loaded = torch.load(target, weights_only=True) if target.suffix == ".pt" else load_file(target)
        for key, value in content.items():
            assert loaded[key].dtype == value.dtype
            assert loaded[key].shape == value.shape
            assert torch.equal(loaded[key].float(), value.float()), key
    assert torch.load(tmp_path / "b.pt")["image"].is_contiguous(memory_format=torch.channels_last)


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.zeros(3, dtype=torch.complex32) if hasattr(torch, "complex32") else torch.zeros(1)},
        tmp_path / "a.pt",
    )
    with pytest.raises(BadCheckpoint, match="complex32"):
        convert(open_checkpoint(tmp_path / "a.pt"), tmp_path / "b.safetensors", "safetensors")
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="no weights"):
        convert(open_checkpoint(tmp_path / "a.pt"), tmp_path / "b.pt", "pt")
    torch.save({"generator": {"a": torch.zeros(1)}, "critic": {"a": torch.zeros(2)}}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="--entry"):
        convert(open_checkpoint(tmp_path / "a.pt"), tmp_path / "b.pt", "pt")
    convert(open_checkpoint(tmp_path / "a.pt"), tmp_path / "b.pt", "pt", entry="critic")
    assert torch.load(tmp_path / "b.pt")["a"].shape == (2,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]


def test_names_that_do_not_tell_and_folders_that_are_something_else(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(UsageMistake, match="--to"):
        kind_of("model.onnx", None)
    other = tmp_path / "step-1"
    other.mkdir()
    (other / "precious.txt").write_text("x")
    with pytest.raises(UsageMistake, match="holds no checkpoint"):
        convert(open_checkpoint(tmp_path / "a.pt"), other, "phalanx", force=True)
    assert (other / "precious.txt").read_text() == "x"

"""Files of a checkpoint: readable by safetensors alone, and no changed bit goes unseen."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from phalanx.dist import checkpoint_files as files
from phalanx.dist.checkpoint_sources import read_safetensors


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randn(3, 5),
        "transposed": torch.randn(4, 6).t(),
        "half": torch.randn(7).half(),
        "brain": torch.randn(3, 3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "byte": torch.arange(5, dtype=torch.uint8),
    }


def write(folder: Path, number: int = 5) -> Path:
    step = folder / f"step-{number}"
    step.mkdir()
    records = {
        files.MODEL_FILE: files.write_tensors(step / files.MODEL_FILE, tensors(), {"aliases": "{}"}),
        files.STATE_FILE: files.write_json(step / files.STATE_FILE, {"a": [1, 2.5, None]}),
    }
    files.write_manifest(step, number, records)
    return step


def test_tensors_load_with_safetensors_alone(tmp_path: Path) -> None:
    written = tensors()
    files.write_tensors(tmp_path / "x.safetensors", written, {})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.resolve_conj()), name


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(files.DTYPES)), st.lists(st.integers(0, 4), max_size=4)), max_size=6
    )
)
def test_every_dtype_and_shape_survives(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, list[int]]]
) -> None:
    written = {}
    for number, (dtype, shape) in enumerate(kinds):
        content = torch.randint(0, 100, shape)
        written[f"t{number}"] = content.to(getattr(torch, dtype))
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    files.write_tensors(path, written, {})
    found = read_safetensors(path)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in written.items()
    }
    assert all(
        bytes(files.raw_bytes(found[name])) == bytes(files.raw_bytes(t)) for name, t in written.items()
    )


def test_channels_last_is_noted_and_restored(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    files.write_tensors(
        tmp_path / "x.safetensors", {"w": weight}, {"memory_formats": '{"w": "channels_last"}'}
    )
    found = read_safetensors(tmp_path / "x.safetensors")["w"]
    assert torch.equal(found, weight)
    assert found.stride() == weight.stride()


def test_a_tensor_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'sparse' is a Tensor of"):
        files.write_tensors(tmp_path / "x.safetensors", {"sparse": torch.eye(3).to_sparse()}, {})


def test_a_whole_checkpoint_has_no_problems(tmp_path: Path) -> None:
    step = write(tmp_path)
    assert files.find_problems(step) == []
    assert files.quick_problem(step) is None


@pytest.mark.parametrize("name", [files.MODEL_FILE, files.STATE_FILE, files.MANIFEST_FILE])
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    step = write(tmp_path)
    whole = (step / name).read_bytes()
    places = set(range(0, len(whole), max(1, len(whole) // 150))) | {0, 7, 8, len(whole) - 1}
    for place in sorted(places):
        changed = bytearray(whole)
        changed[place] ^= 1 << random.randrange(8)
        (step / name).write_bytes(changed)
        problems = files.find_problems(step)
        assert problems, f"byte {place} of {name}"
        assert name in problems[0]


def test_a_flipped_bit_names_the_tensor(tmp_path: Path) -> None:
    step = write(tmp_path)
    content = bytearray((step / files.MODEL_FILE).read_bytes())
    weight = content.index(bytes(files.raw_bytes(read_safetensors(step / files.MODEL_FILE)["half"])))
    content[weight + 3] ^= 16
    (step / files.MODEL_FILE).write_bytes(content)
    assert files.find_problems(step) == ["model.safetensors: 'half' does not have the hash that was written"]


@pytest.mark.parametrize("name", [files.MODEL_FILE, files.STATE_FILE, files.MANIFEST_FILE])
def test_cut_lengthened_and_missing_files_are_found_without_reading_them(tmp_path: Path, name: str) -> None:
    step = write(tmp_path)
    whole = (step / name).read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
        (step / name).write_bytes(content)
        assert name in str(files.quick_problem(step))
    (step / name).unlink()
    assert name in str(files.quick_problem(step))


def test_a_manifest_of_another_step_is_found(tmp_path: Path) -> None:
    write(tmp_path).rename(tmp_path / "step-9")
    assert files.find_problems(tmp_path / "step-9") == ["manifest.json is that of step 5"]

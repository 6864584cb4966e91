"""Every format, made by the library that users make it with, is described right and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.dist import CheckpointManager
from phalanx.tools.ckpt import BadCheckpoint, open_checkpoint
from phalanx.tools.ckpt.inspecting import Statistics, inspect_json, statistics_of
from phalanx.tools.usage import UsageMistake
from tests.tools.ckpt.samples import Tied, trained, tutorial, write_all

WEIGHTS = {
    "table.weight": [7, 3],
    "norm.weight": [3],
    "norm.bias": [3],
    "norm.running_mean": [3],
    "norm.running_var": [3],
    "norm.num_batches_tracked": [],
    "head.weight": [7, 3],
}


def shapes(path: Path, prefix: str = "") -> dict[str, list[int]]:
    entries = open_checkpoint(path).entries
    return {
        entry.key.removeprefix(prefix): list(entry.shape) for entry in entries if entry.key.startswith(prefix)
    }


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return write_all(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "prefix"),
    [
        ("zip.pt", "torch-zip", "model."),
        ("legacy.pt", "torch-legacy", "model."),
        ("bare.pt", "torch-zip", ""),
        ("module.pt", "torch-zip", ""),
        ("bare.safetensors", "safetensors", ""),
    ],
)
def test_single_files(files: dict[str, Path], name: str, kind: str, prefix: str) -> None:
    assert open_checkpoint(files[name]).format == kind
    assert shapes(files[name], prefix) == WEIGHTS


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt"])
def test_everything_that_torch_would_load_is_told(files: dict[str, Path], name: str) -> None:
    saved = torch.load(files[name], weights_only=True)
    found = inspect_json(open_checkpoint(files[name]))
    assert json.loads(json.dumps(found)) == found
    by_key = {entry["key"]: entry for entry in found["tensors"]}
    for number, state in saved["optimizer"]["state"].items():
        for entry, value in state.items():
            described = by_key[f"optimizer.state.{number}.{entry}"]
            assert described["shape"] == list(value.shape)
            assert described["bytes"] == value.numel() * value.element_size()
    assert found["other"]["epoch"] == 3
    assert found["other"]["optimizer"]["param_groups"][0]["lr"] == 0.001
    assert by_key["model.head.weight"]["shared_with"] == "model.table.weight"
    assert by_key["model.norm.num_batches_tracked"]["dtype"] == "int64"


def test_tied_weights_are_counted_once(files: dict[str, Path]) -> None:
    contents = open_checkpoint(files["bare.pt"])
    assert contents.total_bytes == 4 * (7 * 3 + 4 * 3) + 8


def test_a_pickled_module_names_the_code_it_needs(files: dict[str, Path]) -> None:
    contents = open_checkpoint(files["module.pt"])
    assert "tests.tools.ckpt.samples.Tied" in contents.code
    assert contents.other == {"$type": "tests.tools.ckpt.samples.Tied"}


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float16", "bfloat16", "int8", "uint8", "bool", "complex64", "uint16", "uint32", "float8_e4m3fn", "float8_e5m2"],
)  # fmt: skip
def test_types(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a.pt"
    value = torch.tensor([[0.0, 1.0], [2.0, 3.5]]).to(getattr(torch, dtype))
    torch.save({"a": value, "turned": value.t()}, path)
    contents = open_checkpoint(path)
    assert [entry.dtype for entry in contents.entries] == [dtype, dtype]
    stats = statistics_of(contents)["a"]
    assert isinstance(stats, Statistics)
    assert (
        stats.maximum
        == value.to(torch.complex64 if dtype == "complex64" else torch.float64).abs().max().item()
    )


def test_statistics(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    values = {
        "bad": torch.tensor([1.0, nan, inf, -inf, -3.0, 0.0]),
        "narrow": torch.tensor([nan, 2.0], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "expanded": torch.ones(1).expand(1 << 30, 4),
        "rows": torch.arange(12.0).reshape(3, 4)[:, 1:3],
    }
    torch.save(values, tmp_path / "a.pt")
    found = statistics_of(open_checkpoint(tmp_path / "a.pt"))
    assert found["bad"] == Statistics(1, 2, 1, -3.0, 1.0, pytest.approx(-2 / 3))
    assert found["narrow"] == Statistics(1, 0, 0, 2.0, 2.0, 2.0)
    assert found["empty"] == Statistics(0, 0, 0, None, None, None)
    assert "expanded" in str(found["expanded"])
    assert found["rows"] == Statistics(0, 0, 0, 1.0, 10.0, 5.5)


def test_dcp(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained()
    dcp.save(tutorial(model, optimizer), checkpoint_id=tmp_path / "a", no_dist=True)
    contents = open_checkpoint(tmp_path / "a")
    assert contents.format == "dcp"
    assert shapes(tmp_path / "a", "model.") == WEIGHTS
    assert contents.other["epoch"] == 3
    (tmp_path / "a" / "__0_0.distcp").unlink()
    assert open_checkpoint(tmp_path / "a").problems == ("__0_0.distcp is missing",)


def test_ours(tmp_path: Path) -> None:
    model, optimizer = trained()
    with CheckpointManager(tmp_path / "run", model=model, optimizer=optimizer) as manager:
        step = manager.save(best=0.9)
    for path in (tmp_path / "run", step):
        contents = open_checkpoint(path)
        assert contents.format == "phalanx"
        by_key = {entry.key: entry for entry in contents.entries}
        assert {key: list(by_key[key].shape) for key in WEIGHTS} == WEIGHTS
        assert by_key["head.weight"].shared_with == "table.weight"
        assert list(by_key["optimizer/norm.bias/exp_avg"].shape) == [3]
        assert contents.other["values"] == {"best": 0.9}
        assert contents.facts["world_size"] == 1


def _deepspeed(folder: Path, ranks: int, stage: int) -> Path:
    """The files that DeepSpeed's engine writes, with what it writes into them."""
    step = folder / "global_step5"
    step.mkdir(parents=True)
    model, _ = trained()
    state: dict[str, Any] = {
        "module": {key: value if stage < 3 else value.new_zeros(0) for key, value in model.state_dict().items()},
        "param_shapes": [{key: value.shape for key, value in model.named_parameters()}],
        "dp_world_size": ranks, "mp_world_size": 1, "global_steps": 5, "ds_version": "0.19.8",
    }  # fmt: skip
    names = ["mp_rank_00_model_states.pt"]
    if stage == 3:
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    for name in names:
        torch.save(state, step / name)
    for rank in range(ranks):
        shard = {
            "optimizer_state_dict": {
                "zero_stage": stage,
                "partition_count": ranks,
                "fp32_flat_groups": [torch.zeros(20)],
            }
        }
        torch.save(shard, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("global_step5")
    return folder


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_tells_how_many_ranks_saved_it(tmp_path: Path, stage: int) -> None:
    folder = _deepspeed(tmp_path / "ds", ranks=8, stage=stage)
    for path in (folder, folder / "global_step5"):
        contents = open_checkpoint(path)
        assert contents.format == "deepspeed"
        assert contents.facts["world_size"] == 8
        assert contents.facts["zero_stage"] == stage
        by_key = {entry.key: entry for entry in contents.entries}
        assert by_key["table.weight"].shape == (7, 3)
        assert ("ZeRO-3" in by_key["table.weight"].note) == (stage == 3)
        part = "zero_pp_rank_7_mp_rank_00_optim_states.pt/optimizer_state_dict.fp32_flat_groups.0"
        assert by_key[part].shape == (20,)
    (folder / "global_step5" / "zero_pp_rank_7_mp_rank_00_optim_states.pt").unlink()
    assert open_checkpoint(folder).problems == ("7 of 8 ranks' optimizer files are here",)


def test_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator

    model, optimizer = trained()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.save_state(tmp_path / "a", safe_serialization=False)
    contents = open_checkpoint(tmp_path / "a")
    assert contents.format == "accelerate"
    by_key = {entry.key: entry for entry in contents.entries}
    assert {key: list(by_key[key].shape) for key in WEIGHTS} == WEIGHTS
    assert by_key["optimizer.bin/state.1.exp_avg"].shape == (3,)
    assert "random_states_0.pkl" in contents.other


def test_lightning(tmp_path: Path) -> None:
    model, optimizer = trained()
    content = {
        "epoch": 1, "global_step": 9, "pytorch-lightning_version": "2.4.0", "state_dict": model.state_dict(),
        "loops": {}, "callbacks": {}, "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [],
    }  # fmt: skip
    torch.save(content, tmp_path / "last.ckpt")
    assert open_checkpoint(tmp_path / "last.ckpt").format == "lightning"
    assert shapes(tmp_path / "last.ckpt", "state_dict.") == WEIGHTS


def test_weights_in_several_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {key: value.clone() for key, value in Tied().state_dict().items()}
    keys = list(state)
    table = {}
    for number, part in enumerate((keys[:3], keys[3:])):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({key: state[key] for key in part}, tmp_path / name)
        table |= dict.fromkeys(part, name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    for path in (tmp_path, index):
        assert shapes(path) == WEIGHTS
    index.write_text(json.dumps({"weight_map": {**table, "lost.weight": name}}))
    assert open_checkpoint(index).problems == ("1 keys of the index are in no file: lost.weight",)
    (tmp_path / name).unlink()
    with pytest.raises(BadCheckpoint, match="1 of its 2 files are missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"epoch,loss\n1,2\n", r"neither a torch nor a safetensors file .*\nFix: a \.pt,"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(path)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(BadCheckpoint, match=r"it holds notes\.txt.*\nFix: .* or the folder"):
        open_checkpoint(tmp_path)


def test_what_is_not_there_has_a_near_name(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(UsageMistake, match=r"Fix: .*model\.pt"):
        open_checkpoint(tmp_path / "modle.pt")


def test_torch_is_never_imported(files: dict[str, Path], tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"  # an import of it raises
        "from phalanx.tools.ckpt import open_checkpoint\n"
        "from phalanx.tools.ckpt.inspecting import statistics_of\n"
        "from phalanx.tools.ckpt.verifying import verify\n"
        "from phalanx.tools.ckpt.differing import diff\n"
        "from phalanx.tools.ckpt.converting import convert\n"
        "from pathlib import Path\n"
        "contents = open_checkpoint(sys.argv[1], values=True)\n"
        "statistics_of(contents); verify(Path(sys.argv[1]))\n"
        "assert diff(contents, contents).same\n"
        "convert(contents, Path(sys.argv[2]), 'safetensors')\n"
    )
    words = [sys.executable, "-c", program, str(files["zip.pt"]), str(tmp_path / "out.safetensors")]
    subprocess.run(words, check=True)

"""`phalanx ckpt` as it is typed: exit codes, one message, one JSON object."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.launch.entry import command
from tests.tools.ckpt.samples import write_all


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_all(tmp_path)
    torch.save({"module.a": torch.ones(2), "module.b": torch.ones(3)}, tmp_path / "wrapped.pt")
    torch.save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "plain.pt")
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04cut")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ckpt(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    code = command(["ckpt", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["inspect", "zip.pt"], 0),
        (["inspect", "bare.safetensors", "--stats"], 0),
        (["inspect", "bad.pt"], 1),
        (["inspect", "none.pt"], 2),
        (["inspect", "zip.pt", "--key", "nothing*"], 2),
        (["fix", "wrapped.pt", "--like", "plain.pt"], 0),
        (["fix", "wrapped.pt", "--like", "zip.pt"], 1),
        (["fix", "wrapped.pt", "--like", "none.pt"], 2),
        (["fix", "wrapped.pt", "--like", "plain.pt", "-o", "plain.pt"], 2),
        (["fix", "wrapped.pt", "--like", "plain.pt", "-o", "no/such/folder.pt"], 2),
        (["fix", "wrapped.pt", "--like", "plain.pt", "--rule", "(=x"], 2),
        (["fix", "wrapped.pt", "--like", "plain.pt", "--rule", "nothing"], 2),
        (["diff", "zip.pt", "legacy.pt"], 0),
        (["diff", "wrapped.pt", "plain.pt"], 1),
        (["diff", "wrapped.pt", "plain.pt", "--weights"], 0),
        (["diff", "wrapped.pt", "plain.pt", "--atol", "much"], 2),
        (["convert", "zip.pt", "new.safetensors"], 0),
        (["convert", "zip.pt", "new.onnx"], 2),
        (["convert", "zip.pt", "plain.pt"], 2),
        (["verify", "zip.pt"], 0),
        (["verify", "bad.pt"], 1),
        (["polish", "zip.pt"], 2),
        (["inspect"], 2),
    ],
)
def test_exit_codes_and_messages(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    found, out, err = ckpt(capsys, *words)
    assert found == code, out + err
    assert "Traceback" not in err
    if code == 2:
        assert err.startswith("phalanx ckpt: ")
        assert err.count("\nFix: ") == 1
    if code == 0:
        assert not err
        assert out.endswith("\n")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["inspect", "zip.pt"], {"schema", "format", "tensors", "other"}),
        (["inspect", "zip.pt", "--stats"], {"schema", "format", "tensors", "other"}),
        (["fix", "wrapped.pt", "--like", "a,b"], {"schema", "output", "renamed", "missing", "unexpected"}),
        (["diff", "zip.pt", "plain.pt"], {"schema", "same", "only_first", "only_second", "different"}),
        (["convert", "zip.pt", "new.pt"], {"schema", "output", "tensors", "left_out"}),
        (["verify", "zip.pt"], {"schema", "ok", "problems", "checked"}),
        (["inspect", "bad.pt"], {"schema", "error"}),
        (["verify", "bad.pt"], {"schema", "error"}),
    ],
)
def test_json_is_one_object_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], keys: set[str]
) -> None:
    _, out, err = ckpt(capsys, *words, "--json")
    assert keys <= json.loads(out).keys()
    assert json.loads(out)["schema"] == 1
    assert not err


def test_the_tensors_as_the_contract_has_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ckpt(capsys, "inspect", "plain.pt", "--json")
    tensors = [
        {key: entry[key] for key in ("key", "shape", "dtype", "bytes")}
        for entry in json.loads(out)["tensors"]
    ]
    assert tensors == [
        {"key": "a", "shape": [2], "dtype": "float32", "bytes": 8},
        {"key": "b", "shape": [3], "dtype": "float32", "bytes": 12},
    ]


def test_variables_stand_for_options(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CKPT_LIKE", "plain.pt")
    monkeypatch.setenv("PHALANX_CKPT_OUTPUT", "mine.pt")
    assert ckpt(capsys, "fix", "wrapped.pt")[0] == 0
    assert list(torch.load(folder / "mine.pt")) == ["a", "b"]


def test_a_closed_pipe_and_a_narrow_alphabet(folder: Path) -> None:
    torch.save({f"größe.{n}": torch.ones(1) for n in range(3000)}, "many.pt")
    program = f"{shlex.quote(sys.executable)} -m phalanx ckpt inspect many.pt | head -1"
    done = subprocess.run(
        program, shell=True, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    )  # fmt: skip
    assert "3000 tensors" in done.stdout
    assert not done.stderr

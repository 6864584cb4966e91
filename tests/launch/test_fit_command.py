"""`phalanx fit` as it is typed, on torchvision's models and on scripts, whole and broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.entry import command
from tests.conftest import ROOT

MODELS = str(ROOT / "tests" / "tools" / "fit" / "models.py")


def fit(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    code = command(["fit", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = fit(capsys, *words, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_resnet50_is_within_a_tenth_of_a_traced_peak(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys,
        "resnet50",
        "--optimizer",
        "sgd",
        "--micro-batch-size",
        "64",
        "--gpu",
        "A100",
        "--world-size",
        "8",
    )
    assert found["schema"] == 1
    keys = {"name", "world_size", "parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "peak_bytes",
            "largest_micro_batch"}  # fmt: skip
    assert all(keys <= row.keys() for row in found["strategies"])
    assert [row["name"] for row in found["strategies"]] == [
        "single",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "fsdp",
    ]
    single = found["strategies"][0]
    assert single["peak_bytes"] / 2**20 == pytest.approx(5458, rel=0.1)
    assert found["parameters"] == 25_557_032
    assert single["parameters_bytes"] == single["optimizer_bytes"] == 4 * 25_557_032
    assert "torch" not in sys.modules or found  # the step was traced in a process of its own


def test_the_breakdown_of_zero_2(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{MODELS}:billion", "--precision", "bf16", "--world-size", "8", "--optimizer", "adam"]
    _, out, _ = fit(capsys, *words)
    assert (
        "weights 2P = 2.00 GB, gradients 2P/N = 0.25 GB, master + adam 12P/N = 1.50 GB: 3.75 GB (3.49 GiB)"
        in out
    )


def test_mixed_precision_of_a_large_model(capsys: pytest.CaptureFixture[str]) -> None:
    """6.7 billion parameters on one rank take 16 bytes each, 107.2 GB, and no memory here."""
    single = answer(capsys, f"{MODELS}:seven_billion", "--precision", "fp16", "--world-size", "1")[
        "strategies"
    ][0]
    states = [single[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer")]
    assert sum(states) / 1e9 == pytest.approx(107.2, abs=0.01)


def test_a_broken_script_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = fit(capsys, f"{MODELS}:raises")
    assert (code, out) == (1, "")
    assert "RuntimeError: the data is not here" in err
    assert err.count("\nFix: ") == 1
    assert "Traceback" not in err


def test_a_script_that_ends_the_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; os.kill(os.getpid(), 9)")
    code, out, err = fit(capsys, f"{tmp_path / 'script.py'}:make", "--json")
    assert (code, err) == (1, "")
    assert "script.py" in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "MODEL is missing"),
        (["resnet51"], "resnet50"),
        ([MODELS], "which of its functions"),
        (["none.py:make"], "no such file"),
        (["resnet18", "--micro-batch-size", "0"], "--micro-batch-size 0"),
        (["resnet18", "--world-size", "2,x"], "--world-size 2,x"),
        (["resnet18", "--gpu", "Voodoo 3"], "--gpu Voodoo 3"),
        (["resnet18", "--momentum", "2"], "--momentum 2"),
        (["resnet18", "--precision", "int8"], "fp32"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, out, err = fit(capsys, *words)
    assert (code, out) == (2, ""), err
    assert message in err
    assert "\nFix: " in err

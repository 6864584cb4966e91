"""The benchmark that compares engines, in short: it finds agreement, and would find a difference."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "engine_agreement.py"


def test_every_engine_agrees_with_one_process() -> None:
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--steps", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    engines = [
        name for name in ("ddp", "fsdp", "accelerate") if name == "ddp" or name == "fsdp" or find_spec(name)
    ]
    if find_spec("deepspeed"):
        engines += [f"ZeRO {stage}" for stage in range(4)]
    assert {row["engine"] for row in result["rows"]} == set(engines)
    assert {row["optimizer"] for row in result["rows"]} == {"sgd", "adam"}
    assert all(
        row["weights"] > 0 for row in result["rows"] if row["engine"] == "ddp"
    )  # other sums, not the same ones


def test_what_is_over_a_limit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # where a script finds what all of them share
    spec = importlib.util.spec_from_file_location("bench_engine_agreement", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = {"first_gradients": None, "weights": 1e-9}
    assert module.within(row)
    assert not module.within({**row, "weights": 2e-8})
    assert module.within({"first_gradients": 1e-7, "weights": 1e-6})
    assert not module.within({"first_gradients": 2e-6, "weights": 1e-6})
    assert not module.within({"first_gradients": 1e-7, "weights": float("nan")})

"""A recipe's job in this rank, broken off on request, and two runs compared: what every recipe's tests need."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from phalanx.recipes.ledger import Ledger
from phalanx.recipes.runs import read_metrics
from phalanx.recipes.settings import RunSettings, SettingsError


def run_job(
    train: Callable[[Any], object],
    settings: RunSettings,
    folder: str,
    changes: dict[str, Any],
    stop_at: int | None = None,
) -> str:
    """Train in ``folder``; what it prints. With ``stop_at`` it breaks off within that step.

    For a process of its own: it changes the working folder, and `Ledger` for good.
    """
    os.chdir(folder)
    if stop_at is not None:
        note = Ledger.note

        def note_or_stop(self: Ledger, loader: Any) -> None:
            note(self, loader)
            if loader.progress.step == stop_at:
                raise KeyboardInterrupt

        Ledger.note = note_or_stop  # type: ignore[method-assign]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            train(dataclasses.replace(settings, **changes))
        except KeyboardInterrupt:
            print("cut short")
        except SettingsError as error:
            print(f"refused: {error}")
    gc.collect()  # loader workers of a broken-off epoch end with their loader, else seconds after their rank
    return out.getvalue()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint of the run in ``folder``."""
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    return load_file(newest / "model.safetensors")


def assert_equal_runs(first: Path, second: Path) -> None:
    """The same weights to the bit, and the same lines in the log."""
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert read_metrics(first / "metrics.jsonl") == read_metrics(second / "metrics.jsonl")

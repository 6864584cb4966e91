"""The question to the child process, which imports torch and the model's code so that this one need not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from phalanx.tools.fit.targets_text import split_target
from phalanx.tools.usage import CannotFinish, UsageMistake

TIMEOUT_S = 300


class BadTarget(ValueError):
    """The script or the model cannot be fitted: exit code 1."""


def ask_child(request: dict[str, Any]) -> dict[str, Any]:
    """What the child traced.

    Raises:
        BadTarget: The model or its script is broken; one message says how.
        UsageMistake: There is no such model or function.
        CannotFinish: torch is not there, or the child died.
    """
    split_target(request["target"])
    with tempfile.TemporaryDirectory(prefix="phalanx-fit-") as folder:
        ask, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        ask.write_text(json.dumps(request))
        words = [sys.executable, "-m", "phalanx.tools.fit.child", str(ask), str(answer)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BadTarget(
                f"{request['target']}: not done after {TIMEOUT_S} s.\nFix: does its script train, or wait for something, when it is imported?"
            ) from None
        finally:
            _end(process)
        if not answer.is_file() or process.returncode:
            raise _died(request["target"], process.returncode, output)
        found: dict[str, Any] = json.loads(answer.read_text())
    if found.get("typed"):
        raise UsageMistake(found["problem"])
    if "problem" in found:
        raise BadTarget(found["problem"])
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """The child and whatever its script has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def _died(target: str, code: int, output: bytes) -> Exception:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:500] if lines else "no output"
    if "No module named 'torch'" in last:
        return CannotFinish(
            f"torch is not installed for {sys.executable}.", fix=f"{sys.executable} -m pip install torch"
        )
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if code == 0:
        return BadTarget(
            f"{target}: its code ended the process.\nFix: keep sys.exit() and os._exit() out of what is imported"
        )
    return BadTarget(
        f"{target}: the process that ran it ended with {how}: {last}\nFix: python -c 'import torch' works? Does the script run by itself?"
    )

"""What Slurm says of its job: why it ends, and which of its nodes are down."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

_ANSWER_S = 5.0
_ENDS = {
    "TIMEOUT": "its time limit was reached",
    "OUT_OF_MEMORY": "it used more memory than it asked for (--mem), and was killed",
    "NODE_FAIL": "one of its nodes failed",
    "PREEMPTED": "another job took its place (preempted)",
    "CANCELLED": "it was cancelled (scancel)",
    "DEADLINE": "its deadline passed",
}


def ending(environ: Mapping[str, str] = os.environ) -> str:
    """One sentence about the job's own end, "" outside a job and while it goes on undisturbed."""
    job = environ.get("SLURM_JOB_ID", "")
    words = _scontrol(environ, "--oneliner", "show", "job", job).split() if job else []
    state = next((word.partition("=")[2] for word in words if word.startswith("JobState=")), "")
    return f"Slurm: job {job} is {state}: {_ENDS[state]}" if state in _ENDS else ""


def node_state(node: str, environ: Mapping[str, str] = os.environ) -> str:
    """One sentence about a node that Slurm holds for down or not answering, "" for a healthy or unknown one."""
    if not environ.get("SLURM_JOB_ID"):
        return ""
    words = _scontrol(environ, "--oneliner", "show", "node", node).split()
    state = next((word.partition("=")[2] for word in words if word.startswith("State=")), "")
    if any(sign in state for sign in ("DOWN", "FAIL", "NOT_RESPONDING", "*", "POWER")):
        return f"Slurm: node {node} is {state}"
    return ""


def _scontrol(environ: Mapping[str, str], *words: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *words],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""

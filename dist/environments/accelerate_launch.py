"""``accelerate launch``, which starts one process where several were asked for without ``--multi_gpu``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from phalanx.dist.environments.rank_environment import InvalidRankEnvironment
from phalanx.dist.environments.torchrun import IDENTITY, is_set


def refuse_lone_process(environ: Mapping[str, str], command: str | None = None) -> None:
    """Raise when ``accelerate launch --num_processes 2`` has started this process alone.

    It then sets where ranks meet, but no rank. For one process it sets neither.

    >>> refuse_lone_process({"ACCELERATE_MIXED_PRECISION": "no"})

    Args:
        environ: The variables to read.
        command: The launcher's command line, by default the parent process's.

    Raises:
        InvalidRankEnvironment: That is so.
    """
    if not is_set(environ, "ACCELERATE_MIXED_PRECISION"):
        return
    meets = is_set(environ, "MASTER_ADDR") and is_set(environ, "MASTER_PORT")
    if not meets or any(is_set(environ, name) for name in IDENTITY):
        return
    asked = re.search(r"--num[_-]processes[=\s](\d+)", _parent_command() if command is None else command)
    if asked is not None and int(asked[1]) < 2:
        return  # the variables are the user's own
    count = asked[1] if asked is not None else "several"
    raise InvalidRankEnvironment(
        f"accelerate launch was asked for {count} processes and has started this one alone: MASTER_PORT="
        f"{environ['MASTER_PORT']} is set, and RANK is not.\n"
        "It would train by itself, as if there were no others.\n"
        f"Fix: accelerate launch --multi_gpu --num_processes {asked[1] if asked is not None else 2} (on the CPU as well, without "
        f"--cpu), or `phalanx run --nproc-per-node {asked[1] if asked is not None else 2}`"
    )


def _parent_command() -> str:
    try:
        return (
            Path(f"/proc/{os.getppid()}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""

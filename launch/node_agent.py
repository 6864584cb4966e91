"""A node agent that a driver started: `phalanx run` of one node, told by the driver what the user typed."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from phalanx.launch import processes
from phalanx.launch.driver_line import DriverLine
from phalanx.launch.options import Given
from phalanx.launch.placement import Placement
from phalanx.launch.preflight import way_to
from phalanx.launch.spec import RunSpec, WorkerMain
from phalanx.tools.usage import CannotFinish, UsageMistake


def agent(fd: int, parent: int) -> int | WorkerMain:
    """Get ready, wait for the word to go, and run this node's ranks; returns as `run` does."""
    processes.die_with_parent(parent)
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    line = DriverLine(sock, 0)
    job = line.hear()
    if job is None:
        return 143
    line.node = job["node"]
    sys.argv[0] = "phalanx"
    try:
        spec, placement = prepared(job)
    except (UsageMistake, CannotFinish) as error:
        code = 2 if isinstance(error, UsageMistake) else 3
        line.tell("refused", message=str(error), exit_code=code)
        return code
    content = {**asdict(spec), "log_dir": str(spec.log_dir)}
    line.tell("ready", spec=content, devices=placement.devices, threads=placement.threads)
    problem = _import_torch(spec)
    if problem is not None:
        line.tell("refused", message=problem, exit_code=3)
        return 3
    line.tell("torch")
    go = line.hear()
    if go is None:
        return 143
    own, interface = way_to(go["address"])
    if interface is not None:
        # Gloo would look its address up by the host's own name, which may mean loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    own = spec.local_addr or own
    spec = replace(spec, master_addr=go["address"], master_port=go["port"], local_addr=own)
    from phalanx.launch.run import run

    return run(spec, line)


def prepared(job: Mapping[str, Any]) -> tuple[RunSpec, Placement]:
    """The job as this node sees it, checked against what is here."""
    from phalanx.launch.run_command import build_spec
    from phalanx.launch.targets import resolve

    given = {key: Given(text, source) for key, (text, source) in job["given"].items()}
    target = resolve(
        job["target"], module="module" in given, no_python="no_python" in given and "run_path" not in given
    )
    spec, placement = build_spec(target, job["args"], given, command_line=job["command_line"])
    log_dir = Path(job["log_dir"])
    there = next(folder for folder in (log_dir, *log_dir.parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise UsageMistake(
            f"the log folder {str(log_dir)!r} cannot be made: {str(there)!r} takes no files of yours, "
            "and no rank would leave a log.",
            fix="--log-dir FOLDER, a folder that every host can write to",
        )
    return replace(spec, log_dir=log_dir), placement


def _import_torch(spec: RunSpec) -> str | None:
    """Import it while the driver still looks at the other hosts; a message where that cannot be."""
    if spec.omp_num_threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(spec.omp_num_threads))
    gc.disable()
    try:
        import torch
        import torch.distributed  # noqa: F401
    except Exception as error:
        return f"torch cannot be imported by {sys.executable}: {type(error).__name__}: {error}"
    finally:
        gc.enable()
    return None


if __name__ == "__main__":
    outcome = agent(int(sys.argv[1]), int(sys.argv[2]))
    if isinstance(outcome, int):
        sys.exit(outcome)
    outcome()

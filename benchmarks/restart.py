"""From the death of a rank to the first all-reduce after the restart: `phalanx run` beside torchrun.

    python benchmarks/restart.py                    50 restarts of ours, 10 clean ones of torchrun, 10 without its remedy
    python benchmarks/restart.py --runs 5 --json    5 of ours and 5 of torchrun's each
    python benchmarks/restart.py --nodes 2          the ranks on two nodes: an agent each, on this machine

Rank 1 of 2 writes down the time and ends by os._exit(1); rank 0 waits in an all-reduce for it. torchrun shares one
store over all attempts unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; without it restarted gloo ranks may read the
addresses of dead peers and wait. Those runs are ended after ``--limit-s`` and counted.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from conditions import arguments, conditions, in_words, told_as_json

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
folder, restarts = sys.argv[1], int(sys.argv[2])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
numbers = torch.ones(1)
dist.all_reduce(numbers)
now = time.time()
assert numbers.item() == dist.get_world_size()
if dist.get_rank() == 0 and attempt > 0:
    with open(f"{folder}/alive-{attempt}", "w") as file:
        file.write(repr(now))
dist.barrier()
if attempt < restarts:
    if dist.get_rank() == 1:
        with open(f"{folder}/dead-{attempt + 1}", "w") as file:
            file.write(repr(time.time()))
        os._exit(1)
    dist.all_reduce(numbers)
dist.barrier()
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _agents(head: list[str], nodes: int) -> list[list[str]]:
    """The command of every node."""
    if nodes == 1:
        alone = ["--standalone"] if "torch.distributed.run" in head else []
        return [[*head, *alone, "--nproc-per-node", "2"]]
    meet = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    return [[*head, *meet, "--nproc-per-node", "1", "--node-rank", str(number)] for number in range(nodes)]


def run(
    head: list[str], nodes: int, restarts: int, environ: Mapping[str, str], limit_s: float
) -> list[float]:
    """Seconds from death to all-reduce for each restart of one command that was clean."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        tail = ["--max-restarts", str(restarts), str(folder / "script.py"), name, str(restarts)]
        processes = [
            subprocess.Popen(
                [*words, *tail],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for words in _agents(head, nodes)
        ]
        deadline = time.monotonic() + limit_s
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = []
        for number in range(1, restarts + 1):
            dead, alive = folder / f"dead-{number}", folder / f"alive-{number}"
            if dead.exists() and alive.exists():
                found.append(float(alive.read_text()) - float(dead.read_text()))
        return found


def measure(nodes: int, ours: int, theirs: int, limit_s: float) -> dict[str, Any]:
    """All three rows: restarts tried, clean ones, and their seconds."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    phalanx = [sys.executable, "-m", "phalanx", "run"]
    remedy = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    rows: dict[str, Any] = {}

    def row(name: str, tried: int, seconds: list[float]) -> None:
        median = statistics.median(seconds) if seconds else None
        rows[name] = {"tried": tried, "clean": len(seconds), "median_s": median, "seconds": seconds}

    row("phalanx run", ours, run(phalanx, nodes, ours, {}, limit_s + 2.0 * ours))
    clean: list[float] = []
    tried = 0
    while len(clean) < theirs and tried < 3 * theirs:
        clean += run(torchrun, nodes, 1, remedy, limit_s)
        tried += 1
    row("torchrun, own store per attempt", tried, clean)
    row("torchrun", theirs, [s for _ in range(theirs) for s in run(torchrun, nodes, 1, {}, limit_s)])
    return rows


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, help="restarts per row; default 50 of ours, 10 of torchrun's")
    parser.add_argument(
        "--limit-s", type=float, default=30.0, help="a run of torchrun is given up after this"
    )
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    options = parser.parse_args()
    rows = measure(options.nodes, options.runs or 50, options.runs or 10, options.limit_s)
    theirs = rows["torchrun, own store per attempt"]["median_s"]
    ratio = rows["phalanx run"]["median_s"] / theirs if theirs else None
    result = {
        **conditions("python", "torch", "cores", "machine"),
        "nodes": options.nodes,
        "ratio": ratio,
        "rows": rows,
    }
    if told_as_json(result, options):
        return
    print(f"{in_words(result)}, 2 ranks on gloo, {options.nodes} node(s)")
    for name, row in rows.items():
        median = f"{row['median_s']:.3f} s" if row["median_s"] is not None else "-"
        print(f"{name:34} {row['clean']:3} of {row['tried']:3} restarts clean, median {median}")
    if ratio is not None:
        print(f"phalanx run / torchrun: x {ratio:.3f}")


if __name__ == "__main__":
    main()

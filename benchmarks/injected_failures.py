"""Failures of ten kinds on two nodes of two ranks each: whom does the launcher name?

    python benchmarks/injected_failures.py                   10 of each kind of ours, 3 of each of torchrun's; as root
    python benchmarks/injected_failures.py --runs 1 --torchrun-runs 0 --json

The nodes are network namespaces (tests/lab.py). The rank that fails goes round over all four. Ours is right when the one
report on node 0 names rank and node. torchrun prints a report on every node whose ranks failed, with a "Root Cause" each:
it is counted twice, as right when all of them name the rank, and as right when at least one does. For a killed agent any
rank of its node is right. A run that does not end within ``--limit-s`` is ended, and names nobody.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from conditions import arguments, conditions, in_words, told_as_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests import lab as labs

RANKS_PER_NODE = 2
KINDS = (
    "exception",
    "before-group",
    "in-thread-pool",
    "sys.exit",
    "os._exit",
    "SIGKILL",
    "SIGSEGV",
    "SIGABRT",
    "loader-worker",
    "agent",
)
SCRIPT = """
import ctypes, os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
kind, who = sys.argv[1], int(sys.argv[2])
mine = int(os.environ["RANK"]) == who
if kind == "before-group" and mine:
    import a_module_that_is_not_there
class Numbers:
    def __len__(self):
        return 8
    def __getitem__(self, number):
        if kind == "loader-worker" and mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return number
def boom():
    raise ValueError("injected")
dist.init_process_group("gloo")
numbers = torch.ones(4)
for step in range(5):
    dist.all_reduce(numbers)
if mine:
    if kind == "exception":
        boom()
    if kind == "in-thread-pool":
        with ThreadPoolExecutor() as pool:
            pool.submit(boom).result()
    if kind == "sys.exit":
        sys.exit(3)
    if kind == "os._exit":
        os._exit(7)
    if kind.startswith("SIG"):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), getattr(signal, kind))
    if kind == "loader-worker":
        list(DataLoader(Numbers(), num_workers=1))
    if kind == "agent":
        open(sys.argv[3], "w").close()
        time.sleep(60)
for step in range(5):
    dist.all_reduce(numbers)
"""


def started(
    lab: labs.Lab, head: Sequence[str], folder: Path, kind: str, who: int
) -> list[subprocess.Popen[str]]:
    """The agents of one run, by node."""
    agents = []
    for number, node in enumerate(lab.nodes.values()):
        words = [*head, "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(RANKS_PER_NODE)]
        words += ["--master-addr", labs.NETWORK + ".1", "--master-port", "29500", str(folder / "script.py")]
        agents.append(
            subprocess.Popen(
                node.words(*words, kind, str(who), str(folder / "now")),
                cwd=folder,
                env=lab.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                stdin=subprocess.DEVNULL,
                stdout=(folder / f"printed-{number}").open("w"),
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return agents


def _kill_agent(process: subprocess.Popen[str]) -> None:
    family = psutil.Process(process.pid).children(recursive=True)
    next(child for child in family if child.name().startswith(("python", "phalanx"))).kill()


def one_run(
    lab: labs.Lab, head: Sequence[str], kind: str, who: int, limit_s: float
) -> tuple[list[str], float]:
    """What each node printed, and the seconds until all agents had ended (the limit, where they had not)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        begun = time.monotonic()
        agents = started(lab, head, folder, kind, who)
        while any(agent.poll() is None for agent in agents) and time.monotonic() < begun + limit_s:
            if (folder / "now").exists():
                (folder / "now").unlink()
                _kill_agent(agents[who // RANKS_PER_NODE])
            time.sleep(0.02)
        elapsed_s = time.monotonic() - begun
        for agent in agents:
            for process in psutil.Process(agent.pid).children(recursive=True) if agent.poll() is None else ():
                process.kill()
            agent.kill()
            agent.wait()
        return [(folder / f"printed-{number}").read_text(errors="replace") for number in (0, 1)], elapsed_s


def is_right(kind: str, who: int, rank: int, node: int) -> bool:
    """Whether a report names the rank that failed and its node."""
    return node == who // RANKS_PER_NODE and (rank == who or kind == "agent")


def ours(printed: Sequence[str], kind: str, who: int) -> bool:
    """By the report: on node 0, or on node 1 where the agent of node 0 is what was killed."""
    told = printed[1] if kind == "agent" and who < RANKS_PER_NODE else printed[0]
    found = re.findall(r"^First failure: rank (\d+) \(local rank \d+, node (\d+)\)", told, re.MULTILINE)
    return len(found) == 1 and is_right(kind, who, *map(int, found[0]))


def theirs(printed: Sequence[str], kind: str, who: int) -> tuple[bool, bool]:
    """Whether all of torchrun's reports are right, and whether one is."""
    ranks = [
        int(found[1])
        for text in printed
        if (found := re.search(r"Root Cause.*?rank\s*: (\d+) ", text, re.DOTALL))
    ]
    right = [is_right(kind, who, rank, rank // RANKS_PER_NODE) for rank in ranks]
    return bool(right) and all(right), any(right)


def measure(runs: int, torchrun_runs: int, limit_s: float, say: Any) -> list[dict[str, Any]]:
    """One row for each kind."""
    phalanx = [sys.executable, "-m", "phalanx", "run"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    rows = []
    with labs.lab(("n1", "n2")) as lab:
        for kind in KINDS:
            row: dict[str, Any] = {"kind": kind, "runs": runs, "right": 0, "torchrun_runs": torchrun_runs}
            row |= {"torchrun_all_right": 0, "torchrun_one_right": 0, "wrong": [], "longest_s": 0.0}
            for number in range(runs):
                printed, elapsed_s = one_run(lab, phalanx, kind, number % 4, limit_s)
                right = ours(printed, kind, number % 4)
                row["right"] += right
                row["longest_s"] = max(row["longest_s"], elapsed_s)
                if not right:
                    row["wrong"].append([text[-2000:] for text in printed])
            for number in range(torchrun_runs):
                all_right, one_right = theirs(
                    one_run(lab, torchrun, kind, number % 4, limit_s)[0], kind, number % 4
                )
                row["torchrun_all_right"] += all_right
                row["torchrun_one_right"] += one_right
            rows.append(row)
            say(
                f"{kind:15} phalanx run {row['right']:3} of {runs}; torchrun, all its reports right "
                f"{row['torchrun_all_right']} of {torchrun_runs}, one of them {row['torchrun_one_right']}"
            )
    return rows


def main() -> int:
    """Measure and print; 1 where fewer than 98 of 100 were named right."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="runs of ours for each kind")
    parser.add_argument("--torchrun-runs", type=int, default=3, help="runs of torchrun for each kind")
    parser.add_argument("--limit-s", type=float, default=30.0, help="a run is ended after this")
    options = parser.parse_args()
    absent = labs.missing()
    if absent is not None:
        raise SystemExit(f"no lab: {absent}")
    out = sys.stderr if options.json else sys.stdout
    rows = measure(
        options.runs, options.torchrun_runs, options.limit_s, lambda text: print(text, file=out, flush=True)
    )
    total = {
        name: sum(row[name] for row in rows)
        for name in ("runs", "right", "torchrun_runs", "torchrun_all_right", "torchrun_one_right")
    }
    result = {**conditions("python", "torch", "cores", "machine"), **total, "rows": rows}
    if not told_as_json(result, options):
        print(f"{in_words(result)}, 2 nodes of 2 ranks on gloo; {total}")
        for row in rows:
            for printed in row["wrong"]:
                print(f"--- not right: {row['kind']}", *printed, sep="\n")
    return int(total["right"] < 0.98 * total["runs"])


if __name__ == "__main__":
    sys.exit(main())

"""From the command to the first all-reduce of 2 nodes with one rank each: `phalanx run --hosts`, DeepSpeed, torchrun.

    python benchmarks/ssh_start.py               7 rounds, after one to warm the file cache
    python benchmarks/ssh_start.py --runs 3 --json

The nodes are network namespaces on this machine, each with its own sshd (as root; openssh-server, iproute2, pdsh).
DeepSpeed starts by pdsh over the same ssh: of its launchers the one that needs no MPI and no Slurm. torchrun is
started on both nodes at once by this script, without ssh. All take turns, so that other load meets each of them; a
ratio is the median over the rounds.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.lab import Lab, lab, missing

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.ones(1)
dist.all_reduce(numbers)
assert numbers.item() == 2
if dist.get_rank() == 0:
    with open("reduced", "w") as file:
        file.write(str(time.time()))
dist.barrier()
dist.destroy_process_group()
"""


def commands(folder: Path) -> dict[str, list[tuple[str, list[str]]]]:
    """What a user would type, by name: the node and the words."""
    python = sys.executable
    torchrun = [python, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meet = ["--master-addr", "10.77.0.1", "--master-port", "29511"]
    deepspeed = [python, "-m", "deepspeed.launcher.runner", "--hostfile", "hosts.txt"]
    deepspeed += ["--master_addr", "10.77.0.1", "--master_port", "29512"]
    logs = str(folder / "logs")
    found = {
        "phalanx run": [("n1", [python, "-m", "phalanx", "run", "--hosts", "n1,n2", "--log-dir", logs, "script.py"])],
        "torchrun": [(f"n{k + 1}", [*torchrun, *meet, "--node-rank", str(k), "script.py"]) for k in (0, 1)],
    }  # fmt: skip
    if shutil.which("pdsh") is not None:
        found["deepspeed"] = [("n1", [*deepspeed, "script.py"])]
    return found


def start_s(nodes: Lab, folder: Path, words: list[tuple[str, list[str]]]) -> float:
    """Seconds from the start of the command to the end of the first all-reduce on rank 0."""
    own = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PDSH_RCMD_TYPE": "ssh",
        "DS_ACCELERATOR": "cpu",
    }
    environ = nodes.environ | own
    (folder / "reduced").unlink(missing_ok=True)
    (folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in own.items()))
    begun = time.time()
    with tempfile.TemporaryFile("w+") as said:
        running = [
            subprocess.Popen(
                nodes[name].words(*line, cwd=folder), env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
            for name, line in words
        ]  # fmt: skip
        codes = [process.wait(300) for process in running]
        said.seek(0)
        assert codes == [0] * len(codes), said.read()
    nodes.settle()
    return float((folder / "reduced").read_text()) - begun


def measure(runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, lab(("n1", "n2")) as nodes:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "hosts.txt").write_text("n1 slots=1\nn2 slots=1\n")
        seconds: dict[str, list[float]] = {what: [] for what in commands(folder)}
        for number in range(runs + 1):
            for what, words in commands(folder).items():
                taken = start_s(nodes, folder, words)
                if number:
                    seconds[what].append(taken)
    ours = seconds["phalanx run"]
    ratios = {
        what: [a / b for a, b in zip(ours, theirs, strict=True)]
        for what, theirs in seconds.items()
        if what != "phalanx run"
    }
    return {
        "seconds": {what: round(statistics.median(taken), 3) for what, taken in seconds.items()},
        "ratios": {
            what: {
                "median": round(statistics.median(r), 3),
                "low": round(min(r), 3),
                "high": round(max(r), 3),
            }
            for what, r in ratios.items()
        },
        "runs": runs,
        **conditions("torch", "python", "cores", "machine", "load"),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=7, help="rounds that count")
    options = parser.parse_args()
    problem = missing()
    if problem is not None:
        sys.exit(f"ssh_start.py {problem}")
    result = measure(options.runs)
    if told_as_json(result, options):
        return
    for what, taken in result["seconds"].items():
        print(f"{what:12} {taken:6.2f} s")
    for what, ratio in result["ratios"].items():
        print(
            f"ratio to {what}: {ratio['median']} ({ratio['low']} to {ratio['high']}), {result['runs']} rounds"
        )
    print(in_words(result))


if __name__ == "__main__":
    main()

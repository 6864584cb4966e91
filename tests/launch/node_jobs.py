"""A job on the nodes of a lab, for tests: `phalanx run` started on each node as a user would by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.lab import Lab, Node
from tests.launch.launching import MARKER, marked_processes, wait_until

#: Ranks that meet, then do what their arguments say, then meet once more.
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

what, who = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
numbers = torch.ones(1)
dist.all_reduce(numbers)
print(f"rank {dist.get_rank()} of {int(numbers.item())} is here", flush=True)
first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if dist.get_rank() == who and first_attempt:
    if what == "raise":
        raise ValueError("boom on purpose")
    if what == "kill":
        os.kill(os.getpid(), 9)
    if what == "exit":
        os._exit(7)
    if what == "fill":
        with open(os.path.join(sys.argv[3], "file"), "wb") as file:
            while True:
                file.write(bytes(1 << 20))
if what == "wait":
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.05)
        dist.all_reduce(numbers)
dist.all_reduce(numbers)
dist.barrier()
print(f"rank {dist.get_rank()} is done", flush=True)
"""


class NodeJob:
    """One job; every process of it, on every node, carries its marker."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.marker = uuid.uuid4().hex
        self.script = folder / "train.py"
        self.script.write_text(textwrap.dedent(SCRIPT))
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        node: Node,
        *words: object,
        options: Sequence[object] = (),
        ranks: int = 1,
        environ: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        """`phalanx run` on a node; ``words`` are the script's."""
        logs = self.folder / f"logs-{node.name}"
        command = [
            *before,
            sys.executable,
            "-m",
            "phalanx",
            "run",
            "--nproc-per-node",
            ranks,
            "--log-dir",
            logs,
        ]
        with self.printed(node.name).open("ab") as out:
            self.agents[node.name] = subprocess.Popen(
                node.words(*map(str, [*command, *options, self.script, *words])),
                cwd=self.folder,
                env=self.lab.environ | {MARKER: self.marker} | dict(environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def start_all(
        self,
        *words: object,
        options: Sequence[object] = (),
        of: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """One agent on every node, by node rank; ``of`` has keyword arguments of single nodes."""
        nodes = list(self.lab.nodes.values())
        for number, node in enumerate(nodes):
            meet = ["--nnodes", len(nodes), "--node-rank", number, "--master-addr", nodes[0].address]
            self.start(node, *words, options=[*meet, *options], **(of or {}).get(node.name, {}))

    def printed(self, node: str) -> Path:
        return self.folder / f"printed-{node}.txt"

    def text(self, node: str) -> str:
        return self.printed(node).read_text(errors="replace")

    def wait_for(self, node: str, text: str, times: int = 1, timeout_s: float = 90.0) -> None:
        wait_until(lambda: self.text(node).count(text) >= times, f"{text!r} from {node}", timeout_s)

    def end(self, timeout_s: float = 120.0) -> dict[str, int]:
        """Exit codes by node, once all agents have ended; no process of the job may be left by then."""
        codes = {name: agent.wait(timeout_s) for name, agent in self.agents.items()}
        # An agent that was killed has a guardian, which needs a moment.
        wait_until(lambda: not marked_processes(self.marker), f"end of {marked_processes(self.marker)}")
        return codes

    def kill_agent(self, node: str, signum: int = signal.SIGKILL) -> None:
        """A signal for `phalanx run` itself."""
        family = psutil.Process(self.agents[node].pid).children(recursive=True)
        agent = next(process for process in family if process.name().startswith(("python", "phalanx")))
        agent.send_signal(signum)

    def failure(self, node: str = "n1") -> dict[str, Any]:
        (path,) = (self.folder / f"logs-{node}").rglob("failure.json")
        content = json.loads(path.read_text())
        assert isinstance(content, dict)
        return content

    def clean_up(self) -> None:
        for pid in marked_processes(self.marker):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for agent in self.agents.values():
            agent.kill()
            agent.wait()

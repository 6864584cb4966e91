"""`phalanx run --hosts` as a user starts it on one of the lab's nodes, for tests."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

from tests.lab import Lab
from tests.launch.launching import MARKER, marked_processes

ALL_REDUCE = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), dist.get_rank(), os.uname().nodename, os.getcwd(), repr(os.environ.get("ODD")), sys.argv[1:], flush=True)
dist.barrier()
"""

WAIT = """
import os, time
from pathlib import Path
Path(f"waiting-{os.environ['RANK']}").touch()
while True:
    time.sleep(0.05)
"""


class Job:
    """`phalanx run` started on n1, in a folder that all nodes see; its processes carry a mark."""

    def __init__(self, hosts: Lab, folder: Path) -> None:
        self.hosts, self.folder, self.mark = hosts, folder, uuid.uuid4().hex
        self.environ = hosts.environ | {MARKER: self.mark, "OMP_NUM_THREADS": "1"}
        self.logs = folder / "logs"

    def start(self, *words: object, script: str = ALL_REDUCE, **environ: str) -> subprocess.Popen[str]:
        (self.folder / "train.py").write_text(script)
        phalanx = [sys.executable, "-m", "phalanx", "run", "--log-dir", str(self.logs)]
        return subprocess.Popen(
            self.hosts["n1"].words(*phalanx, *map(str, words), cwd=self.folder),
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: object, script: str = ALL_REDUCE, **environ: str) -> tuple[int, str, str]:
        process = self.start(*words, script=script, **environ)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def waiting(self, count: int) -> bool:
        return len(list(self.folder.glob("waiting-*"))) == count

    def driver(self) -> int:
        """The process id of `phalanx run` itself."""
        found = [p for p, words in marked_processes(self.mark).items() if " -m phalanx run " in words]
        return max(found)

    def gone(self) -> bool:
        return not marked_processes(self.mark)

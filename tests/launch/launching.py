"""`phalanx run` as a user starts it, for tests: scripts in a folder, processes found by a marker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = "PHALANX_TEST_MARKER"


def marked_processes(marker: str) -> dict[int, str]:
    """Live processes that carry the marker in their environment, with their command lines."""
    wanted = f"{MARKER}={marker}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state not in "ZX":
            found[int(entry.name)] = words
    return found


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Poll until a condition holds; fails naming what was waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.01)


class Launcher:
    """Runs `phalanx run` in ``folder``; every process of it carries this launcher's marker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = uuid.uuid4().hex
        self.logs = folder / "logs"
        self.environ = {**os.environ, MARKER: self.marker}
        self._started: list[subprocess.Popen[bytes]] = []

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def command(self, *words: object, ranks: int = 2) -> list[str]:
        head = [
            sys.executable,
            "-m",
            "phalanx",
            "run",
            "--nproc-per-node",
            str(ranks),
            "--log-dir",
            str(self.logs),
        ]
        return [*head, *map(str, words)]

    def start(self, *words: object, ranks: int = 2, **options: Any) -> subprocess.Popen[bytes]:
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        process = subprocess.Popen(
            self.command(*words, ranks=ranks), cwd=self.folder, env=self.environ, **options
        )
        self._started.append(process)
        return process

    def run(
        self, *words: object, ranks: int = 2, timeout_s: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; stdout and stderr as text."""
        given = options.pop("input", None)
        if given is not None:
            options["stdin"] = subprocess.PIPE
        process = self.start(*words, ranks=ranks, **options)
        out, err = process.communicate(given, timeout=timeout_s)
        return subprocess.CompletedProcess(
            process.args,
            process.returncode,
            (out or b"").decode(errors="replace"),
            (err or b"").decode(errors="replace"),
        )

    def failure(self) -> dict[str, Any]:
        content = json.loads((self.logs / "failure.json").read_text())
        assert isinstance(content, dict)
        return content

    def left(self) -> dict[int, str]:
        return marked_processes(self.marker)

    def clean_up(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

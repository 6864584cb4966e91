"""What a probe looks at: a root folder, an environment, and the job that is asked about."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Where facts come from. ``root`` is another folder than / in tests: a machine made of files.

    Args:
        root: The folder that stands for /.
        environ: The environment that the job will have.
        output_dir: Where the job will write, None for the working folder alone.
        nnodes: Nodes of the job, None when nothing was said.
        local_world_size: Ranks on this node, None when nothing was said.
        loader_workers: Loader workers of each rank, None when nothing was said.
        master_addr: Where the ranks meet, from the environment when None.
        port: The rendezvous port, from the environment when None; 0 to look at none.
        command_timeout_s: For each program that a probe asks.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    output_dir: Path | None = None
    nnodes: int | None = None
    local_world_size: int | None = None
    loader_workers: int | None = None
    master_addr: str | None = None
    port: int | None = None
    command_timeout_s: float = 5.0

    def path(self, path: str) -> Path:
        """``/proc/...`` below the root."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """A file's text without white space round it, None where it cannot be read."""
        try:
            return self.path(path).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """A folder's entries, sorted; none where it cannot be read."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def number(self, path: str) -> int | None:
        """A file's one number, None for anything else."""
        text = self.read(path)
        try:
            return int(text) if text is not None else None
        except ValueError:
            return None

    def exists(self, path: str) -> bool:
        return self.path(path).exists()

    @property
    def is_this_machine(self) -> bool:
        """Whether programs and system calls answer for it."""
        return self.root == Path("/")

    def run(self, words: Sequence[str]) -> str | None:
        """What a program prints, None where it is not there, fails or hangs, or the root is a made one."""
        if not self.is_this_machine:
            return None
        try:
            done = subprocess.run(
                list(words),
                env={**self.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.command_timeout_s,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None

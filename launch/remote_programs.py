"""Programs on other hosts: by srun inside a Slurm allocation, else by the system's ssh."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.dist.environments.hostfile import Host
from phalanx.dist.environments.slurm import expand_hostlist, expand_tasks_per_node

CONNECT_S = 10
#: A step inherits the batch script's sizes by these, and would ask for more than one task, or for a part of the node.
_SIZES = frozenset(
    {
        "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE",
        "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE", "SLURM_CPUS_PER_TASK",
        "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_KILL_BAD_EXIT", "SRUN_CPUS_PER_TASK",
    }
)  # fmt: skip


def allocation(environ: Mapping[str, str]) -> list[str]:
    """The nodes of the Slurm job that this process is in, none outside of one."""
    if not environ.get("SLURM_JOB_ID"):
        return []
    text = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    try:
        return expand_hostlist(text) if text.strip() else []
    except ValueError:
        return []


@dataclass(frozen=True)
class BySlurm:
    """Starts a program on a node of this allocation."""

    environ: Mapping[str, str]

    def __call__(self, host: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        step = [
            "srun",
            "--overlap",
            "--quiet",
            "--unbuffered",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
        ]
        # A step of one task gets one core, unless it asks for those that the job has on the node.
        cores = self._cores(host)
        step += [f"--cpus-per-task={cores}"] if cores else []
        environ = {name: value for name, value in self.environ.items() if name not in _SIZES}
        return _start([*step, *words], environ)

    def _cores(self, host: str) -> int:
        """What the job has on a node, 0 where Slurm does not say."""
        try:
            names = expand_hostlist(self.environ["SLURM_JOB_NODELIST"])
            counts = expand_tasks_per_node(self.environ["SLURM_JOB_CPUS_PER_NODE"])
            return counts[names.index(host)]
        except (KeyError, ValueError, IndexError):
            return 0


@dataclass(frozen=True)
class BySsh:
    """Starts a program on a host by ssh, in the same folder where there is one.

    Args:
        hosts: With users and ports, by name.
        environ: Of the ssh client.
        port: Of the ssh servers, where a host names none; None leaves it to ssh's configuration.
        ssh: How ssh is called.
    """

    hosts: Mapping[str, Host]
    environ: Mapping[str, str]
    port: int | None = None
    ssh: Sequence[str] = ("ssh",)

    def __call__(self, host: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        known = self.hosts.get(host, Host(name=host))
        port = known.port or self.port
        # BatchMode: a question for a password would wait for ever behind our pipes.
        options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
        options += ["-p", str(port)] if port else []
        options += ["-l", known.user] if known.user else []
        return _start([*self.ssh, *options, "--", host, in_this_folder(words, self.environ)], self.environ)


def in_this_folder(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """The command line for the other host's shell, whichever it is: this folder, if it is there, and this PYTHONPATH."""
    path = environ.get("PYTHONPATH")
    variables = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    script = f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec env {variables}{shlex.join(words)}"
    return shlex.join(["sh", "-c", script])


def _start(words: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(words),
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is ours to hand on
    )

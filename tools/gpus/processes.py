"""Who a process on a GPU is: command, user, and which rank of which job."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from phalanx.dist.rank_signs import RankSign, pid_namespace, rank_signs
from phalanx.tools.gpus.readings import Holder, ProcessReading

_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed number of the machine's own
NAME_LETTERS = 120
_RANK_VARIABLES = re.compile(
    rb"^(?:RANK|OMPI_COMM_WORLD_RANK|PMI_RANK|PMIX_RANK|MV2_COMM_WORLD_RANK|SLURM_PROCID)=", re.MULTILINE
)


class ProcessTable:
    """Describes processes of this node; one process may be on several GPUs and is looked up once."""

    def __init__(self, proc: Path = Path("/proc"), signs: Mapping[int, RankSign] | None = None) -> None:
        self._proc = proc
        self._signs = rank_signs() if signs is None else signs
        self._known: dict[int, ProcessReading] = {}

    def describe(self, pid: int, memory_bytes: int | None, kind: str) -> ProcessReading:
        """Who process ``pid`` is; it may end at any moment, which is told in ``note``."""
        if pid not in self._known:
            self._known[pid] = self._look_up(pid, on_gpu=True)
        known = self._known[pid]
        return ProcessReading(**{**vars(known), "memory_bytes": memory_bytes, "kind": kind})

    def holder(self, pid: int) -> Holder:
        """Who process ``pid``, which holds a GPU, is. The launcher of a job has no GPU open, its ranks have."""
        known = self._look_up(pid, on_gpu=False)
        jobs = {sign.job for sign in self._signs.values() if pid in self._ancestors(sign.pid)}
        return Holder(pid=pid, user=known.user, name=known.name, job=known.job or min(jobs, default=None))

    def _look_up(self, pid: int, *, on_gpu: bool) -> ProcessReading:
        folder = self._proc / str(pid)
        try:
            words = (folder / "cmdline").read_bytes()
            name = (folder / "comm").read_text(errors="replace").strip()
            user = _user(folder.stat().st_uid)
        except OSError:
            return ProcessReading(pid=pid, note=self._absence(pid))
        if on_gpu and in_container() and not self._uses_a_gpu(folder):
            return ProcessReading(pid=pid, note="in another PID namespace")
        job, rank, local_rank, world_size = self._place(pid)
        return ProcessReading(
            pid=pid,
            name=short_command(words, name),
            user=user,
            job=job,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
        )

    def _absence(self, pid: int) -> str:
        try:
            os.kill(pid, 0)  # no signal is sent: only whether there is such a process
        except ProcessLookupError:
            return "in another PID namespace" if in_container() else "ended"
        except (PermissionError, OverflowError):
            pass
        return "another user's, not visible here"

    def _uses_a_gpu(self, folder: Path) -> bool:
        """False when a process surely is not the one NVML means: it has none of the driver's files open.

        In a container NVML may number processes as the machine does, and a stranger may have that number here.
        """
        if not Path("/dev/nvidiactl").exists():
            return True  # nothing to judge by, as under WSL
        try:
            return any(
                os.readlink(entry.path).startswith("/dev/nvidia") for entry in os.scandir(folder / "fd")
            )
        except OSError:
            return True

    # ------------------------------------------------------------------------------------------------- ranks

    def _place(self, pid: int) -> tuple[str | None, int | None, int | None, int | None]:
        """Job, rank, local rank and world size: of the process, or of the rank that it descends from."""
        for ancestor in self._ancestors(pid):
            if ancestor in self._signs:
                sign = self._signs[ancestor]
                return sign.job or None, sign.rank, sign.local_rank, sign.world_size
        try:
            text = (self._proc / str(pid) / "environ").read_bytes()
        except OSError:
            return None, None, None, None
        return place_of(text.replace(b"\0", b"\n"), self._proc / str(pid))

    def _ancestors(self, pid: int) -> list[int]:
        """The process, its parent, and so on."""
        found: list[int] = []
        current: int | None = pid
        while current is not None and current > 1 and len(found) < 64:
            found.append(current)
            current = self._parent(current)
        return found

    def _parent(self, pid: int) -> int | None:
        try:
            stat = (self._proc / str(pid) / "stat").read_text(errors="replace")
            return int(stat.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None


def place_of(environ: bytes, process: Path) -> tuple[str | None, int | None, int | None, int | None]:
    """Job, rank, local rank and world size from a process's variables (``NAME=value`` lines)."""
    if _RANK_VARIABLES.search(environ) is None:
        return None, None, None, None
    lines = (line.partition("=") for line in environ.decode(errors="replace").split("\n"))
    variables = {name: value for name, equals, value in lines if equals}
    rank, local_rank = _number(variables, "RANK"), _number(variables, "LOCAL_RANK")
    world_size = _number(variables, "WORLD_SIZE")
    if rank is None:
        rank, local_rank, world_size = _other_launcher(variables)
    if rank is None:
        return None, None, None, None
    return _job(variables, process), rank, local_rank, world_size


def _other_launcher(variables: Mapping[str, str]) -> tuple[int | None, int | None, int | None]:
    from phalanx.dist.environments import InvalidRankEnvironment, detect

    try:
        found = detect(variables)
    except (InvalidRankEnvironment, ValueError):
        return None, None, None
    return (
        (None, None, None) if found.source == "single" else (found.rank, found.local_rank, found.world_size)
    )


def _job(variables: Mapping[str, str], process: Path) -> str | None:
    """torchrun's run id, else the log folder of `phalanx run`, Slurm's job, or the script."""
    named = variables.get("TORCHELASTIC_RUN_ID", "").strip()
    if named and named != "none":
        return printable(named)
    folder = Path(variables.get("TORCHELASTIC_ERROR_FILE", "")).parent
    if re.fullmatch(r"attempt-\d+", folder.name) and folder.parent.name:
        return printable(folder.parent.name)
    slurm = variables.get("SLURM_JOB_ID", "").strip()
    if slurm:
        return printable(f"slurm-{slurm}")
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    scripts = [word for word in words if word.endswith(b".py")]
    return printable(os.path.basename(scripts[0]).decode(errors="replace")) if scripts else None


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


# ------------------------------------------------------------------------------------------------------- words


def short_command(words: bytes, name: str) -> str:
    """A command line without the folders of its program and script: ``python train.py --lr 0.1``.

    >>> short_command(b"/usr/bin/python3\\0train.py\\0", "python3")
    'python3 train.py'
    >>> short_command(b"", "kworker")
    'kworker'
    """
    parts = [part.decode(errors="replace") for part in words.rstrip(b"\0").split(b"\0") if part]
    if not parts:
        return printable(name)
    shown = [os.path.basename(part) or part if part.startswith("/") else part for part in parts[:2]]
    text = " ".join([*shown, *parts[2:]])
    return printable(text)[:NAME_LETTERS]


def printable(text: str) -> str:
    """Without what would move a terminal's cursor or colour it: anybody may choose a process's name."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@cache
def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


@cache
def in_container() -> bool:
    """Whether this process numbers processes otherwise than the machine does."""
    return pid_namespace() not in (0, _FIRST_PID_NAMESPACE)

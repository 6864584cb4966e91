"""What the kernel has to say about a process that a signal ended.

SIGKILL has two usual senders, somebody and the kernel's out-of-memory killer, and the status of the
dead process does not tell them apart. Counters taken when the run starts and compared later do.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from phalanx.launch.processes import signal_name

_KMSG_LIMIT = 2000  # records read per question
_NO_LIMIT_BYTES = 1 << 60  # cgroup version 1 writes no limit as a number near 2**63
#: torch's DataLoader about a worker that the kernel, or somebody, killed.
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: Killed")

_MEANINGS = {
    signal.SIGSEGV: "a memory access outside the process (a crash in native code)",
    signal.SIGBUS: "a bad memory access, most often a full /dev/shm or a truncated mapped file",
    signal.SIGFPE: "an arithmetic fault in native code",
    signal.SIGILL: "an instruction that this CPU does not have",
    signal.SIGABRT: "native code gave up (abort); its own message stands above",
    signal.SIGPIPE: "it wrote to a pipe or socket whose reader was gone",
    signal.SIGXCPU: "the limit on CPU time (ulimit -t)",
    signal.SIGXFSZ: "the limit on file size (ulimit -f)",
    signal.SIGSYS: "a system call that a sandbox forbids",
}


def _number(path: Path, name: str) -> int | None:
    """A counter in a file of lines ``name value``."""
    try:
        found = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _cgroup_files() -> list[Path]:
    """Files that count the OOM kills of this process's memory cgroup (version 2 or 1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, folder = line.split(":", 2)
        if controllers == "":
            files.append(Path("/sys/fs/cgroup" + folder, "memory.events"))
        elif "memory" in controllers.split(","):
            files += [Path("/sys/fs/cgroup/memory" + folder, "memory.oom_control")]
            files += [
                Path("/sys/fs/cgroup/memory/memory.oom_control")
            ]  # a container sees its own as the root
    return [file for file in files if _number(file, "oom_kill") is not None]


def memory_limit_bytes() -> int | None:
    """The memory that this process's cgroup may use, None without a limit."""
    for file in _cgroup_files():
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limit = (file.parent / name).read_text().strip()
            except OSError:
                continue
            if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                return int(limit)
    return None


class Witness:
    """Counters at the start of a run, to be compared with those after a rank was killed."""

    def __init__(self) -> None:
        self._counters = {
            path: _number(path, "oom_kill") for path in [*_cgroup_files(), Path("/proc/vmstat")]
        }
        self._kmsg = -1
        try:
            self._kmsg = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._kmsg, 0, os.SEEK_END)
        except OSError:  # not root, or a container
            self.close()

    def close(self) -> None:
        if self._kmsg >= 0:
            os.close(self._kmsg)
            self._kmsg = -1

    def explain(self, signum: int, pid: int) -> str:
        """One sentence about the signal that ended process ``pid``."""
        if signum == signal.SIGKILL:
            return self._explain_kill(pid)
        meaning = _MEANINGS.get(signal.Signals(signum)) if signum in signal.valid_signals() else None
        if meaning:
            return meaning
        return f"{signal_name(signum)} was sent to it from outside the run"

    def explain_worker(self, text: str) -> str:
        """What is to be added to an exception whose text tells of a killed loader worker; "" for any other."""
        found = _KILLED_WORKER.search(text)
        if found is None:
            return ""
        limit = memory_limit_bytes()
        limited = f"; the cgroup's limit is {limit / 2**30:.1f} GiB" if limit is not None else ""
        return f"loader worker {found[1]}: {self._explain_kill(int(found[1]))}{limited}"

    def _kernel_log(self) -> list[str]:
        lines: list[str] = []
        while self._kmsg >= 0 and len(lines) < _KMSG_LIMIT:
            try:
                lines.append(os.read(self._kmsg, 8192).decode(errors="replace"))
            except BrokenPipeError:  # records were overwritten meanwhile; the next ones follow
                continue
            except OSError:
                break
        return lines

    def _explain_kill(self, pid: int) -> str:
        for line in self._kernel_log():
            if re.search(rf"[Kk]illed process {pid}\b", line):
                return f"killed by the kernel's OOM killer (kernel log: {line.partition(';')[2].strip()})"
        grown = [
            str(path)
            for path, before in self._counters.items()
            if before is not None and (_number(path, "oom_kill") or 0) > before
        ]
        if grown:
            return f"killed by the kernel's OOM killer: memory ran out ({grown[0]} counts a new oom_kill)"
        readable = [str(path) for path, before in self._counters.items() if before is not None]
        if not readable:
            return "from outside; whether it was the kernel's OOM killer cannot be seen from here (try dmesg)"
        return f"from outside; no sign of the OOM killer (oom_kill unchanged in {', '.join(readable)})"

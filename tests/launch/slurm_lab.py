"""A real Slurm on this machine for tests: one slurmctld, and slurmd that call themselves n1, n2 and so on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "unshare", "setpriv")
_START_TIMEOUT_S = 30.0
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def missing() -> str | None:
    """Why no lab can be started here, None where one can."""
    search = f"{os.environ.get('PATH', '')}:{_SBIN}"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=search) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: slurm-wlm, munge, util-linux)"
    if os.geteuid() != 0:
        return "needs root: slurmd starts tasks for other users"
    probe = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    if probe.returncode != 0:
        return f"needs namespaces: {probe.stderr.decode().strip()}"
    return None


class SlurmLab:
    """Nodes n1, n2 and so on, each with ``cpus`` CPUs; `srun` runs a command on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: subprocess.Popen[bytes] | None = None

    @property
    def environ(self) -> dict[str, str]:
        """This process's environment, without any Slurm job's, and with the way to the lab."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SRUN"))}
        return clean | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{clean['PATH']}:{_SBIN}"}

    def srun(
        self, *words: str | Path, environ: Mapping[str, str] | None = None, cwd: Path, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``srun WORDS``; a hang ends with the daemons' logs."""
        # A queued job would wait for ever, with --immediate it fails.
        command = ["srun", "--immediate=20", "--kill-on-bad-exit=1", *map(str, words)]
        return self._wait(command, environ, cwd, timeout_s)

    def salloc(
        self, *words: str | Path, environ: Mapping[str, str] | None = None, cwd: Path, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``salloc WORDS``: a command here, which may call srun within the allocation."""
        return self._wait(["salloc", "--quiet", "--immediate=20", *map(str, words)], environ, cwd, timeout_s)

    def _wait(
        self, command: list[str], environ: Mapping[str, str] | None, cwd: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        with subprocess.Popen(
            command,
            cwd=cwd,
            env=self.environ | dict(environ or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                for _ in range(2):  # srun ends its tasks at the second Ctrl-C
                    process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"{command[0]} hung:\n{out}\n{err}\n{self.logs()}") from None
        self.wait_for_steps()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def wait_for_steps(self, timeout_s: float = 20.0) -> None:
        """Wait for slurmstepd, which ends a moment after the command that it served."""
        assert self.daemons is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            names = [_name(process) for process in psutil.Process(self.daemons.pid).children(recursive=True)]
            if "slurmstepd" not in names:
                return
            time.sleep(0.05)
        raise AssertionError(f"slurmstepd still runs\n{self.logs()}")

    def sbatch(self, *words: str | Path, environ: Mapping[str, str] | None = None, cwd: Path) -> str:
        """Submit a batch script; the job's id."""
        done = self._call("sbatch", "--parsable", *map(str, words), environ=environ, cwd=cwd)
        return done.strip().partition(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """What Slurm says of a job, by its own names: JobState, Restarts, ExitCode."""
        words = self._call("scontrol", "--oneliner", "show", "job", job_id).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def wait_for_job(self, job_id: str, timeout_s: float = 180.0) -> dict[str, str]:
        """Wait until a job has ended for good; what Slurm says of it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.job(job_id)
            if found["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"):
                self.wait_for_steps()
                return found
            time.sleep(0.1)
        self._call("scancel", job_id)
        raise AssertionError(f"job {job_id} did not end: {found}\n{self.logs()}")

    def scancel(self, *words: str) -> None:
        """Run ``scancel WORDS``."""
        self._call("scancel", *words)

    def start_now(self, job_id: str, timeout_s: float = 60.0) -> None:
        """Let a requeued job start at once; slurmctld makes it wait for two minutes."""
        deadline = time.monotonic() + timeout_s
        while self.job(job_id)["JobState"] != "PENDING" and time.monotonic() < deadline:
            time.sleep(0.1)
        self._call("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    def end_node(self, name: str, rank: str) -> None:
        """Kill a node's slurmd, and the slurmstepd above process ``rank``, as a machine's end does."""
        processes = dict(
            line.split(None, 1) for line in self.inside("ps", "-eo", "pid,ppid,comm").splitlines()
        )
        pid, steps = rank.strip(), []
        while pid in processes and pid != "1":
            pid = processes[pid].split()[0]
            if "slurmstepd" in processes.get(pid, ""):
                steps.append(pid)
        self.inside("sh", "-c", f"kill -9 $(cat {self.folder}/slurmd-{name}.pid) {' '.join(steps)}")

    def _call(self, *words: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=self.environ | dict(environ or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def inside(self, *words: str) -> str:
        """Run a command as root where the daemons are; what it prints."""
        assert self.daemons is not None
        (init,) = psutil.Process(self.daemons.pid).children()  # of unshare: the namespaces' first process
        enter = ["nsenter", f"--target={init.pid}", "--mount", "--pid", "--"]
        done = subprocess.run([*enter, *words], env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def logs(self) -> str:
        """The end of each daemon's log."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            parts.append(
                f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            )
        return "\n".join(parts)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


@contextlib.contextmanager
def slurm_lab(cpus: int = 8, *, nodes: int = 2, settings: str = "", before: str = "") -> Iterator[SlurmLab]:
    """Start the daemons, and end them all, with every task they started, at the end.

    ``settings`` are more lines of slurm.conf, ``before`` shell lines that run in the namespaces first.

    They live in a PID namespace of their own: when its first process dies, the kernel kills the rest. In
    their mount namespace n1 and n2 are names of this machine.
    """
    # Not pytest's tmp_path: the path of a Unix socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        _configure(folder, cpus, nodes, settings, before)
        script = folder / "start.sh"
        lab = SlurmLab(folder)
        # The test's own death ends setpriv's child, and --kill-child passes that on to the namespace.
        namespace = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (folder / "start.log").open("wb") as log:
            daemons = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *namespace, "sh", str(script)],
                env=lab.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        lab.daemons = daemons
        try:
            _wait_until_idle(lab, daemons, nodes)
            yield lab
        finally:
            daemons.kill()
            daemons.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, cpus: int, nodes: int, settings: str, before: str) -> None:
    host = socket.gethostname()
    ports = _free_ports(1 + nodes)
    names = [f"n{number}" for number in range(1, nodes + 1)]
    node_lines = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
        for name, port in zip(names, ports[1:], strict=True)
    )
    slurmds = "\n".join(f"slurmd -D -N {name} -f {folder}/slurm.conf &" for name in names)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    folder.chmod(0o755)
    for name in ("state", *(f"spool-{name}" for name in names)):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(
        f"""ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=2
{node_lines}
PartitionName=all Nodes={",".join(names)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
{settings}
"""
    )
    known = Path("/etc/hosts").read_text() if Path("/etc/hosts").exists() else ""
    (folder / "hosts").write_text(f"127.0.0.1 {' '.join(names)}\n{known}\n127.0.0.1 {host}\n")
    munge = " ".join(
        f"--{name}={folder}/munge.{end}"
        for name, end in (
            ("key-file", "key"),
            ("socket", "socket"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
    )
    (folder / "start.sh").write_text(
        f"""mount --bind {folder}/hosts /etc/hosts
{before}
munged --foreground --force {munge} &
while [ ! -S {folder}/munge.socket ]; do sleep 0.05; done
slurmctld -D -i -f {folder}/slurm.conf &
{slurmds}
wait
"""
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


def _wait_until_idle(lab: SlurmLab, daemons: subprocess.Popen[bytes], nodes: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and daemons.poll() is None:
        states = _states(lab)
        if states == ["idle"] * nodes:
            return
        time.sleep(0.1)
    raise AssertionError(f"the Slurm lab did not start: nodes {_states(lab)}\n{lab.logs()}")


def _states(lab: SlurmLab) -> Sequence[str]:
    found = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=lab.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return found.stdout.split()

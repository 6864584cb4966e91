"""The self-test: collectives among ranks on this machine's idle devices, which name the pair that fails."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.tools.doctor.facts import Facts, GpuFacts
from phalanx.tools.doctor.findings import Finding

ID = "self-test"
LIMIT_S = 10.0
MAX_RANKS = 16  # 120 pairs
_TICK_S = 0.1
_IDLE_BYTES = 1 << 30  # a driver holds some hundred MiB of an idle GPU
_RANKS = Path(__file__).with_name("self_test_ranks.py")


@dataclass
class SelfTest:
    """Ranks that wait with torch imported; started early, so that the import costs no time of its own.

    Args:
        environ: The environment of the ranks: the one that the job will have.
        python: The interpreter.
    """

    environ: Mapping[str, str]
    python: str = sys.executable
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the process that imports torch and waits."""
        # One thread: a rank is forked from this process, and OpenMP's threads do not follow.
        environ = {**self.environ, "OMP_NUM_THREADS": "1"}
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [self.python, "-c", _RANKS.read_text()],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def cancel(self) -> None:
        """End all ranks, whatever they do."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)  # not for ever: a rank may sleep in the driver

    def run(
        self,
        facts: Facts,
        limit_s: float = LIMIT_S,
        import_s: float = LIMIT_S,
        ranks: int = 2,
        waiting: Callable[[], None] | None = None,
    ) -> Finding:
        """Run the collectives; ``skip`` where they cannot tell anything.

        Args:
            facts: What was gathered: which GPUs are idle, whether torch works.
            limit_s: For the collectives.
            import_s: For an import of torch that is still under way: a slow disk is not a slow network.
            ranks: How many, where no GPU is idle.
            waiting: Called ten times a second.
        """
        reason = _why_not(facts)
        if reason is not None or self._process is None:
            self.cancel()
            return Finding(ID, "skip", f"self-test not run: {reason or 'no process could be started'}")
        devices, locks = idle_devices(facts, self.environ)
        try:
            folder = _folder()
        except OSError as error:
            self.cancel()
            return Finding(ID, "skip", f"self-test not run: no folder to meet in ({error.strerror})")
        try:
            plan = {
                "ranks": len(devices) or ranks,
                "devices": devices,
                "backend": "nccl" if devices else "gloo",
                "store": str(folder / "store"),
                "limit_s": limit_s,
            }
            return judge(plan, list(self._talk(plan, limit_s, import_s, waiting)))
        finally:
            self.cancel()
            _let_go(locks)
            shutil.rmtree(folder, ignore_errors=True)

    def _talk(
        self, plan: Mapping[str, Any], limit_s: float, import_s: float, waiting: Callable[[], None] | None
    ) -> Iterator[dict[str, Any]]:
        """Hand over the plan, and pass on what the ranks tell until they end or the time is up."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + import_s
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(plan).encode() + b"\n")
            process.stdin.flush()
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if waiting is not None:
                    waiting()
                if not selector.select(min(left, _TICK_S)):
                    continue
                data = os.read(process.stdout.fileno(), 65536)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    yield said
                    if said["what"] == "start":
                        deadline = time.monotonic() + limit_s
                    if said["what"] == "end":
                        return


def _why_not(facts: Facts) -> str | None:
    torch = facts.torch
    if torch is None or torch.installed is False:
        return "there is no torch"
    if torch.error is not None and torch.version is None:
        return "torch cannot be imported"
    if torch.timed_out or torch.signal:
        return "the import of torch does not end well"
    return None


def idle_devices(facts: Facts, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """UUIDs of GPUs that nobody uses, as far as this job may see them; and those that are now held for us."""
    if not (facts.gpus and facts.torch and facts.torch.cuda_available):
        return [], []
    from phalanx.dist import gpu_locks

    devices: list[str] = []
    held: list[str] = []
    for gpu in _visible(facts.gpus, environ):
        if not _is_idle(gpu) or gpu.uuid is None or len(devices) >= MAX_RANKS:
            continue
        try:
            if not gpu_locks.hold(gpu.uuid):
                continue  # a job has it, and has not begun to compute
            held.append(gpu.uuid)
        except OSError:  # no lock can be made here: then no job holds one either
            pass
        devices.append(gpu.uuid)
    return devices, held


def _let_go(uuids: Sequence[str]) -> None:
    from phalanx.dist import gpu_locks

    for uuid in uuids:
        gpu_locks.release(uuid)


def _visible(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> list[GpuFacts]:
    """Those that CUDA_VISIBLE_DEVICES leaves, none where it cannot be told."""
    from phalanx.dist.devices import Gpu, visible_devices

    inventory = [
        Gpu(gpu.index or 0, uuid=gpu.uuid or "", pci_bus_id=gpu.pci_bus_id or "", name=gpu.name or "")
        for gpu in gpus
    ]
    by_index = {gpu.index: gpu for gpu in gpus}
    physical = visible_devices(environ, inventory).physical
    if None in physical and environ.get("CUDA_VISIBLE_DEVICES") is None:
        return list(gpus)
    return [by_index[index] for index in physical if index is not None and index in by_index]


def _is_idle(gpu: GpuFacts) -> bool:
    if gpu.problem or gpu.mig_enabled or gpu.compute_mode == "prohibited" or gpu.process_count != 0:
        return False
    return gpu.memory_used_bytes is None or gpu.memory_used_bytes < _IDLE_BYTES


def _folder() -> Path:
    """A folder for the file in which ranks find each other; /dev/shm where the disk is full."""
    for place in (tempfile.gettempdir(), "/dev/shm"):
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="phalanx-doctor-", dir=place))
            (folder / "room").write_bytes(b"\0" * 65536)
            return folder
        except OSError:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
    raise OSError(28, "no space left in the folder for temporary files, nor in /dev/shm")


def judge(plan: Mapping[str, Any], said: Sequence[Mapping[str, Any]]) -> Finding:
    """What the ranks' words mean.

    >>> plan = {"ranks": 2, "devices": [], "backend": "gloo", "limit_s": 10}
    >>> words = [{"rank": rank, "what": "0-1", "state": "begin"} for rank in (0, 1)]
    >>> judge(plan, [{"what": "start", "state": "ok"}, *words]).title
    'self-test: ranks 0 and 1 hang in an all-reduce (gloo, on the CPU)'
    """
    where = "gloo, on the CPU" if plan["backend"] == "gloo" else f"NCCL, {len(plan['devices'])} GPUs"
    state: dict[tuple[Any, Any], Mapping[str, Any]] = {}
    for word in said:
        state[word.get("rank"), word["what"]] = word
    if (None, "start") not in state:
        return Finding(ID, "skip", "self-test not run: torch was not imported in time")
    failed = {place: word for place, word in state.items() if word["state"] == "error"}
    hanging = _hanging(state)
    if not failed and not hanging and (None, "end") in state:
        return Finding(ID, "ok", f"all-reduces between {plan['ranks']} ranks are right ({where})", weight=10)
    evidence = tuple(
        dict.fromkeys(
            [_who(plan, *place) + ": " + _first_line(str(word["error"])) for place, word in failed.items()]
            + [
                f"{_who(plan, *place)}: no answer within {plan['limit_s']:g} s"
                for place, word in hanging.items()
            ]
        )
    )
    culprit = _culprit([what for _, what in [*failed, *hanging]], plan["ranks"])
    verb = (
        "cannot start"
        if culprit == "rank"
        else "fail in an all-reduce"
        if failed
        else "hang in an all-reduce"
    )
    title = f"self-test: {_name(plan, culprit, failed, hanging)} {verb} ({where})"
    return Finding(ID, "fail", title, evidence=evidence[:20], fix=_fix(plan, evidence), weight=30)


def _hanging(
    state: Mapping[tuple[Any, Any], Mapping[str, Any]],
) -> dict[tuple[Any, Any], Mapping[str, Any]]:
    """What began and did not end; a rank that waits for one that hangs elsewhere is left out."""
    begun = {place: word for place, word in state.items() if word["state"] == "begin"}

    def all_there(what: str) -> bool:
        return all((int(rank), what) in state for rank in what.split("-") if rank.isdigit())

    whole = {place: word for place, word in begun.items() if all_there(place[1])}
    return whole or begun


def _culprit(names: Sequence[str], ranks: int) -> str:
    """The smallest group that fails: a pair rather than all."""
    pairs = [name for name in names if name.count("-") == 1]
    if "rank" in names or "start" in names or "device" in names:
        return "rank"
    return pairs[0] if pairs else "-".join(map(str, range(ranks)))


def _name(
    plan: Mapping[str, Any], culprit: str, failed: Mapping[Any, Any], hanging: Mapping[Any, Any]
) -> str:
    if culprit == "rank":
        places = [*failed, *hanging]
        ranks = sorted({rank for rank, what in places if what in ("rank", "device") and rank is not None})
        devices = plan["devices"]
        names = [f"{rank}" + (f" on {devices[rank]}" if devices else "") for rank in ranks]
        return f"rank {', '.join(names)}" if names else "the ranks"
    pairs = sorted({what for _, what in [*failed, *hanging] if what.count("-") == 1})
    if plan["ranks"] > 2 and len(pairs) == plan["ranks"] * (plan["ranks"] - 1) // 2:
        return f"all pairs of {plan['ranks']} ranks"
    shown = "; ".join(" and ".join(pair.split("-")) for pair in pairs[:4]) if pairs else "all together"
    return f"ranks {shown}" + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")


def _who(plan: Mapping[str, Any], rank: int | None, what: str) -> str:
    device = f" ({plan['devices'][rank]})" if plan["devices"] and rank is not None else ""
    if rank is None:
        return "start"
    others = [int(word) for word in what.split("-") if word.isdigit() and int(word) != rank]
    return f"rank {rank}{device}" + (f" with {', '.join(map(str, others))}" if others else "")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"


def _fix(plan: Mapping[str, Any], evidence: Sequence[str]) -> tuple[str, ...]:
    if plan["backend"] == "nccl":
        return (
            "NCCL_DEBUG=INFO phalanx doctor   # what NCCL says of this pair",
            "NCCL_P2P_DISABLE=1 phalanx doctor   # works with it: peer-to-peer between them is broken",
        )
    if any("Unable to find address" in line or "interface" in line for line in evidence):
        return ("unset GLOO_SOCKET_IFNAME, or set it to an interface of `ip -br address`",)
    return (
        "GLOO_SOCKET_IFNAME=lo phalanx doctor   # works with it: this host's own name or network is at fault",
    )

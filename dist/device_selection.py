"""Choosing this process's GPUs before CUDA starts, and holding them against other jobs. No torch needed."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.dist import gpu_locks
from phalanx.dist.arguments import require_path, short
from phalanx.dist.cuda_start import cuda_device_count_if_started
from phalanx.dist.gpus import Gpu, why_busy
from phalanx.dist.visibility import (
    VARIABLE,
    InvalidVisibleDevices,
    VisibleDevices,
    entries_of,
    listed_inventory,
    read_environ,
    span_of,
    visible_devices,
)

_selected: VisibleDevices | None = None  # of this process, for `verify_selection`


@dataclass(frozen=True)
class _Choice:
    """A GPU, or one MIG instance of it."""

    gpu: Gpu
    mig: str = ""

    @property
    def lock_name(self) -> str:
        return self.mig or self.gpu.uuid or f"index-{self.gpu.index}"

    @property
    def label(self) -> str:
        return f"GPU {self.gpu.index}" + (f", instance {self.mig}" if self.mig else "")


def select_devices(
    spec: str,
    environ: MutableMapping[str, str] | None = None,
    inventory: Sequence[Gpu] | None = None,
    lock_folder: Path | None = None,
) -> VisibleDevices:
    """Choose this process's GPUs, before CUDA starts, by setting CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER=PCI_BUS_ID.

    ::

        select_devices("2,1,3")   # nvidia-smi's numbers, in this order: cuda:0 is GPU 2
        select_devices("auto:2")  # two GPUs that nobody uses, held until this process ends
        select_devices("all")
        select_devices("cpu")     # none

    A CUDA_VISIBLE_DEVICES that was inherited is an upper bound: what it hides stays hidden. ``auto`` (all idle ones) and ``auto:N``
    take GPUs without processes, with little memory in use and not held by another job of ours, of whatever user. Every choice is
    held from here on, so that another job's ``auto`` passes it by; GPUs that are named are shared with a job that has them
    already, with a warning. What the launcher or another parent of this process holds is this process's too.

    Of GPUs that are split into MIG instances, name one instance by its UUID, or let ``auto:1`` take one: a process sees one at most.

    Args:
        spec: As above; numbers or UUIDs (or unambiguous beginnings of them), separated by commas.
        environ: Where to set the variables, by default this process's environment.
        inventory: This node's GPUs; None asks NVML.
        lock_folder: Where GPUs are marked as held; by default a folder all users share.

    Raises:
        InvalidVisibleDevices: A GPU does not exist, is hidden or named twice, or too few are idle.
        ValueError: An argument is of another kind.
        RuntimeError: CUDA has started in this process already.
    """
    global _selected
    if not isinstance(spec, str):
        raise ValueError(
            f"select_devices({short(spec)}): a text was expected.\nFix: 'auto:2', '0,1', 'all' or 'cpu'"
        )
    if lock_folder is not None:
        lock_folder = require_path("lock_folder", lock_folder)
    own = environ is None or environ is os.environ
    if own:
        refuse_after_cuda(spec)
    target = os.environ if environ is None else environ
    read_environ(target)
    if spec.strip() == "cpu":
        target[VARIABLE] = ""
        found = VisibleDevices((), (), "")
    else:
        found = _select(spec.strip(), target, inventory, lock_folder)
    if own:
        _selected = found
    return found


def _select(
    spec: str, environ: MutableMapping[str, str], inventory: Sequence[Gpu] | None, lock_folder: Path | None
) -> VisibleDevices:
    gpus = listed_inventory(inventory)
    if gpus is None:
        raise InvalidVisibleDevices(
            f"{spec!r}: this node's GPUs cannot be listed, since NVML does not answer (no driver, or no GPU).\n"
            "Fix: see that nvidia-smi works, or choose 'cpu'"
        )
    allowed = _allowed(gpus, environ)
    auto = re.fullmatch(r"auto(?::([0-9]+))?", spec)
    shared: tuple[str, ...] = ()
    if auto:
        chosen = _take_idle(None if auto[1] is None else int(auto[1]), allowed, lock_folder)
    else:
        chosen = allowed if spec == "all" else _named(spec, gpus, allowed)
        shared = tuple(_hold(chosen, lock_folder))
    if any(choice.mig for choice in chosen):
        environ[VARIABLE] = chosen[0].mig
    else:
        environ[VARIABLE] = ",".join(str(choice.gpu.index) for choice in chosen)
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    found = visible_devices(environ, gpus)
    return replace(found, notes=(*found.notes, *shared))


def refuse_after_cuda(spec: str) -> None:
    """Raise when CUDA has started in this process, by torch or by any other library.

    Raises:
        RuntimeError: It has read the variable, once and for all.
    """
    count = cuda_device_count_if_started()
    if count is not None:
        has = "" if count < 0 else f" ({count} GPU{'s' * (count != 1)})"
        raise RuntimeError(
            f"select_devices({spec!r}) comes too late: CUDA has started in this process and reads {VARIABLE} once.\n"
            f"The job would go on with the GPUs it has{has}.\n"
            f"Fix: call it before anything touches CUDA (torch.cuda.is_available() does), export {VARIABLE} before Python starts, "
            "or use torch.cuda.set_device() to choose among those"
        )


def verify_selection(uuids: Sequence[str]) -> None:
    """Compare what CUDA shows, once it has started, with what `select_devices` chose in this process.

    Args:
        uuids: Of ``cuda:0``, ``cuda:1``, ...; empty texts where unknown.

    Raises:
        RuntimeError: They differ: something changed the variable, or started CUDA, in between.
    """
    if _selected is None or any(uuid.startswith("MIG-") for uuid in _selected.uuids):
        return
    wanted = list(_selected.uuids)
    if len(uuids) == len(wanted) and all(
        one == other or not one or not other for one, other in zip(uuids, wanted, strict=True)
    ):
        return
    raise RuntimeError(
        f"select_devices chose {', '.join(wanted) or 'no GPU'}, but CUDA shows {', '.join(uuids) or 'none'}.\n"
        f"{VARIABLE} is now {os.environ.get(VARIABLE)!r}: it was changed, or CUDA had read it before.\n"
        f"Fix: call select_devices first thing in the script, and set {VARIABLE} nowhere else"
    )


def _allowed(gpus: list[Gpu], environ: Mapping[str, str]) -> list[_Choice]:
    """The GPUs, or MIG instances, that the inherited variable leaves."""
    if VARIABLE not in environ:
        return [_Choice(gpu) for gpu in gpus]
    inherited = visible_devices(environ, gpus)
    if None in inherited.physical:
        raise InvalidVisibleDevices(
            f"{VARIABLE}={environ[VARIABLE]!r} limits the choice, but which GPUs it means cannot be told. "
            f"{' '.join(inherited.notes)}\nFix: export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID"
        )
    owner = {uuid: gpu for gpu in gpus for uuid in gpu.mig_uuids}
    if environ[VARIABLE].strip().startswith("MIG-"):
        names = [uuid for uuid in (*inherited.uuids, *inherited.dropped) if uuid in owner]
        if names:
            return [_Choice(owner[uuid], uuid) for uuid in names]
    return [_Choice(gpus[index]) for index in inherited.physical if index is not None]


def _named(spec: str, gpus: list[Gpu], allowed: list[_Choice]) -> list[_Choice]:
    if spec.startswith("auto") or not spec:
        raise InvalidVisibleDevices(
            f"{spec!r} is no choice of GPUs.\nFix: auto, auto:2, all, cpu, or numbers such as 0,1"
        )
    chosen: list[_Choice] = []
    for entry in entries_of(spec):
        choice = _one(entry, spec, gpus)
        if not _is_allowed(choice, allowed):
            shown = (
                ", ".join(str(other.gpu.index) if not other.mig else other.mig for other in allowed) or "none"
            )
            raise InvalidVisibleDevices(
                f"{spec!r}: {choice.label} is hidden by the inherited {VARIABLE}, which leaves {shown}.\n"
                f"Fix: choose among these, or unset {VARIABLE} if you may use the others"
            )
        if choice in chosen:
            raise InvalidVisibleDevices(f"{spec!r}: {choice.label} is named twice.\nFix: name each GPU once")
        if choice.gpu.problem:
            raise InvalidVisibleDevices(
                f"{spec!r}: {choice.label} cannot be used: {choice.gpu.problem}.\nFix: choose another; a reset or reboot may bring it back"
            )
        chosen.append(choice)
    if len(chosen) > 1 and any(choice.mig for choice in chosen):
        raise InvalidVisibleDevices(
            f"{spec!r}: a process sees one MIG instance at most, and none beside a whole GPU.\n"
            "CUDA would show the first alone.\n"
            "Fix: one instance per process; visible_devices_per_rank() and `phalanx run` give each rank its own"
        )
    return chosen


def _is_allowed(choice: _Choice, allowed: Sequence[_Choice]) -> bool:
    return choice in allowed or (bool(choice.mig) and _Choice(choice.gpu) in allowed)


def _one(entry: str, spec: str, gpus: list[Gpu]) -> _Choice:
    if entry.isascii() and entry.isdigit():
        for gpu in gpus:
            if gpu.index == int(entry):
                return _Choice(gpu)
        raise InvalidVisibleDevices(
            f"{spec!r}: '{entry}' is not one of this node's GPUs ({span_of(gpus)}).\nFix: nvidia-smi -L lists them"
        )
    fitting = [_Choice(gpu) for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    if entry.startswith("MIG-"):
        fitting = [_Choice(gpu, uuid) for gpu in gpus for uuid in gpu.mig_uuids if uuid.startswith(entry)]
    if len(fitting) == 1:
        return fitting[0]
    kind = "MIG instances" if entry.startswith("MIG-") else "GPUs"
    what = f"fits {len(fitting)} {kind}" if fitting else "is no GPU's number or UUID here"
    raise InvalidVisibleDevices(f"{spec!r}: {entry!r} {what}.\nFix: nvidia-smi -L lists them")


def _hold(chosen: Sequence[_Choice], lock_folder: Path | None) -> list[str]:
    """Hold what was named, and say who holds it too. A lock that cannot be made hinders nobody here."""
    notes = []
    for choice in chosen:
        try:
            if gpu_locks.hold(choice.lock_name, lock_folder):
                continue
            note = (
                f"{choice.label} is held by another job ({_holder(choice, lock_folder)}) and shared with it."
            )
        except OSError as error:
            note = f"{choice.label} could not be marked as held ({error}): another job's auto may take it."
        notes.append(note)
        warnings.warn(f"select_devices: {note}", stacklevel=4)
    return notes


def _why_not(choice: _Choice) -> str:
    if not choice.mig:
        return why_busy(choice.gpu)
    if choice.gpu.problem:
        return choice.gpu.problem
    return "in use" if choice.mig in choice.gpu.busy_migs else ""


def _take_idle(wanted: int | None, allowed: list[_Choice], lock_folder: Path | None) -> list[_Choice]:
    """Hold the idle GPUs, ``wanted`` of them or all; one MIG instance where there is no whole GPU."""
    if wanted == 0:
        raise InvalidVisibleDevices("'auto:0' takes no GPU.\nFix: cpu")
    whole = [choice for choice in allowed if not choice.mig and not choice.gpu.mig_uuids]
    split = [choice for choice in allowed if choice.mig]
    split += [
        _Choice(choice.gpu, uuid) for choice in allowed if not choice.mig for uuid in choice.gpu.mig_uuids
    ]
    taken, reasons = _take(wanted, whole, lock_folder)
    if not taken and split and wanted in (None, 1):
        taken, more = _take(1, split, lock_folder)
        reasons += more
    if not taken or (wanted is not None and len(taken) < wanted):
        for choice in taken:
            gpu_locks.release(choice.lock_name)
        asked = "an idle GPU" if wanted is None else f"{wanted} idle GPU{'s' if wanted > 1 else ''}"
        listed = "; ".join(reasons) if reasons else f"there are {len(allowed)} to choose from"
        if split and wanted not in (None, 1):
            listed += "; of MIG instances a process sees one at most"
        raise InvalidVisibleDevices(
            f"auto: {asked} asked for, {len(taken)} found. {listed}.\n"
            "Fix: wait, ask for fewer, or name GPUs by number to share them"
        )
    return taken


def _take(
    wanted: int | None, choices: Sequence[_Choice], lock_folder: Path | None
) -> tuple[list[_Choice], list[str]]:
    """Hold up to ``wanted`` idle ones; they, and why the others before them were passed by."""
    taken: list[_Choice] = []
    reasons: list[str] = []
    for choice in choices:
        if wanted is not None and len(taken) == wanted:
            break
        reason = _why_not(choice)
        if not reason and not gpu_locks.hold(choice.lock_name, lock_folder):
            reason = f"held by another job ({_holder(choice, lock_folder)})"
        if reason:
            reasons.append(f"{choice.label}: {reason}")
        else:
            taken.append(choice)
    return taken, reasons


def _holder(choice: _Choice, lock_folder: Path | None) -> str:
    pid = gpu_locks.holder(choice.lock_name, lock_folder)
    return "process unknown" if pid is None else f"process {pid}"

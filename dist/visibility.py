"""Which GPUs this process sees, and in which order, by the driver's rules. No torch needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.dist.arguments import require_int, short
from phalanx.dist.gpus import Gpu, nvml_inventory

VARIABLE = "CUDA_VISIBLE_DEVICES"
MOST_GPUS = 4096  # of one node; more is a slip, such as bytes of memory


class InvalidVisibleDevices(ValueError):
    """CUDA_VISIBLE_DEVICES, or a choice of GPUs, names something that is not there."""


@dataclass(frozen=True)
class VisibleDevices:
    """The GPUs that CUDA shows this process, in CUDA's order, as `visible_devices` returns it.

    >>> found = visible_devices({"CUDA_VISIBLE_DEVICES": "2,0"}, 4)
    >>> len(found), found.physical, found.dropped
    (2, (2, 0), ())

    Args:
        physical: For each logical index nvidia-smi's number, None where it cannot be told.
        notes: Oddities in words, such as an entry that hides those after it.
        value: CUDA_VISIBLE_DEVICES as it was read, None when unset.
        dropped: Entries that CUDA does not show.
        uuids: For each logical index its UUID, empty where unknown.
        known: Whether this node's GPUs were known; else numbers were taken on trust.
        suggestion: What the variable could be instead, where entries are dropped.
    """

    physical: tuple[int | None, ...]
    notes: tuple[str, ...] = ()
    value: str | None = None
    dropped: tuple[str, ...] = ()
    uuids: tuple[str, ...] = field(default=(), repr=False)
    known: bool = field(default=True, repr=False)
    suggestion: str = field(default="", repr=False)

    def __len__(self) -> int:
        return len(self.physical)

    def to_physical(self, logical: int) -> int:
        """nvidia-smi's number of ``cuda:<logical>``.

        >>> visible_devices({"CUDA_VISIBLE_DEVICES": "2,3"}, 4).to_physical(0)
        2

        Raises:
            InvalidVisibleDevices: There is no such device, or its number cannot be told.
        """
        logical = _index("logical", logical)
        if not 0 <= logical < len(self.physical):
            raise InvalidVisibleDevices(
                f"cuda:{logical} does not exist: {self._table()}.\nFix: use an index below {len(self)}, or change {VARIABLE}"
            )
        number = self.physical[logical]
        if number is None:
            raise InvalidVisibleDevices(
                f"cuda:{logical}: its nvidia-smi number cannot be told. {' '.join(self.notes)}\n"
                "Fix: export CUDA_DEVICE_ORDER=PCI_BUS_ID, or choose GPUs by UUID"
            )
        return number

    def to_logical(self, physical: int) -> int:
        """CUDA's index of the GPU that nvidia-smi calls ``physical``.

        >>> visible_devices({"CUDA_VISIBLE_DEVICES": "2,3"}, 4).to_logical(3)
        1

        Raises:
            InvalidVisibleDevices: It is not visible, or numbers cannot be told.
        """
        physical = _index("physical", physical)
        if physical in self.physical:
            return self.physical.index(physical)
        doubt = " (some numbers cannot be told)" if None in self.physical else ""
        raise InvalidVisibleDevices(
            f"GPU {physical} is not visible: {self._table()}{doubt}.\nFix: add it to {VARIABLE}, or choose one of these"
        )

    def check(self) -> VisibleDevices:
        """This, when CUDA shows every entry of the variable.

        Raises:
            InvalidVisibleDevices: Entries are dropped; the message says which, why, and what to write.
        """
        if not self.dropped:
            return self
        asked = len(self.physical) + len(self.dropped)
        then = (
            f"LOCAL_RANK {len(self)} and up would have no device"
            if len(self)
            else "no rank would have a device"
        )
        fix = self.suggestion or "<numbers or UUIDs that nvidia-smi -L lists>"
        raise InvalidVisibleDevices(
            f"{VARIABLE}={self.value!r}: {self.notes[-1].removesuffix('.')}: "
            f"{len(self)} of {asked} GPUs would be visible, and {then}.\n"
            f"Fix: export {VARIABLE}={fix}"
        )

    def _table(self) -> str:
        if not self.physical:
            return "no device is visible"
        listed = ", ".join(
            f"{i}: physical {'unknown' if p is None else p}" for i, p in enumerate(self.physical)
        )
        return f"visible devices are {{{listed}}}"


def visible_devices(
    environ: Mapping[str, str] | None = None, inventory: int | Sequence[Gpu] | None = None
) -> VisibleDevices:
    """The GPUs that CUDA would show, by the driver's own rules for CUDA_VISIBLE_DEVICES.

    >>> visible_devices({"CUDA_VISIBLE_DEVICES": "1,0"}, 2).physical
    (1, 0)
    >>> found = visible_devices({"CUDA_VISIBLE_DEVICES": "0,9,1"}, 4)
    >>> found.physical, found.notes[0].splitlines()[0]
    ((0,), "'9' is not one of this node's GPUs (0-3).")

    The rules: the order is kept; the first entry that is no device hides itself and all after it; a device named twice hides
    every device; a UUID may be shortened to any beginning that fits one GPU; numbers are read as C reads them (``1gpu`` is 1); a
    process sees one MIG instance at most; the empty text hides all.

    Numbers follow nvidia-smi only with CUDA_DEVICE_ORDER=PCI_BUS_ID, or where all GPUs are of one kind; otherwise CUDA
    counts from the fastest, and ``physical`` has None rather than a guess.

    Args:
        environ: The variables to read, by default this process's.
        inventory: This node's GPUs: how many, or a list; None asks NVML.

    Raises:
        ValueError: ``environ`` or ``inventory`` is something else. Whatever text the variable holds is read, see `VisibleDevices.check`.
    """
    environ = read_environ(environ)
    gpus = listed_inventory(inventory)
    value = environ.get(VARIABLE)
    by_bus = environ.get("CUDA_DEVICE_ORDER", "").strip() == "PCI_BUS_ID"
    numbering = _Numbering(gpus, by_bus)
    if value is None:
        if gpus is None:
            return VisibleDevices(
                (), ("NVML is not available, so the number of GPUs is unknown.",), known=False
            )
        notes = (numbering.doubt,) if numbering.doubt and len(gpus) else ()
        ordered = [numbering.gpu(i) for i in range(len(gpus))]
        return VisibleDevices(
            tuple(None if gpu is None else gpu.index for gpu in ordered),
            notes,
            uuids=tuple("" if gpu is None else gpu.uuid for gpu in ordered),
        )
    return _read_list(value, gpus, numbering)


def listed_inventory(inventory: int | Sequence[Gpu] | None) -> list[Gpu] | None:
    """The GPUs by number; None where nobody can say."""
    if inventory is None:
        return nvml_inventory()
    is_list = isinstance(inventory, Sequence) and not isinstance(inventory, (str, bytes))
    if hasattr(inventory, "__index__") and not isinstance(inventory, bool):
        try:
            count = require_int("inventory", inventory, at_least=0, at_most=MOST_GPUS)
        except ValueError:
            raise ValueError(
                f"inventory={short(inventory)}: a number of GPUs is 0 or more, up to {MOST_GPUS}.\nFix: 4, or None for NVML"
            ) from None
        return [Gpu(index) for index in range(count)]
    if not is_list or not all(isinstance(gpu, Gpu) for gpu in inventory):  # type: ignore[union-attr]
        raise ValueError(
            f"inventory={short(inventory)}: neither a number of GPUs nor a list of Gpu.\nFix: 4, [Gpu(0, uuid), ...], or None for NVML"
        )
    listed = sorted(inventory, key=lambda gpu: gpu.index)  # type: ignore[arg-type]
    if [gpu.index for gpu in listed] != list(range(len(listed))):
        raise ValueError(
            f"inventory has the numbers {[gpu.index for gpu in listed]}: all GPUs of the node are wanted, 0 and up, each once"
        )
    return listed


def _index(name: str, value: int) -> int:
    try:
        return require_int(name, value, at_least=-MOST_GPUS)
    except ValueError:
        raise InvalidVisibleDevices(
            f"{name}={short(value)} is no number of a GPU.\nFix: an integer, 0 for the first"
        ) from None


def read_environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """The given variables, or this process's.

    Raises:
        ValueError: It is no mapping, or the variable's value is no text.
    """
    if environ is None:
        return os.environ
    if not isinstance(environ, Mapping) or not isinstance(environ.get(VARIABLE, ""), str):
        raise ValueError(
            f"environ: a mapping such as {{{VARIABLE!r}: '0,1'}}, of text to text, was expected, not {short(environ)}.\n"
            "Fix: os.environ, or a dict of what is to be read"
        )
    return environ


class _Numbering:
    """What CUDA's number n stands for."""

    def __init__(self, gpus: list[Gpu] | None, by_bus: bool) -> None:
        self.gpus = gpus
        self.doubt = ""
        self._by_ordinal: dict[int, Gpu] | None = None
        if gpus is None or by_bus or len({gpu.name for gpu in gpus}) <= 1:
            return
        if all(gpu.cuda_ordinal is not None for gpu in gpus):
            self._by_ordinal = {gpu.cuda_ordinal: gpu for gpu in gpus if gpu.cuda_ordinal is not None}
            return
        self.doubt = (
            "The GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID, so CUDA counts from the fastest and its numbers are "
            "not nvidia-smi's."
        )

    def gpu(self, number: int) -> Gpu | None:
        """The GPU with CUDA's number, None when that cannot be told."""
        if self.gpus is None or self.doubt:
            return None
        if self._by_ordinal is not None:
            return self._by_ordinal.get(number)
        return self.gpus[number]


def entries_of(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",")]


def _read_list(value: str, gpus: list[Gpu] | None, numbering: _Numbering) -> VisibleDevices:
    known = gpus is not None
    entries = entries_of(value)
    if not value.strip():
        return VisibleDevices((), ("It is empty, which hides every GPU.",), value, known=known)
    kind = next((prefix for prefix in ("GPU-", "MIG-") if entries[0].startswith(prefix)), "number")
    readings = [_read_entry(entry, kind, gpus, numbering) for entry in entries]
    good = {
        found.name: entry for entry, found in zip(entries, readings, strict=True) if found.name is not None
    }
    suggestion = ",".join(list(good.values())[: 1 if kind == "MIG-" else None])
    physical: list[int | None] = []
    uuids: list[str] = []
    names: list[str] = []  # what each device is, to find one named twice
    notes: list[str] = [] if known else ["NVML is not available: numbers and UUIDs are taken on trust."]
    if kind != "number" and any(entry != raw for entry, raw in zip(entries, value.split(","), strict=True)):
        notes.append("There are spaces around UUIDs; write the list without them.")
    for position, (entry, found) in enumerate(zip(entries, readings, strict=True)):
        if found.note:
            notes.append(found.note)
        if found.name is None:
            rest = entries[position:]
            after = " and every one after it" if len(rest) > 1 else ""
            notes[-1] += f"\nCUDA hides that entry{after}."
            return VisibleDevices(
                tuple(physical), tuple(notes), value, tuple(rest), tuple(uuids), known, suggestion
            )
        if found.name in names:
            notes.append(f"{entry!r} names a GPU that is in the list already.\nCUDA then hides every GPU.")
            return VisibleDevices((), tuple(notes), value, tuple(entries), (), known, suggestion)
        names.append(found.name)
        if kind == "MIG-" and physical:
            continue  # a repeat further on still hides everything
        physical.append(None if found.gpu is None else found.gpu.index)
        if found.gpu is None and found.number is not None and not known:
            physical[-1] = found.number
        uuids.append(found.uuid)
    dropped: tuple[str, ...] = ()
    if kind == "MIG-" and len(entries) > 1:
        dropped = tuple(entries[1:])
        notes.append(
            "A process sees one MIG instance at most: the first.\nFor several ranks give each its own "
            f"{VARIABLE} with one entry; collectives between MIG instances are not generally supported."
        )
    if kind == "number" and numbering.doubt:
        notes.append(numbering.doubt)
    return VisibleDevices(tuple(physical), tuple(notes), value, dropped, tuple(uuids), known, suggestion)


@dataclass(frozen=True)
class _Entry:
    """One entry of the list: what it is (None: no device), its GPU where that is known, what is odd about it."""

    name: str | None
    gpu: Gpu | None = None
    uuid: str = ""
    number: int | None = None
    note: str = ""


def _read_entry(entry: str, kind: str, gpus: list[Gpu] | None, numbering: _Numbering) -> _Entry:
    if kind == "number":
        return _read_number(entry, gpus, numbering)
    if not entry.startswith(kind):
        form = "UUIDs" if kind == "GPU-" else "MIG UUIDs"
        return _Entry(
            None, note=f"{entry!r} stands in a list of {form}, which cannot be mixed with anything else."
        )
    return _read_gpu_uuid(entry, gpus) if kind == "GPU-" else _read_mig(entry, gpus)


def _read_number(entry: str, gpus: list[Gpu] | None, numbering: _Numbering) -> _Entry:
    match = re.match(r"[+-]?[0-9]+", entry)
    if match is None:
        hint = ""
        if entry.lower() in ("all", "none", "void"):
            hint = " (that word is for NVIDIA_VISIBLE_DEVICES)"
        elif entry.startswith(("GPU-", "MIG-")):
            hint = " (numbers and UUIDs cannot be mixed)"
        elif not entry:
            return _Entry(None, note="There is an empty entry.")
        return _Entry(None, note=f"{entry!r} is no number{hint}.")
    number = int(match[0])
    note = "" if match[0] == entry else f"{entry!r} is read as {number}."
    if number < 0:
        return _Entry(None, note=f"{entry!r} is no GPU.")
    if gpus is not None and number >= len(gpus):
        return _Entry(None, note=f"{entry!r} is not one of this node's GPUs ({span_of(gpus)}).")
    gpu = numbering.gpu(number)
    if gpu is not None and gpu.mig_uuids:
        note += f"GPU {number} is split into MIG instances: CUDA shows its first."
    return _Entry(str(number), gpu, "" if gpu is None else gpu.uuid, number, note)


def span_of(gpus: list[Gpu]) -> str:
    if not gpus:
        return "there is none"
    return "0" if len(gpus) == 1 else f"0-{len(gpus) - 1}"


def _read_gpu_uuid(entry: str, gpus: list[Gpu] | None) -> _Entry:
    if gpus is None or (gpus and not any(gpu.uuid for gpu in gpus)):
        return _Entry(
            entry,
            uuid=entry,
            note="" if gpus is None else f"The UUIDs are unknown, so {entry!r} is taken on trust.",
        )
    fitting = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    if len(fitting) == 1:
        return _Entry(fitting[0].uuid, fitting[0], fitting[0].uuid)
    if fitting:
        return _Entry(None, note=f"{entry!r} fits {len(fitting)} GPUs.")
    return _Entry(None, note=f"{entry!r} is the UUID of none of this node's {len(gpus)} GPUs.")


def _read_mig(entry: str, gpus: list[Gpu] | None) -> _Entry:
    legacy = re.fullmatch(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)", entry)
    if legacy and gpus:
        parents = [gpu for gpu in gpus if gpu.uuid.startswith(legacy[1])]
        if len(parents) == 1:
            return _Entry(entry, parents[0], entry)
    instances = [(gpu, uuid) for gpu in gpus or [] for uuid in gpu.mig_uuids if uuid.startswith(entry)]
    if len(instances) == 1:
        return _Entry(instances[0][1], instances[0][0], instances[0][1])
    if instances:
        return _Entry(None, note=f"{entry!r} fits {len(instances)} MIG instances.")
    if any(gpu.mig_uuids for gpu in gpus or []):
        return _Entry(None, note=f"{entry!r} is none of this node's MIG instances.")
    # NVML may not tell MIG instances, or hides them in a container: the entry still counts as a device.
    return _Entry(entry, uuid=entry, note=f"The GPU that {entry!r} belongs to is unknown.")

"""Sections of `nvidia-smi -q`: nested by indentation, so that "Current" means what it stands under."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from phalanx.tools.doctor.draft import Draft
from phalanx.tools.doctor.quantities import number, size_bytes, truth

_GPU = re.compile(r"^\s{0,4}GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s{0,4}$")
_LOG = re.compile(r"^\s{0,4}=+\s?NVSMI LOG\s?=+")
_HEAD = re.compile(r"^\s{0,4}(?:Timestamp|Driver Version|CUDA Version|Attached GPUs)\s{1,60}:\s?(\S.{0,60})$")
# A value stands behind a padded colon; a traceback's "Error: ..." has no room before it.
_ENTRY = re.compile(r"^(\s{1,40})([A-Z][\w ./()-]{0,58}?)(?:\s{1,60}:(?:\s(.{0,120}))?)?\s{0,8}$")
_DEEPEST = 8

Keep = Callable[[dict[str, Any], str], None]


def _first(name: str, of: Callable[[str], Any]) -> Keep:
    def keep(gpu: dict[str, Any], value: str) -> None:
        found = of(value)
        if found is not None:
            gpu.setdefault(name, found)

    return keep


def _sum(name: str) -> Keep:
    def keep(gpu: dict[str, Any], value: str) -> None:
        if value.isdigit():
            gpu[name] = gpu.get(name, 0) + int(value)

    return keep


def _count(name: str) -> Keep:
    def keep(gpu: dict[str, Any], value: str) -> None:
        gpu[name] = gpu.get(name, 0) + 1

    return keep


def _throttle(reason: str) -> Keep:
    def keep(gpu: dict[str, Any], value: str) -> None:
        reasons = gpu.setdefault("throttle_reasons", [])
        if value == "Active" and reason not in reasons:
            reasons.append(reason)

    return keep


def _slice(gpu: dict[str, Any], value: str) -> None:
    gpu.setdefault("mig_uuids", []).append(f"MIG device {value}")


def _fabric(gpu: dict[str, Any], value: str) -> None:
    if value not in ("N/A", ""):
        gpu["fabric_state"] = f"{gpu['fabric_state']} {value}" if "fabric_state" in gpu else value


def _mode(value: str) -> str | None:
    words = value.lower()
    return next((mode for mode in ("exclusive", "prohibited", "default") if words.startswith(mode)), None)


def _text(value: str) -> str | None:
    return None if value in ("N/A", "", "None") else value


def _whole(value: str) -> int | None:
    match = re.match(r"\d{1,9}", value)
    return int(match.group()) if match else None


# What stands behind a path of section names; the longest path that fits counts, "*" is any one section.
_READERS: tuple[tuple[str, Keep], ...] = (
    ("Product Name", _first("name", _text)),
    ("GPU UUID", _first("uuid", _text)),
    ("Persistence Mode", _first("persistence", truth)),
    ("MIG Mode/Current", _first("mig_enabled", truth)),
    ("MIG Device/Index", _slice),
    ("Compute Mode", _first("compute_mode", _mode)),
    ("PCI/Bus Id", _first("pci_bus_id", _text)),
    ("GPU Link Info/PCIe Generation/Max", _first("pcie_gen_max", _whole)),
    ("GPU Link Info/PCIe Generation/Current", _first("pcie_gen", _whole)),
    ("GPU Link Info/Link Width/Max", _first("pcie_width_max", _whole)),
    ("GPU Link Info/Link Width/Current", _first("pcie_width", _whole)),
    ("FB Memory Usage/Total", _first("memory_total_bytes", size_bytes)),
    ("FB Memory Usage/Used", _first("memory_used_bytes", size_bytes)),
    ("BAR1 Memory Usage/Total", _first("bar1_total_bytes", size_bytes)),
    ("Utilization/Gpu", _first("utilization_percent", _whole)),
    ("Utilization/GPU", _first("utilization_percent", _whole)),
    ("Temperature/GPU Current Temp", _first("temperature_c", _whole)),
    ("ECC Mode/Current", _first("ecc_enabled", truth)),
    ("ECC Errors/Volatile/SRAM Uncorrectable", _sum("ecc_uncorrectable")),
    ("ECC Errors/Volatile/SRAM Uncorrectable Parity", _sum("ecc_uncorrectable")),
    ("ECC Errors/Volatile/SRAM Uncorrectable SEC-DED", _sum("ecc_uncorrectable")),
    ("ECC Errors/Volatile/DRAM Uncorrectable", _sum("ecc_uncorrectable")),
    ("ECC Errors/Volatile/Double Bit/Total", _sum("ecc_uncorrectable")),
    ("ECC Errors/Aggregate/SRAM Uncorrectable", _sum("ecc_uncorrectable_total")),
    ("ECC Errors/Aggregate/SRAM Uncorrectable Parity", _sum("ecc_uncorrectable_total")),
    ("ECC Errors/Aggregate/SRAM Uncorrectable SEC-DED", _sum("ecc_uncorrectable_total")),
    ("ECC Errors/Aggregate/DRAM Uncorrectable", _sum("ecc_uncorrectable_total")),
    ("ECC Errors/Aggregate/Double Bit/Total", _sum("ecc_uncorrectable_total")),
    ("Retired Pages/Pending", _first("retired_pages_pending", truth)),
    ("Retired Pages/Pending Page Blacklist", _first("retired_pages_pending", truth)),
    ("Retired Pages/Pending Page Blocklist", _first("retired_pages_pending", truth)),
    ("Remapped Rows/Uncorrectable Error", _first("remapped_rows_uncorrectable", number)),
    ("Remapped Rows/Pending", _first("remap_pending", truth)),
    ("Remapped Rows/Remapping Failure Occurred", _first("remap_failed", truth)),
    ("Fabric/State", _fabric),
    ("Fabric/Status", _fabric),
    ("Process ID", _count("process_count")),
    *(
        (f"{section}{name}", _throttle(name.rsplit("/", 1)[-1].lower().replace(" ", "_")))
        for section in ("Clocks Throttle Reasons/", "Clocks Event Reasons/")
        for name in (
            "SW Power Cap",
            "HW Slowdown",
            "HW Slowdown/HW Thermal Slowdown",
            "HW Slowdown/HW Power Brake Slowdown",
            "HW Thermal Slowdown",
            "HW Power Brake Slowdown",
            "SW Thermal Slowdown",
            "Sync Boost",
        )
    ),
)
_KEYS = dict(_READERS)


class QueryReader:
    """Reads the lines of one `nvidia-smi -q` as they come.

    >>> draft, reader = Draft(), QueryReader()
    >>> for line in ("GPU 00000000:3B:00.0", "    PCI", "        GPU Link Info", "            Link Width",
    ...              "                Max               : 16x", "                Current           : 8x"):
    ...     read = reader.read(draft, line)
    >>> draft.gpus[0]["pcie_width"], draft.gpus[0]["pcie_width_max"]
    (8, 16)
    """

    def __init__(self) -> None:
        self._inside = False
        self._in_log = False
        self._sections: list[tuple[int, str]] = []

    def read(self, draft: Draft, line: str) -> bool:
        """Take a line that belongs to the query's output; False where it does not."""
        head = _GPU.match(line)
        if head:
            self._begin(draft, head[1])
            return True
        if not self._inside:
            return self._head(draft, line)
        entry = _ENTRY.match(line.expandtabs(4))
        if entry is None:
            self._inside = not line.strip()
            return False
        self._enter(len(entry[1]), entry[2])
        if entry[3]:
            self._keep(draft, entry[3].strip())
        return True

    def _begin(self, draft: Draft, bus: str) -> None:
        known = next((gpu for gpu in draft.gpus if gpu.get("pci_bus_id") == bus), None)
        if known is None:
            draft.gpu(None, pci_bus_id=bus)
            known = draft.gpus[-1]
        self._gpu: dict[str, Any] = known
        self._inside, self._sections = True, []

    def _head(self, draft: Draft, line: str) -> bool:
        if _LOG.match(line):
            self._in_log = True
            return True
        head = _HEAD.match(line) if self._in_log else None
        if head and line.lstrip().startswith("CUDA"):
            draft.put("driver.cuda", head[1] if head[1][0].isdigit() else None)
        elif head and line.lstrip().startswith("Driver"):
            draft.put("driver.version", head[1])
        return head is not None

    def _enter(self, indent: int, name: str) -> None:
        while self._sections and self._sections[-1][0] >= indent:
            self._sections.pop()
        if len(self._sections) < _DEEPEST:
            self._sections.append((indent, name))

    def _keep(self, draft: Draft, value: str) -> None:
        names = [name for _, name in self._sections]
        for start in range(len(names)):
            keep = _KEYS.get("/".join(names[start:]))
            if keep is not None:
                keep(self._gpu, value)
                return

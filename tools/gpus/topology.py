"""How the GPUs of this node are connected: NVLinks, PCIe, CPUs, and who cannot reach whom directly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.dist.nvml import Nvml, NvmlAbsent, NvmlDevice, open_nvml
from phalanx.tools.gpus.abilities import Topology
from phalanx.tools.gpus.readings import NodeReading
from phalanx.tools.gpus.text_table import Cell, Column, table_lines

MAX_LINKS = 18  # of the newest GPUs
_SWITCH = 2
_LEVELS = {0: "SAME", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
LEGEND = {
    "NV#": "that many NVLinks, directly or through NVSwitches",
    "SAME": "on one board",
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges, without the CPU",
    "PHB": "through the PCIe host bridge of a CPU",
    "NODE": "between host bridges of one NUMA node",
    "SYS": "between NUMA nodes",
    "n/a": "not told",
}


def with_topology(node: NodeReading) -> NodeReading:
    """The node, and how its GPUs are connected."""
    return replace(node, topology=read_topology())


def read_topology(root: Path = Path("/")) -> Topology | None:
    """The topology, None where NVML does not answer or there is no GPU."""
    try:
        with open_nvml() as nvml:
            devices = nvml.devices()
            return _read(nvml, devices, root) if devices else None
    except NvmlAbsent:
        return None


def _read(nvml: Nvml, devices: Sequence[NvmlDevice], root: Path) -> Topology:
    buses = [_bus(device) for device in devices]
    return Topology(
        links=tuple(tuple(_link(one, other, buses) for other in devices) for one in devices),
        peers=tuple(tuple(_peer(one, other) for other in devices) for one in devices),
        cpus=tuple(_cpus(device, root) for device in devices),
        numa_nodes=tuple(_numa_node(device, root) for device in devices),
    )


def _link(one: NvmlDevice, other: NvmlDevice, buses: Sequence[str]) -> str | None:
    if one.index == other.index:
        return "X"
    ends = _link_ends(one)
    direct = ends.count(buses[other.index])
    switched = min(ends.count("switch"), _link_ends(other).count("switch"))
    if direct or switched:
        return f"NV{direct or switched}"
    level = one.ask_about("TopologyCommonAncestor", other)
    return _LEVELS.get(int(level)) if level is not None else None


def _link_ends(device: NvmlDevice) -> list[str]:
    """For each NVLink that is up, the bus id at its other end, or "switch"."""
    ends = []
    for number in range(MAX_LINKS):
        up = device.ask("NvLinkState", number)
        if up is None and number == 0:
            return []  # this GPU has none
        if up:
            kind = device.ask("NvLinkRemoteDeviceType", number)
            bus = getattr(device.ask("NvLinkRemotePciInfo", number), "busId", "")
            ends.append("switch" if kind == _SWITCH else _normal(bus))
    return ends


def _peer(one: NvmlDevice, other: NvmlDevice) -> bool | None:
    if one.index == other.index:
        return True
    status = one.ask_about("P2PStatus", other, 0)  # 0: reading each other's memory
    return None if status is None else int(status) == 0


def _bus(device: NvmlDevice) -> str:
    return _normal(getattr(device.ask("PciInfo"), "busId", ""))


def _normal(bus: bytes | str) -> str:
    """Bus ids come with 4 or 8 digits of domain: ``0000:07:00.0`` is the system's form."""
    text = bus.decode(errors="replace") if isinstance(bus, bytes) else str(bus)
    match = re.fullmatch(r"(?:[0-9a-f]*?)([0-9a-f]{4}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", text.lower())
    return f"{match[1]}:{match[2]}" if match else text.lower()


def _cpus(device: NvmlDevice, root: Path) -> str | None:
    words = device.ask("CpuAffinity", 64)
    if words is not None:
        mask = sum(int(word) << (64 * i) for i, word in enumerate(words))
        if mask:
            return ranges([bit for bit in range(mask.bit_length()) if mask >> bit & 1])
    return _sysfs(device, root, "local_cpulist") or None


def _numa_node(device: NvmlDevice, root: Path) -> int | None:
    text = _sysfs(device, root, "numa_node")
    return int(text) if text.isdigit() else None  # -1: the board does not say


def _sysfs(device: NvmlDevice, root: Path, name: str) -> str:
    try:
        return (root / "sys/bus/pci/devices" / _bus(device) / name).read_text().strip()
    except (OSError, ValueError):
        return ""


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in order as the kernel writes them.

    >>> ranges([0, 1, 2, 3, 8]), ranges([])
    ('0-3,8', '')
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def topology_lines(topology: Topology, *, width: int | None = None, colour: bool = False) -> list[str]:
    """The matrix, what its words mean, and what follows from it."""
    count = len(topology.links)
    columns = [Column(title=""), *(Column(title=f"GPU {i}") for i in range(count))]
    columns += [Column(title="NUMA", right=True, spare=1), Column(title="CPUS", spare=2)]
    rows = []
    for i in range(count):
        numa = topology.numa_nodes[i]
        row = [Cell(f"GPU {i}"), *(_cell(topology, i, j) for j in range(count))]
        rows.append([*row, Cell("n/a" if numa is None else str(numa)), Cell(topology.cpus[i] or "n/a")])
    used = {re.sub(r"\d+$", "#", word or "n/a") for line in topology.links for word in line}
    lines = table_lines(columns, rows, width=width, colour=colour)
    lines += ["", *(f"{word:5} {meaning}" for word, meaning in LEGEND.items() if word in used)]
    if any(False in line for line in topology.peers):
        lines.append("!     no peer-to-peer")
    return [*lines, *(f"Note: {note}" for note in notes_of(topology))]


def notes_of(topology: Topology) -> list[str]:
    """What will matter to a job of several GPUs."""
    count = len(topology.links)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    notes = []
    blocked = [f"{i}-{j}" for i, j in pairs if topology.peers[i][j] is False]
    if blocked:
        notes.append(
            f"no peer-to-peer between GPUs {', '.join(blocked)}: NCCL goes through the computer's memory."
        )
    linked = [f"{i}-{j}" for i, j in pairs if (topology.links[i][j] or "").startswith("NV")]
    if linked and len(linked) < len(pairs):
        notes.append(
            f"NVLink joins only some pairs ({', '.join(linked)}): ranks of one group are best placed there."
        )
    return notes


def _cell(topology: Topology, i: int, j: int) -> Cell:
    blocked = topology.peers[i][j] is False
    return Cell((topology.links[i][j] or "n/a") + "!" * blocked, "bad" if blocked else "")

"""Readings as a screen for people: one table of GPUs, one of processes, for one node or many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.tools.gpus.readings import DeviceReading, GpuReading, HostReading, NodeReading, ProcessReading
from phalanx.tools.gpus.text_table import Cell, Column, paint, table_lines

NONE = "n/a"

_GPU_COLUMNS = (
    Column(title="GPU"),
    Column(title="CUDA", right=True, spare=4),
    Column(title="NAME", spare=3),
    Column(title="MEMORY", right=True),
    Column(title="UTIL", right=True),
    Column(title="TEMP", right=True, spare=5),
    Column(title="POWER", right=True, spare=6),
    Column(title="STATE"),
)
_PROCESS_COLUMNS = (
    Column(title="GPU"),
    Column(title="PID", right=True),
    Column(title="USER", spare=4),
    Column(title="MEMORY", right=True, spare=3),
    Column(title="JOB", spare=2),
    Column(title="RANK", right=True),
    Column(title="LOCAL RANK", right=True, spare=1),
    Column(title="COMMAND"),
)
_HOST_COLUMN = Column(title="HOST")


def screen(nodes: Sequence[NodeReading], *, width: int | None = None, colour: bool = False) -> str:
    """The whole screen, without a line end at its end.

    Args:
        nodes: One node, or several in one table.
        width: Letters in a line; None does not cut.
        colour: Whether the terminal takes colours.
    """
    several = len(nodes) > 1
    if any(node.capabilities is not None or node.topology is not None for node in nodes):
        return _abilities(nodes, width, colour)
    lines = [line for node in nodes for line in _head(node, several, colour)]
    gpus = [row for node in nodes for row in _gpu_rows(node, several)]
    if gpus:
        columns = (_HOST_COLUMN, *_GPU_COLUMNS) if several else _GPU_COLUMNS
        lines += ["", *table_lines(columns, gpus, width=width, colour=colour)]
    processes = [row for node in nodes for row in _process_rows(node, several)]
    if processes:
        columns = (_HOST_COLUMN, *_PROCESS_COLUMNS) if several else _PROCESS_COLUMNS
        lines += ["", *table_lines(columns, processes, width=width, colour=colour)]
    foot = [line for node in nodes for line in _foot(node, several)]
    if foot:
        lines += ["", *foot]
    return "\n".join(lines)


def _abilities(nodes: Sequence[NodeReading], width: int | None, colour: bool) -> str:
    """Instead of who is on the GPUs: what they can do and how they are connected, node by node."""
    lines: list[str] = []
    for node in nodes:
        lines += [*_head(node, True, colour), ""]
        if node.capabilities is not None and node.torch is not None:
            from phalanx.tools.gpus.capability import capability_lines

            lines += [*capability_lines(node.capabilities, node.torch, width=width, colour=colour), ""]
        if node.topology is not None:
            from phalanx.tools.gpus.topology import topology_lines

            lines += [*topology_lines(node.topology, width=width, colour=colour), ""]
        lines += [*_foot(node, False), ""]
    text = "\n".join(lines).strip("\n")
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


# -------------------------------------------------------------------------------------------------------- head


def _head(node: NodeReading, several: bool, colour: bool) -> Iterator[str]:
    if node.error:
        yield paint(f"{node.host}: {node.error}", "bad", colour)
    elif not node.gpus:
        line = f"{node.host}: no NVIDIA GPU ({node.no_gpus.rstrip('.')})"
        yield from (
            [f"{line}, {_computer(node.computer)}"] if several else [f"{line}.", _computer(node.computer)]
        )
    else:
        count = len(node.gpus)
        idle = sum(gpu.idle is True for gpu in node.gpus)
        parts = [f"driver {node.driver_version or NONE}"]
        if node.cuda_driver_version:
            parts.append(f"CUDA {node.cuda_driver_version}")
        parts += [f"{count} GPU{'s' * (count > 1)}", f"{idle} idle"]
        lost = sum(bool(gpu.problem) for gpu in node.gpus)
        if lost:
            parts.append(paint(f"{lost} not usable", "bad", colour))
        if several:
            parts.append(_computer(node.computer))
        yield f"{node.host}: " + ", ".join(parts)
        if not several:
            yield _computer(node.computer)


def _computer(computer: HostReading) -> str:
    load = NONE if computer.load_1m is None else f"load {computer.load_1m:.1f}"
    cores = "" if computer.cores is None else f" on {computer.cores} core{'s' * (computer.cores > 1)}"
    return f"CPU {load}{cores}, memory {memory(computer.memory_used_bytes, computer.memory_total_bytes)}"


# -------------------------------------------------------------------------------------------------------- GPUs


def _gpu_rows(node: NodeReading, several: bool) -> Iterator[list[Cell]]:
    host = [Cell(node.host)] if several else []
    for gpu in node.gpus:
        yield [*host, *_gpu_row(gpu)]
        for instance in gpu.mig_instances:
            yield [*host, *_instance_row(gpu, instance)]


def _gpu_row(gpu: GpuReading) -> list[Cell]:
    power = number(gpu.power_w, "W")
    if gpu.power_w is not None and gpu.power_limit_w is not None:
        power = f"{gpu.power_w:.0f}/{number(gpu.power_limit_w, 'W')}"
    split = bool(gpu.mig_instances)
    return [
        Cell(str(gpu.index)),
        Cell(NONE if gpu.cuda_ordinal is None else str(gpu.cuda_ordinal)),
        Cell((gpu.name or NONE).removeprefix("NVIDIA ")),
        Cell(memory(gpu.memory_used_bytes, gpu.memory_total_bytes)),
        Cell(number(gpu.utilization_percent, "%"), "busy" if (gpu.utilization_percent or 0) >= 50 else ""),
        Cell(number(gpu.temperature_c, "C")),
        Cell(power),
        Cell(f"{len(gpu.mig_instances)} MIG instances")
        if split and not gpu.problem
        else state(gpu, gpu.problem),
    ]


def _instance_row(gpu: GpuReading, instance: DeviceReading) -> list[Cell]:
    name = (
        (instance.name or NONE).removeprefix("NVIDIA ").removeprefix((gpu.name or "").removeprefix("NVIDIA "))
    )
    texts = [f"{gpu.index}.{instance.index}", "", f"  {name.strip()}"]
    texts += [memory(instance.memory_used_bytes, instance.memory_total_bytes), NONE, "", ""]
    return [*map(Cell, texts), state(instance, "")]


def state(device: DeviceReading, problem: str) -> Cell:
    """In a word or two whether a job could take it."""
    if problem:
        return Cell(problem, "bad")
    holder = device.held_by
    if holder is not None:
        by = holder.job or holder.name or "a job in another container"
        return Cell(f"held by {by}" + (f" (pid {holder.pid})" if holder.pid else ""), "busy")
    if device.idle is None:
        return Cell(NONE)
    compute_mode = getattr(device, "compute_mode", None)
    if compute_mode == "prohibited":
        return Cell("compute prohibited", "bad")
    word = "idle" if device.idle else "in use"
    return Cell(
        word + (", exclusive" if compute_mode == "exclusive" else ""), "good" if device.idle else "busy"
    )


# --------------------------------------------------------------------------------------------------- processes


def _process_rows(node: NodeReading, several: bool) -> Iterator[list[Cell]]:
    host = [Cell(node.host)] if several else []
    for gpu in node.gpus:
        for process in gpu.processes or ():
            yield [*host, *_process_row(str(gpu.index), process)]
        for instance in gpu.mig_instances:
            for process in instance.processes or ():
                yield [*host, *_process_row(f"{gpu.index}.{instance.index}", process)]


def _process_row(where: str, process: ProcessReading) -> list[Cell]:
    rank = NONE if process.rank is None else str(process.rank)
    if process.rank is not None and process.world_size:
        rank += f" of {process.world_size}"
    command = process.name or f"({process.note or 'unknown'})"
    if process.kind != "compute":
        command += f" [{process.kind}]"
    return [
        Cell(where),
        Cell(str(process.pid)),
        Cell(process.user or NONE),
        Cell(NONE if process.memory_bytes is None else size(process.memory_bytes)),
        Cell(process.job or NONE),
        Cell(rank),
        Cell(NONE if process.local_rank is None else str(process.local_rank)),
        Cell(command, "" if process.name else "dim"),
    ]


# -------------------------------------------------------------------------------------------------------- foot

#: Fields whose absence is worth a line: those that are shown.
_SHOWN = {
    "memory_total_bytes": "memory",
    "utilization_percent": "utilization",
    "temperature_c": "temperature",
    "power_w": "power",
    "processes": "processes",
    "name": "name",
}


def _foot(node: NodeReading, several: bool) -> Iterator[str]:
    start = f"{node.host}: " if several else ""
    for words, places, reason in _missing(node):
        yield f"{start}n/a: {words} of GPU {places}: {reason.rstrip('.')}."
    for note in node.notes:
        yield start + (note if note.startswith("Fix: ") else f"Note: {note}")


def _missing(node: NodeReading) -> list[tuple[str, str, str]]:
    """What is not there, where, and NVML's reason; devices with the same reason share a line."""
    places: dict[tuple[str, str], list[str]] = {}  # by field and reason
    for gpu in node.gpus:
        instances = [(f"{gpu.index}.{one.index}", one) for one in gpu.mig_instances]
        devices: list[tuple[str, DeviceReading]] = [(str(gpu.index), gpu), *instances]
        for where, device in [] if gpu.problem else devices:
            for name, word in _SHOWN.items():
                if name in device.why and not _expected(device, name):
                    places.setdefault((word, device.why[name]), []).append(where)
    words: dict[tuple[str, str], list[str]] = {}  # by places and reason
    for (word, reason), found in places.items():
        words.setdefault((", ".join(found), reason), []).append(word)
    return [(", ".join(found), where, reason) for (where, reason), found in words.items()]


def _expected(device: DeviceReading, field: str) -> bool:
    """A MIG instance has none of these, and neither has its GPU a utilization: nothing to explain."""
    if isinstance(device, GpuReading):
        return field == "utilization_percent" and bool(device.mig_instances)
    return field in ("utilization_percent", "temperature_c", "power_w")


# ----------------------------------------------------------------------------------------------------- numbers


def gib(count: int) -> str:
    return f"{count / (1 << 30):.1f}"


def size(count: int) -> str:
    """``10.0 GiB``, and ``50 MiB`` where that would be 0.0."""
    return f"{gib(count)} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def memory(used: int | None, total: int | None) -> str:
    """``40.0/80.0 GiB``, with n/a for what is missing.

    >>> memory(40 << 30, 80 << 30), memory(None, None), memory(None, 10 << 30)
    ('40.0/80.0 GiB', 'n/a', 'n/a/10.0 GiB')
    """
    if used is None and total is None:
        return NONE
    return f"{NONE if used is None else gib(used)}/{NONE if total is None else gib(total)} GiB"


def number(value: float | None, unit: str) -> str:
    return NONE if value is None else f"{value:.0f} {unit}"

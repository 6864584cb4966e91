"""How many ranks this node gets, on which GPUs, and with how many threads each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch.node_gpus import NodeGpu, NodeGpus, hold, node_gpus
from phalanx.launch.options import Given
from phalanx.launch.values import Values
from phalanx.launch.waiting import Waiting
from phalanx.tools.usage import UsageMistake, nearest


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Ranks, devices and threads of one node.

    ``gpus`` are entries for CUDA_VISIBLE_DEVICES: None leaves the variable alone, () hides every GPU.
    ``devices`` says per local rank, in words, what it runs on; empty without GPUs.
    """

    nproc_per_node: int
    gpus: tuple[str, ...] | None = None
    devices: tuple[str, ...] = ()
    virtual_local_rank: bool = False  # each rank must see its own device alone
    omp_num_threads: int | None = None
    threads: str = ""
    notes: tuple[str, ...] = ()


def place(values: Values, environ: Mapping[str, str] = os.environ, *, take: bool = False) -> Placement:
    """Read ``--gpus`` and ``--nproc-per-node`` against what this node has.

    With ``take`` the GPUs are held until this process and what it forks have ended, so that two jobs started
    together do not choose the same idle ones.

    Raises:
        UsageMistake: More ranks than GPUs, a GPU that does not exist or is in use, or a bad value.
        CannotFinish: ``--wait`` took longer than ``--wait-timeout-s``.
    """
    with Waiting(values) if take and "wait" in values else nullcontext() as waiting:
        return _place(values, environ, take, waiting)


def _place(values: Values, environ: Mapping[str, str], take: bool, waiting: Waiting | None) -> Placement:
    while True:
        node = node_gpus(environ)
        if waiting is not None and not waiting.is_over(node):
            continue
        found, chosen = choose(values, node, cores=available_cores(), environ=environ)
        lost = hold(chosen) if take else []
        # A GPU that another job took this moment: look again, it is in use now. One asked for by name is shared.
        if not lost or not _is_automatic(values):
            return found


def _is_automatic(values: Values) -> bool:
    if "gpus" in values:
        return values["gpus"].text.strip().lower().startswith("auto")
    return "nproc_per_node" not in values


def choose(
    values: Values, node: NodeGpus, *, cores: int, environ: Mapping[str, str]
) -> tuple[Placement, list[NodeGpu]]:
    """The rule behind `place`, on a node given by its facts; also the GPUs that the ranks use.

    Without ``--gpus`` and ``--nproc-per-node``, one rank per visible GPU that nobody uses, 1 without a GPU.
    """
    chosen, gpus, notes = _devices(values, node.every, node.visible)
    count = _rank_count(values.get("nproc_per_node"), chosen, cores, values.get("gpus"))
    if values.get("gpus") is None and values.get("nproc_per_node") is not None:
        if values["nproc_per_node"].text == "cpu":
            gpus, chosen = ((), []) if node.visible else (None, [])
        else:
            _check_enough(values["nproc_per_node"], count, chosen)
    if node.one_per_process and chosen:
        gpus = _entries(chosen[:count])
    # Without the variable of ours, CUDA numbers the devices, and where it cannot be told how, nothing is said.
    told = node.order_known or gpus is not None
    threads = environ.get("OMP_NUM_THREADS")
    own = None if threads else max(1, cores // count)
    words = (
        f"OMP_NUM_THREADS={threads}, set by you"
        if threads
        else f"OMP_NUM_THREADS={own} ({cores} core{'s' * (cores > 1)} for {count} rank{'s' * (count > 1)})"
    )
    placement = Placement(
        nproc_per_node=count,
        gpus=gpus,
        devices=tuple(gpu.label for gpu in chosen[:count]) if told else (),
        virtual_local_rank=node.one_per_process and bool(chosen),
        omp_num_threads=own,
        threads=words,
        notes=(*(node.notes if chosen else ()), *notes),
    )
    return placement, list(chosen[:count]) if told else []


def _devices(
    values: Values, every: Sequence[NodeGpu], visible: Sequence[NodeGpu]
) -> tuple[list[NodeGpu], tuple[str, ...] | None, list[str]]:
    """The GPUs to use in order, what to set CUDA_VISIBLE_DEVICES to, and notes."""
    given = values.get("gpus")
    idle = [gpu for gpu in visible if not gpu.users]
    if given is None:
        if "nproc_per_node" in values or len(idle) == len(visible):
            return list(visible), None, []
        if not idle:
            raise UsageMistake(
                f"Every visible GPU is in use: {_held(visible)}.",
                fix="--gpus all to share them, --gpus none to run on the CPU, or --gpus auto:N --wait",
            )
        return idle, _entries(idle), [f"left out, in use: {_held(visible)}."]
    word = given.text.strip().lower()
    if word in ("none", "cpu"):
        return [], (), []
    if word == "all":
        if not visible:
            raise UsageMistake(
                f"{given}: no GPU is visible to this process.", fix="--gpus none to run on the CPU"
            )
        return list(visible), _entries(visible), []
    if word == "auto" or word.startswith("auto:"):
        return _automatic(given, word, visible, idle)
    chosen = [_named(given, part.strip(), every, visible) for part in given.text.split(",")]
    for gpu in chosen:
        if chosen.count(gpu) > 1:
            raise UsageMistake(
                f"{given}: GPU {gpu.index} is there twice; CUDA would hide every GPU.",
                fix="name each GPU once",
            )
    return chosen, _entries(chosen), []


def _automatic(
    given: Given, word: str, visible: Sequence[NodeGpu], idle: list[NodeGpu]
) -> tuple[list[NodeGpu], tuple[str, ...] | None, list[str]]:
    if word == "auto":
        if not visible:
            return [], None, [f"{given}: no GPU is visible, the ranks run on the CPU."]
        wanted = len(idle)
    else:
        number = word.removeprefix("auto:")
        if not number.isdecimal() or int(number) < 1:
            raise UsageMistake(f"{given}: auto:N takes a number of GPUs, 1 or more.", fix="--gpus auto:2")
        wanted = int(number)
    if not idle or wanted > len(idle):
        held = f" In use: {_held(visible)}." if len(idle) < len(visible) else ""
        raise UsageMistake(
            f"{given}: {len(idle)} of {len(visible)} visible GPUs {'is' if len(idle) == 1 else 'are'} free.{held}",
            fix=f"--gpus auto:{len(idle)}"
            if idle
            else "--gpus all to share them, or --gpus none to run on the CPU",
        )
    return idle[:wanted], _entries(idle[:wanted]), []


def _named(given: Given, part: str, every: Sequence[NodeGpu], visible: Sequence[NodeGpu]) -> NodeGpu:
    """One entry of a list: nvidia-smi's number, or the beginning of a UUID."""
    if part.isdecimal():
        found = [gpu for gpu in every if gpu.index == int(part)]
    else:
        found = [gpu for gpu in every if part and gpu.uuid.lower().startswith(part.lower())]
    if len(found) == 1:
        if found[0] not in visible:
            raise UsageMistake(
                f"{given}: GPU {found[0].index} exists, but CUDA_VISIBLE_DEVICES hides it "
                f"(visible: {', '.join(str(gpu.index) for gpu in visible) or 'none'}).",
                fix="one of the visible ones, or unset CUDA_VISIBLE_DEVICES",
            )
        return found[0]
    if found:
        raise UsageMistake(
            f"{given}: {part!r} fits {len(found)} GPUs.", fix=f"more of it, as in {found[0].uuid}"
        )
    numbers = ", ".join(str(gpu.index) for gpu in every)
    near = nearest(part, ("auto", "all", "none"), count=1)
    raise UsageMistake(
        f"{given}: {part!r} is not one of this node's GPUs ({numbers or 'it has none'}).",
        fix=f"--gpus {near[0]}"
        if near
        else "auto, auto:N, all, none, or numbers from nvidia-smi as in --gpus 0,1",
    )


def _rank_count(given: Given | None, chosen: Sequence[NodeGpu], cores: int, gpus: Given | None) -> int:
    if given is None:
        return len(chosen) or 1
    word = given.text.strip().lower()
    if word == "cpu" or (word == "auto" and not chosen):
        return cores
    if word == "auto":
        return len(chosen)
    if word == "gpu":
        if not chosen:
            raise UsageMistake(
                f"{given}: no GPU is visible to this process.", fix="--nproc-per-node N, to run on the CPU"
            )
        return len(chosen)
    try:
        count = int(word)
    except ValueError:
        raise UsageMistake(
            f"{given}: not a number, nor auto, gpu or cpu.", fix="--nproc-per-node 2"
        ) from None
    if count < 1:
        raise UsageMistake(f"{given}: a node needs at least one rank.", fix="--nproc-per-node 1")
    if gpus is not None and chosen:
        _check_enough(given, count, chosen)
    return count


def _check_enough(given: Given, count: int, chosen: Sequence[NodeGpu]) -> None:
    if not chosen or count <= len(chosen):
        return
    raise UsageMistake(
        f"{given}: {count} ranks, but {len(chosen)} GPU{'s' * (len(chosen) > 1)} "
        f"({', '.join(str(gpu.index) for gpu in chosen)}): "
        f"NCCL takes no two ranks on one GPU, and LOCAL_RANK {len(chosen)} and up would have no device.",
        fix=f"--nproc-per-node {len(chosen)}, or --gpus none to run the ranks on the CPU with gloo",
    )


def _entries(gpus: Sequence[NodeGpu]) -> tuple[str, ...]:
    """By UUID, since CUDA and nvidia-smi may number differently."""
    return tuple(gpu.uuid or str(gpu.index) for gpu in gpus)


def _held(gpus: Sequence[NodeGpu]) -> str:
    return "; ".join(f"GPU {gpu.index} by {', '.join(gpu.users)}" for gpu in gpus if gpu.users)


def available_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity, and a container's limit where there is one."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no such file outside cgroup v2
    return count

"""What `phalanx run` was asked to do, checked and complete: the hand-over from the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Show = Literal["auto", "rank0", "all"]

#: What `run` returns in a forked worker: the rest of that process, called outside every frame of the command line.
WorkerMain = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What every rank executes."""

    kind: Literal["script", "module", "command"]
    name: str  # path of the script, name of the module, or the executable (`--no-python`)
    display: str  # short name, used for the log folder


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One job on this node. Values are checked by the command line: `run` may rely on their ranges.

    ``standalone`` is set for every job that needs no meeting point given by the user (one node, no
    port or endpoint asked for): the rendezvous is then local, on a free port, and the ``rdzv_*`` and
    ``master_*`` fields say nothing.
    """

    target: Target
    args: tuple[str, ...] = ()
    nproc_per_node: int  # >= 1
    nnodes_min: int = 1  # 1 <= nnodes_min <= nnodes_max
    nnodes_max: int = 1
    node_rank: int | None = None  # None: left to the rendezvous
    rdzv_backend: str = "c10d"  # "static" takes node_rank, master_addr and master_port
    rdzv_endpoint: str = ""  # "host:port"; "" for static
    rdzv_id: str = "none"
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    master_addr: str | None = None
    master_port: int | None = None  # None: a free one
    local_addr: str | None = None  # the address to announce to other nodes
    standalone: bool = True
    max_restarts: int = 0  # >= 0
    monitor_interval_s: float = 0.1  # > 0
    preload: bool = True
    log_dir: Path  # this run's own folder; made by `run`
    show: Show = "auto"
    local_ranks_filter: tuple[int, ...] | None = None  # of the shown local ranks, only these
    gpus: tuple[str, ...] | None = None  # entries for CUDA_VISIBLE_DEVICES; () hides all, None leaves it
    role: str = "default"
    run_path: bool = False  # the script through runpy.run_path (torchrun's --run-path)
    virtual_local_rank: bool = False  # LOCAL_RANK=0 everywhere, one device visible to each rank
    grace_s: float = 10.0  # between the signal passed on and SIGKILL
    hang_timeout_s: float | None = None  # > 0; None: no look-out for hangs
    omp_num_threads: int | None = None  # to set where the user's environment does not; None leaves it
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    notes: tuple[str, ...] = ()  # lines already shown to the user, for run.json
    command_line: tuple[str, ...] = ()  # as typed, for run.json

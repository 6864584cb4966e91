"""The most memory that each rank of a run has held."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path
from typing import Any

import torch

from phalanx.dist import gather_objects
from phalanx.recipes.runs import write_whole

MEMORY_FILE = "memory.json"


def peak_memory() -> list[dict[str, Any]]:
    """For each rank: ``host``, ``peak_rss_bytes`` (since the process began), ``peak_cuda_bytes`` (None without CUDA). Collective."""
    mine = {
        "host": socket.gethostname(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
        "peak_cuda_bytes": torch.cuda.max_memory_allocated() or None,  # 0 where no GPU is used
    }
    return [{"rank": rank, **found} for rank, found in enumerate(gather_objects(mine))]


def write_memory(folder: Path, peaks: list[dict[str, Any]]) -> None:
    """As memory.json in a run's folder: apart from metrics.jsonl, whose lines are the same for a run cut short or not."""
    write_whole(folder / MEMORY_FILE, json.dumps({"ranks": peaks}, indent=2) + "\n")


def told_memory(peaks: list[dict[str, Any]]) -> str:
    """For the user, the ranks from the least to the most.

    >>> told_memory([{"peak_rss_bytes": 600e6, "peak_cuda_bytes": 2e9}, {"peak_rss_bytes": 650e6, "peak_cuda_bytes": 2e9}])
    '600 to 650 MB a rank, 2,000 MB of the GPU'
    >>> told_memory([{"peak_rss_bytes": 600e6, "peak_cuda_bytes": None}])
    '600 MB a rank'
    """
    text = f"{_range([peak['peak_rss_bytes'] for peak in peaks])} a rank"
    on_gpus = [peak["peak_cuda_bytes"] for peak in peaks if peak["peak_cuda_bytes"] is not None]
    return f"{text}, {_range(on_gpus)} of the GPU" if on_gpus else text


def _range(sizes: list[int]) -> str:
    low, high = f"{min(sizes) / 1e6:,.0f}", f"{max(sizes) / 1e6:,.0f}"
    return f"{low} MB" if low == high else f"{low} to {high} MB"

"""The options of a benchmark, for the command and for ranks that another launcher started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

OPTIONS = {
    "min_bytes": ("SIZE", "Smallest size: 8, 1K, 1M.  [default: 1K]"),
    "max_bytes": ("SIZE", "Largest size.  [default: 16M]"),
    "factor": ("N", "Each size is so many times the one before.  [default: 4]"),
    "iterations": ("N", "Timed operations of each size; of a loader, batches.  [default: 20; 100]"),
    "warmup": ("N", "Operations, or batches, before those.  [default: 5]"),
    "backend": ("NAME", "gloo or nccl.  [default: nccl with GPUs]"),
    "dtype": (
        "NAME",
        "float32, float16, bfloat16, float64, int32, int64, int8 or uint8.  [default: float32]",
    ),
    "workers": ("N,N,..", "Of a loader: numbers of worker processes to try.  [default: 0,1,2,4]"),
}


def bench_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options above and --json to a click command."""
    for key, (metavar, text) in reversed(OPTIONS.items()):
        option = click.option(
            "--" + key.replace("_", "-"), envvar=f"PHALANX_BENCH_{key.upper()}", metavar=metavar, help=text
        )
        function = option(function)
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        envvar="PHALANX_BENCH_JSON",
        help="Print one JSON object and nothing else.",
    )(function)

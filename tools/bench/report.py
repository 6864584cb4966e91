"""Results for people, line by line as they come. No torch needed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.tools.bench.bandwidth import CONVENTIONS

SCHEMA = 1
NONE = "n/a"


def head_lines(about: Mapping[str, Any]) -> list[str]:
    """What is measured, and what its numbers mean."""
    ranks, nodes = about["world_size"], about["nodes"]
    where = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    lines = [f"{about['benchmark']}, {where}, {about['backend']} on {about['device']}, {about['dtype']}"]
    convention = CONVENTIONS.get(about["benchmark"])
    if convention is None:
        return [*lines, "us: from the start until the last rank has its result", "", _LATENCY_HEAD]
    factor = convention.factor
    bus = (
        "n/a with one rank"
        if ranks == 1
        else f"ALGBW x {factor} = {convention.bus_factor(ranks):.3g} x ALGBW"
    )
    lines.append(
        f"SIZE: {convention.size}; ALGBW: size / time; BUSBW: {bus} (as nccl-tests; 1 GB = 10^9 bytes)"
    )
    return [*lines, "", _SIZES_HEAD]


_SIZES_HEAD = (
    f"{'SIZE':>12}  {'TIME us':>11}  {'ALGBW GB/s':>10}  {'BUSBW GB/s':>10}  {'CORRECT':7}  SLOWEST RANK"
)
_LATENCY_HEAD = (
    f"{'OPERATION':12}  {'BYTES':>6}  {'MIN us':>9}  {'MEDIAN us':>9}  {'P99 us':>9}  {'MAX us':>9}  CORRECT"
)


def result_line(result: Mapping[str, Any]) -> str:
    """One size, or one small message."""
    if "operation" in result:
        times = "  ".join(f"{result[name]:9.1f}" for name in ("min_us", "median_us", "p99_us", "max_us"))
        return f"{result['operation']:12}  {result['size_bytes']:6}  {times}  {_verdict(result)}"
    bus = result["busbw_gb_s"]
    bus_text = NONE if bus is None else _speed(bus)
    slowest = f"{result['slowest_rank']} ({result['slowest_us']:.1f} us)"
    return (
        f"{result['size_bytes']:12}  {result['time_us']:11.1f}  {_speed(result['algbw_gb_s']):>10}  {bus_text:>10}  "
        f"{_verdict(result):7}  {slowest}"
    )


def _speed(gb_s: float) -> str:
    """Three digits that count, also of the small ones.

    >>> _speed(0.000353), _speed(12.345)
    ('0.000353', '12.345')
    """
    return f"{gb_s:.3f}" if gb_s >= 0.1 else f"{gb_s:.3g}"


def _verdict(result: Mapping[str, Any]) -> str:
    if result["correct"]:
        return "yes"
    return f"NO: wrong on rank {', '.join(map(str, result['wrong_ranks']))}"


def foot_lines(report: Mapping[str, Any]) -> list[str]:
    """Who is slow, in words."""
    hosts, rank, pair = report["hosts"], report["slowest_rank"], report["slowest_pair"]
    if pair is None:
        return []
    verdict = "" if rank["stands_out"] else ", nobody stands out"
    lines = [
        "",
        f"slowest rank: {rank['rank']} on {hosts[rank['rank']]} (work of its own takes {rank['times_median']:.2f} x the "
        f"median{verdict})",
    ]
    first, second = pair["ranks"]
    places = hosts[first] if hosts[first] == hosts[second] else f"{hosts[first]} and {hosts[second]}"
    verdict = "" if pair["stands_out"] else ", none stands out"
    lines.append(
        f"slowest pair: {first} and {second} on {places} ({pair['gb_s']:.3f} GB/s, median of {pair['pairs']} "
        f"pair{'s' * (pair['pairs'] > 1)} {pair['median_gb_s']:.3f} GB/s{verdict})"
    )
    return lines


def loader_lines(report: Mapping[str, Any]) -> list[str]:
    """A table of worker counts, and where the time goes."""
    lines = [f"loader {report['target']}: {report['loader']}, {report['device']}", ""]
    lines.append(
        f"{'WORKERS':>7}  {'SAMPLES/S':>10}  {'BATCHES/S':>10}  {'FIRST BATCH s':>13}  {'MEDIAN ms':>9}  {'P99 ms':>9}"
    )
    for result in report["results"]:
        workers = "as is" if result["workers"] is None else str(result["workers"])
        samples = NONE if result["samples_per_s"] is None else f"{result['samples_per_s']:.1f}"
        lines.append(
            f"{workers:>7}  {samples:>10}  {result['batches_per_s']:10.2f}  {result['first_batch_s']:13.3f}  "
            f"{result['median_ms']:9.2f}  {result['p99_ms']:9.2f}"
        )
    shares = report["where"]
    if shares:
        listed = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares.items())
        lines += ["", f"where the time of a batch goes without workers: {listed}"]
    return [*lines, *([f"best: {report['advice']}"] if report["advice"] else [])]


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Leave the report for whoever started the ranks; whole or not at all."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)

"""Facts of this machine: every probe in a process of its own, all at once, and what they said put together."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.facts_json import from_json
from phalanx.tools.doctor.probes import (
    compilers,
    disks,
    driver,
    environment,
    kernel_log,
    limits,
    network,
    nvml,
    packages,
    system,
    torch_import,
)
from phalanx.tools.doctor.probes.isolation import Child, Partial, collect, start_function, stop
from phalanx.tools.doctor.probes.scene import Scene

Probe = Callable[[Scene], "Partial | None"]

#: By name, in the order in which a later one's answers win over an earlier one's.
PROBES: Mapping[str, Probe] = {
    "NVML": nvml.probe,
    "CUDA driver": driver.probe_cuda,
    "driver files": driver.probe,
    "names": network.probe_names,
    "network": network.probe,
    "kernel log": kernel_log.probe,
    "compilers": compilers.probe,
    "packages": packages.probe,
    "limits": limits.probe,
    "system": system.probe,
    "environment": environment.probe,
}
_AFTER_PROBES_S = 0.4  # for the checks and the text
NOT_ON_NODES = frozenset(
    {"compilers", "packages"}
)  # a prolog asks about the node, not about somebody's Python


def gather(
    scene: Scene,
    *,
    timeout_s: float,
    torch: bool = True,
    skip: frozenset[str] = frozenset(),
    probes: Mapping[str, Probe] = PROBES,
    waiting: Callable[[list[str]], None] | None = None,
) -> Facts:
    """Ask this machine. This process must have no threads yet: the probes are forked from it.

    A probe that fails, crashes or is over its time is named in ``Facts.probes``; nothing that a probe does ends
    this call, and it returns in ``timeout_s`` even when one of them sleeps in the kernel for ever.

    Args:
        scene: What to look at.
        timeout_s: For the slowest probe.
        torch: Whether to import torch (in a process of its own).
        skip: Names of probes that are not asked.
        probes: The probes, for tests.
        waiting: Called now and then with the names of the probes that still run.
    """
    children: list[Child] = []
    starts = [
        (name, partial(start_function, name, probe, timeout_s))
        for name, probe in _all(scene, probes, of_a_job=torch)
    ]
    if torch:  # first: it takes the longest
        starts.insert(0, ("torch", partial(torch_import.start, scene, timeout_s)))
    refused = []
    try:
        for name, start in starts:
            if name in skip:
                continue
            try:
                children.append(start())
            except OSError as error:  # no more processes or descriptors for this user
                refused.append({"name": name, "error": f"could not be started: {error.strerror}"})
        collect(children, waiting)
    finally:
        stop(children)
    return _together(scene, children, refused)


def gather_node(scene: Scene, *, timeout_s: float, probes: Mapping[str, Probe] = PROBES) -> Facts:
    """For a cluster's prolog: without torch and somebody's Python, all of it within ``timeout_s`` of the start.

    The start is that of this process: the time that Python took counts.
    """
    left = timeout_s - age_of_this_process_s() - _AFTER_PROBES_S
    # The node is asked about, not the job that the prolog runs for: how many nodes it has, which port is free.
    environ = {name: value for name, value in scene.environ.items() if not name.startswith("SLURM_")}
    scene = dataclasses.replace(scene, environ=environ, port=0 if scene.port is None else scene.port)
    return gather(scene, timeout_s=max(left, 0.1), torch=False, skip=NOT_ON_NODES, probes=probes)


def age_of_this_process_s() -> float:
    """Seconds since this process was started, 0 where /proc does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return 0.0


def _all(
    scene: Scene, probes: Mapping[str, Probe], *, of_a_job: bool
) -> Iterator[tuple[str, Callable[[], Partial | None]]]:
    for name, probe in probes.items():
        yield name, partial(probe, scene)
    if "limits" in probes:  # not in a test of single probes
        for purpose, path in disks.places(
            scene, of_a_job=of_a_job
        ).items():  # one each: a dead file server hangs its own alone
            yield f"disk {path}", partial(disks.probe, scene, purpose, path)


def _together(scene: Scene, children: list[Child], refused: list[dict[str, str]]) -> Facts:
    found: Partial = {"live": True, "job": _job(scene)}
    problems = list(refused)
    for child in children:
        if child.name == "torch":
            _merge(found, torch_import.answer(child))
            continue
        for part in child.answers():
            _merge(found, part)
        problem = _problem(child)
        if problem:
            problems.append({"name": child.name, "error": problem})
    found["probes"] = problems
    return dataclasses.replace(from_json(found), live=True)


def _job(scene: Scene) -> dict[str, Any]:
    given = {
        "nnodes": scene.nnodes,
        "local_world_size": scene.local_world_size,
        "loader_workers": scene.loader_workers,
    }
    return {name: value for name, value in given.items() if value is not None}


def _problem(child: Child) -> str | None:
    """Why a probe has no whole answer."""
    if child.timed_out:
        return "no answer in time: it hangs, and was given up"
    if child.signal:
        return f"ended by {child.signal}"
    if child.exit_code:
        lines = child.error_text().splitlines()
        return lines[-1][:500] if lines else f"ended with exit code {child.exit_code}"
    return None


def _merge(found: Partial, part: Partial) -> None:
    """Sections are filled up, lists grow; a later answer wins."""
    for name, value in part.items():
        if isinstance(value, dict):
            section = found.setdefault(name, {})
            section.update({key: item for key, item in value.items() if item is not None})
        elif isinstance(value, list) and isinstance(found.get(name), list):
            found[name] = [*found[name], *value]
        else:
            found[name] = value

"""The machine in a few lines, above the findings."""

from __future__ import annotations

from collections import Counter

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.reading import driver_cuda


def facts_summary(facts: Facts) -> list[str]:
    """At most six lines: torch, Python and system, driver, GPUs, container."""
    lines = (_torch(facts), _system(facts), _driver(facts), _gpus(facts), _container(facts))
    return [line for line in lines if line]


def _torch(facts: Facts) -> str:
    torch = facts.torch
    if torch is None or (torch.version is None and torch.installed is None):
        return ""
    if torch.version is None:
        return "torch: not installed" if torch.installed is False else "torch: does not import"
    build = (
        f"CUDA {torch.cuda}"
        if torch.cuda
        else f"ROCm {torch.hip}"
        if torch.hip
        else "CPU build"
        if torch.cuda == ""
        else ""
    )
    seen = {True: "CUDA available", False: "CUDA not available", None: ""}[torch.cuda_available]
    parts = [f"torch {torch.version}", build, seen]
    for name, companion in (("torchvision", facts.torchvision), ("torchaudio", facts.torchaudio)):
        if companion and companion.version:
            parts.append(f"{name} {companion.version}")
    return ", ".join(part for part in parts if part)


def _system(facts: Facts) -> str:
    python, platform = facts.python, facts.platform
    parts = [
        f"Python {python.version}" if python and python.version else "",
        (platform and (platform.os or platform.system)) or "",
        f"kernel {platform.kernel}" if platform and platform.kernel else "",
    ]
    return ", ".join(part for part in parts if part)


def _driver(facts: Facts) -> str:
    driver = facts.driver
    if driver is None or not (driver.version or driver.cuda):
        return ""
    newest = driver_cuda(facts)
    name = f"driver {driver.version}" if driver.version else "driver"
    return f"{name} (CUDA up to {newest})" if newest else name


def _gpus(facts: Facts) -> str:
    if facts.gpus is None:
        return ""
    names = Counter(gpu.name or gpu.gfx or "unknown GPU" for gpu in facts.gpus)
    return (
        "no GPU"
        if not names
        else "GPUs: " + ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
    )


def _container(facts: Facts) -> str:
    box = facts.container
    return f"in a container ({box.kind}{f', {box.image}' if box.image else ''})" if box and box.kind else ""

"""What each GPU can do, and whether the installed torch has code for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.tools.gpus.abilities import Capability, TorchBuild
from phalanx.tools.gpus.readings import GpuReading, NodeReading
from phalanx.tools.gpus.text_table import Cell, Column, table_lines

TIMEOUT_S = 60.0  # torch's first import from a network file system

#: torch is asked in a process of its own: it takes seconds, and a broken one may crash.
_CODE = """
import json, os, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
try:
    import torch
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    version = torch.version
    found = {"version": str(torch.__version__), "cuda": version.cuda, "hip": getattr(version, "hip", None),
             "architectures": flags.split() if flags else [], "error": ""}
except BaseException as error:
    found = {"error": f"{type(error).__name__}: {error}", "missing": isinstance(error, ModuleNotFoundError)}
print(json.dumps(found), file=answer, flush=True)
os._exit(0)
"""


def line_of(torch: TorchBuild) -> str:
    """A torch in one line."""
    if torch.error:
        return f"torch: {torch.error}"
    kind = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "for CPUs alone"
    code = f", code for {', '.join(torch.architectures)}" if torch.architectures else ""
    return f"torch {torch.version}, {kind}{code}"


def with_capabilities(node: NodeReading) -> NodeReading:
    """The node, what its GPUs can do, and the torch that a script started from here would import."""
    torch = ask_torch()
    ordinals: dict[str, int] = {}
    if len({gpu.name for gpu in node.gpus}) > 1 and not any(gpu.problem for gpu in node.gpus):
        from phalanx.tools.gpus.cuda_driver import cuda_devices

        ordinals = {f"GPU-{device['uuid']}": number for number, device in enumerate(cuda_devices())}
    found = tuple(capability(gpu, torch, ordinals.get(gpu.uuid or "")) for gpu in node.gpus)
    notes = (*node.notes, *_driver_note(node, torch))
    return replace(node, torch=torch, capabilities=found, notes=notes)


def _driver_note(node: NodeReading, torch: TorchBuild) -> list[str]:
    from phalanx.tools.facts.tables import driver_for_cuda, driver_runs_cuda

    if not node.gpus or not torch.cuda:
        return []
    if driver_runs_cuda(node.driver_version, node.cuda_driver_version, torch.cuda) is not False:
        return []
    need = driver_for_cuda(torch.cuda)
    lowest = f" ({need.version} or newer)" if need else ""
    return [
        f"driver {node.driver_version} is too old for this torch's CUDA {torch.cuda}{lowest}: whatever code torch has, "
        "it will find no GPU. `phalanx doctor` says what to install."
    ]


def ask_torch(python: str = sys.executable) -> TorchBuild:
    """The torch of a Python, and what it was built for."""
    try:
        done = subprocess.run(
            [python, "-c", _CODE],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=dict(os.environ),
        )
    except subprocess.TimeoutExpired:
        return TorchBuild(error=f"its import did not end within {TIMEOUT_S:.0f} s")
    except OSError as error:
        return TorchBuild(error=f"{python} cannot be started: {error.strerror}")
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return TorchBuild(error=f"its import crashed (exit code {done.returncode}): {last}")
    if found["error"]:
        words = "not installed" if found.get("missing") and "'torch'" in found["error"] else found["error"]
        return TorchBuild(error=f"{words} (asked {python})")
    return TorchBuild(
        version=found["version"],
        cuda=found["cuda"],
        hip=found["hip"],
        architectures=tuple(found["architectures"]),
    )


def capability(gpu: GpuReading, torch: TorchBuild, ordinal: int | None = None) -> Capability:
    """What a GPU can do, with this torch."""
    from phalanx.tools.facts.tables import capability_facts, capability_of_gpu

    number, source = gpu.compute_capability, "nvml"
    if number is None and gpu.name:
        number, source = capability_of_gpu(gpu.name), "name"
    facts = capability_facts(number) if number else None
    code, runs, advice = _with_torch(number, torch)
    return Capability(
        index=gpu.index,
        cuda_ordinal=gpu.cuda_ordinal if ordinal is None else ordinal,
        name=gpu.name,
        compute_capability=number,
        source=source if number else None,
        architecture=facts["architecture"] if facts else None,
        features=features_of(number),
        torch_code=code,
        torch_runs=False if gpu.problem else runs,
        advice=gpu.problem or advice,
    )


def features_of(number: str | None) -> tuple[str, ...]:
    """What training asks of a GPU: fp16, bf16, tf32, fp8, fp4 in its tensor cores."""
    from phalanx.tools.facts.versions import version_of

    if not number:
        return ()
    have = version_of(number)
    wanted = {"fp16": (7, 0), "int8": (7, 5), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}
    return tuple(name for name, lowest in wanted.items() if have >= lowest)


def _with_torch(number: str | None, torch: TorchBuild) -> tuple[str | None, bool | None, str]:
    """The code for it, whether it runs, and what to do when it does not."""
    from phalanx.tools.facts.tables import architectures_of_build, code_for

    if torch.error or number is None:
        return None, None, ""
    if not torch.cuda:
        what = "this torch is built for ROCm" if torch.hip else "this torch is built for CPUs alone"
        return None, False, f"{what}: install a CUDA build"
    architectures: Sequence[str] = torch.architectures
    if not architectures:
        build = architectures_of_build(torch.version or "", torch.cuda)
        if build is None:
            return None, None, ""
        architectures = build.architectures
    code = code_for(architectures, number)
    if code is not None:
        return code, True, "compiled from PTX at first use, slow once" if code.startswith("compute_") else ""
    return None, False, _advice(number, architectures)


def _advice(number: str, architectures: Sequence[str]) -> str:
    from phalanx.tools.facts.tables import parse_architecture
    from phalanx.tools.facts.versions import version_of

    known = [parsed[1] for entry in architectures if (parsed := parse_architecture(entry))]
    if known and version_of(number) < min(known):
        return f"too old for this torch (lowest {'.'.join(map(str, min(known)))}): an older torch, or one built for it"
    return "no code for it in this torch: install a newer one, or one built for a newer CUDA"


# ------------------------------------------------------------------------------------------------------ output

_COLUMNS = (
    Column(title="GPU"),
    Column(title="CUDA", right=True, spare=2),
    Column(title="NAME", spare=1),
    Column(title="COMPUTE"),
    Column(title="ARCHITECTURE", spare=3),
    Column(title="CAN DO", spare=4),
    Column(title="THIS TORCH"),
)


def capability_lines(
    found: Sequence[Capability], torch: TorchBuild, *, width: int | None, colour: bool
) -> list[str]:
    """A table of what the GPUs can do, under a line about torch."""
    rows = [
        [
            Cell(str(one.index)),
            Cell("n/a" if one.cuda_ordinal is None else str(one.cuda_ordinal)),
            Cell((one.name or "n/a").removeprefix("NVIDIA ")),
            Cell(one.compute_capability or "n/a"),
            Cell(one.architecture or "n/a"),
            Cell(" ".join(one.features) or "n/a"),
            _verdict(one),
        ]
        for one in found
    ]
    return [line_of(torch), "", *table_lines(_COLUMNS, rows, width=width, colour=colour)]


def _verdict(one: Capability) -> Cell:
    if one.torch_runs is None:
        return Cell("n/a")
    if not one.torch_runs:
        return Cell(f"no: {one.advice}", "bad")
    return Cell(f"yes, {one.torch_code}" + (f" ({one.advice})" if one.advice else ""), "good")

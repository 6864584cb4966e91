"""What GPUs can do, how they are connected, and the torch beside them: read only where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The torch that a script started from here would import. ``error`` says why there is none."""

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What one GPU can do.

    Args:
        index: nvidia-smi's number.
        cuda_ordinal: CUDA's number here, asked of CUDA itself where nvidia-smi's order does not tell it.
        name: Its product name.
        compute_capability: ``9.0``, None where it is not known.
        source: Where that is from: ``nvml``, or ``name`` for the table of products.
        architecture: Hopper, ...
        features: ``bf16``, ``fp8``, ...
        torch_code: The part of this torch that runs on it, ``sm_90``; None: there is none.
        torch_runs: Whether this torch can use it; None where that is not known.
        advice: What to do when it cannot.
    """

    index: int
    cuda_ordinal: int | None = None
    name: str | None = None
    compute_capability: str | None = None
    source: str | None = None
    architecture: str | None = None
    features: tuple[str, ...] = ()
    torch_code: str | None = None
    torch_runs: bool | None = None
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How each pair of GPUs is connected.

    ``links[i][j]`` is "NV4", "PIX", ..., "X" for itself, None where NVML does not say; ``peers[i][j]`` whether the
    two reach each other's memory (None: not told).
    """

    links: tuple[tuple[str | None, ...], ...]
    peers: tuple[tuple[bool | None, ...], ...]
    cpus: tuple[str | None, ...]
    numa_nodes: tuple[int | None, ...]

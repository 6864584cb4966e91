"""This node's GPUs as the launcher needs them: number, UUID, and who uses each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeGpu:
    """One GPU: nvidia-smi's number, its UUID and name, and who uses it, in words."""

    index: int
    uuid: str
    name: str = ""
    users: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"GPU {self.index} ({self.name + ', ' if self.name else ''}{self.uuid})"


def node_gpus(environ: Mapping[str, str]) -> tuple[list[NodeGpu], list[NodeGpu], list[str]]:
    """All GPUs, the visible ones in CUDA's order, and oddities of CUDA_VISIBLE_DEVICES in words."""
    return [], [], []

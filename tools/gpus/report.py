"""Readings as one JSON object, and back: what one node prints, another puts into its table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.tools.gpus.abilities import Capability, Topology, TorchBuild
from phalanx.tools.gpus.readings import (
    DeviceReading,
    GpuReading,
    Holder,
    HostReading,
    NodeReading,
    ProcessReading,
    plain,
)

SCHEMA = 1


def report(nodes: Sequence[NodeReading]) -> dict[str, Any]:
    """``driver_version`` and ``gpus`` of all nodes; each GPU names its host.

    With several nodes ``driver_version`` is null where they differ, and ``hosts`` has each one's own.
    """
    hosts = [
        {name: value for name, value in plain(node).items() if name != "gpus" and not _not_asked(name, value)}
        for node in nodes
    ]
    gpus = [{"host": node.host, **plain(gpu)} for node in nodes for gpu in node.gpus]
    return {
        "schema": SCHEMA,
        "driver_version": _common([node.driver_version for node in nodes]),
        "cuda_driver_version": _common([node.cuda_driver_version for node in nodes]),
        "gpus": gpus,
        "hosts": hosts,
    }


def _not_asked(name: str, value: Any) -> bool:
    return value is None and name in ("torch", "capabilities", "topology")


def _common(values: Sequence[str | None]) -> str | None:
    return values[0] if values and len(set(values)) == 1 else None


def node_of(text: str, host: str) -> NodeReading:
    """The node whose `phalanx gpus --json` printed ``text``, under the name that it was asked by.

    Raises:
        ValueError: That is something else; the message has its beginning.
    """
    try:
        content = json.loads(text[text.index("{") :])  # a login script may have greeted
        own = content["hosts"][0]
        gpus = tuple(_gpu(gpu) for gpu in content["gpus"])
        fields = {name: own[name] for name in ("driver_version", "cuda_driver_version", "no_gpus", "error")}
        return NodeReading(
            host=host,
            gpus=gpus,
            notes=tuple(own["notes"]),
            computer=_made(HostReading, own["computer"]),
            **fields,
            **_extras(own),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        first = next(iter(text.strip().splitlines()), "nothing")
        raise ValueError(f"its answer cannot be read: {first[:80]!r}") from None


def _extras(own: Mapping[str, Any]) -> dict[str, Any]:
    capabilities = own.get("capabilities")
    return {
        "torch": _made(TorchBuild, own["torch"]) if "torch" in own else None,
        "capabilities": None
        if capabilities is None
        else tuple(_made(Capability, one) for one in capabilities),
        "topology": _made(Topology, own["topology"]) if "topology" in own else None,
    }


def _gpu(content: Mapping[str, Any]) -> GpuReading:
    instances = tuple(_made(DeviceReading, one, **_inner(one)) for one in content["mig_instances"])
    gpu: GpuReading = _made(GpuReading, content, mig_instances=instances, **_inner(content))
    return gpu


def _inner(content: Mapping[str, Any]) -> dict[str, Any]:
    holder, listed = content["held_by"], content["processes"]
    return {
        "held_by": None if holder is None else _made(Holder, holder),
        "processes": None if listed is None else tuple(_made(ProcessReading, one) for one in listed),
    }


def _made(kind: Any, content: Mapping[str, Any], **instead: Any) -> Any:
    """A reading of that kind; what a newer phalanx says besides is left out."""
    known = {name: value for name, value in content.items() if name in kind.__dataclass_fields__}
    return kind(**{**known, **instead})

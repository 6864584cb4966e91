"""Where the nodes of a job meet, from the options that torchrun has for it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.launch import values as checked
from phalanx.launch.values import Values
from phalanx.tools.usage import UsageMistake

_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_DEFAULT_PORT = 29500  # torchrun's


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The rendezvous of a job; `standalone` when the nodes need none, since there is one node and no wish."""

    nnodes_min: int = 1
    nnodes_max: int = 1
    node_rank: int | None = None
    backend: str = "c10d"
    endpoint: str = ""
    job_id: str = "none"
    conf: Mapping[str, str]
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    standalone: bool = True
    notes: tuple[str, ...] = ()


def meeting(values: Values) -> Meeting:
    """Read and check ``--nnodes``, ``--node-rank``, ``--master-*``, ``--rdzv-*``, ``--standalone``.

    Raises:
        UsageMistake: A value is out of range, or the options leave no place to meet.
    """
    low, high = checked.nnodes(values)
    node_rank = checked.whole_number(values, "node_rank", low=0)
    port = checked.whole_number(values, "master_port", low=1, high=65535)
    address = checked.text(values, "master_addr") or None
    endpoint = checked.endpoint(values)
    backend = _backend(values)
    if node_rank is not None and node_rank >= high:
        raise UsageMistake(
            f"{values['node_rank']}: with {high} node{'s' * (high > 1)} the node ranks are 0 to {high - 1}.",
            fix=f"--nnodes {node_rank + 1}, or a smaller node rank",
        )
    if "standalone" in values and high > 1:
        raise UsageMistake(
            f"--standalone with {values['nnodes']}: a standalone job has one node, and would wait for others for ever.",
            fix="leave out --standalone, and give --rdzv-endpoint HOST:PORT",
        )
    common = Meeting(
        nnodes_min=low,
        nnodes_max=high,
        node_rank=node_rank,
        job_id=checked.text(values, "rdzv_id", "none"),
        conf=checked.pairs(values, "rdzv_conf"),
        master_addr=address,
        master_port=port,
        local_addr=checked.text(values, "local_addr") or None,
    )
    if "standalone" in values or (
        high == 1 and not endpoint and port is None and backend in (None, "static", "c10d")
    ):
        return common
    return _with_place(common, backend, endpoint, values)


def _with_place(common: Meeting, backend: str | None, endpoint: str, values: Values) -> Meeting:
    several = common.nnodes_max > 1
    if several and not endpoint and common.master_addr is None:
        raise UsageMistake(
            f"{values['nnodes']}: the nodes do not know where to meet; each would wait for the others.",
            fix="on every node, the same --rdzv-endpoint HOST:PORT, or --master-addr HOST and its own --node-rank",
        )
    if backend is None:
        backend = "static" if not endpoint or common.node_rank is not None else "c10d"
    if backend != "static" and not endpoint:
        endpoint = f"{common.master_addr or 'localhost'}:{common.master_port or _DEFAULT_PORT}"
    notes: tuple[str, ...] = ()
    node_rank = common.node_rank
    if backend == "static" and node_rank is None:
        node_rank = 0
        if several:
            notes = ("no --node-rank given: this is node 0.",)
    address, port = common.master_addr, common.master_port
    if backend == "static":
        if endpoint:
            host, _, end = endpoint.rpartition(":")
            address, port = (host, int(end)) if host else (endpoint, port)
        address, port = address or "127.0.0.1", port or _DEFAULT_PORT
        if not several:
            _check_free(port, "--rdzv-endpoint" if endpoint else str(values["master_port"]))
    return replace(
        common,
        node_rank=node_rank,
        backend=backend,
        endpoint=endpoint,
        master_addr=address,
        master_port=port,
        standalone=False,
        notes=notes,
    )


def _backend(values: Values) -> str | None:
    given = values.get("rdzv_backend")
    if given is None:
        return None
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    plugins = tuple(point.name for point in entry_points(group="torchrun.handlers"))
    return checked.choice(values, "rdzv_backend", _BACKENDS + plugins)


def _check_free(port: int, asked: str) -> None:
    """One node hosts its own store: a port that somebody listens on cannot be it."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()  # with SO_REUSEADDR a bind alone succeeds beside another socket that is only bound
        except OSError as error:
            raise UsageMistake(
                f"{asked}: port {port} cannot be used on this node ({error.strerror}); the ranks could not meet there.",
                fix="leave the port out, and a free one is taken",
            ) from None

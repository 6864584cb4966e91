"""Where nodes meet, and a store of its own for every attempt.

torch's elastic agent gives restarted workers the store of the attempt before, in which gloo finds
the addresses of dead peers. The handlers here make a new store, on a new server, whenever the agent
asks for the next rendezvous. On one node there is nobody to wait for; with several, torch's own
handler brings the nodes together and the new store's address is passed through its store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import metadata
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from phalanx.launch.board import Board, BoardError, listen
from phalanx.launch.node_failures import different_versions
from phalanx.launch.spec import RunSpec

#: How long the nodes that have met may take to reach node 0's board.
_BOARD_LIMIT_S = 20.0
_STORE_TIMEOUT_S = 300
_NAME_LIMIT_S = 300.0
_LEAVE_LIMIT_S = 2.0


def _make_server(address: str, port: int) -> TCPStore:
    timeout = timedelta(seconds=_STORE_TIMEOUT_S)
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class LocalRendezvous(RendezvousHandler):
    """One node: a rendezvous that is complete at once.

    With one rank the store is left to that rank, as a plain process would have it: a script that
    spawns its own workers and chooses MASTER_PORT for them then runs unchanged.
    """

    def __init__(self, run_id: str, address: str, port: int | None, *, ranks: int) -> None:
        self._run_id = run_id
        self._address = address
        self._port = port
        self._hosts_store = ranks > 1
        self._server: TCPStore | None = None

    def get_backend(self) -> str:
        return "local"

    @property
    def use_agent_store(self) -> bool:
        return self._hosts_store

    def next_rendezvous(self) -> RendezvousInfo:
        self._server = None  # gives the port back, should it be a fixed one
        self._server = _make_server("127.0.0.1", (self._port or 0) if self._hosts_store else 0)
        port = self._server.port if self._hosts_store else self._port or _free_port()
        return RendezvousInfo(self._server, 0, 1, RendezvousStoreInfo(self._address, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._server = None
        return True


class FreshStoreRendezvous(RendezvousHandler):
    """Several nodes: another handler's rendezvous, with a new store for the ranks each time."""

    def __init__(
        self, inner: RendezvousHandler, local_address: str, about: Mapping[str, Any] | None = None
    ) -> None:
        self.board = Board()
        self._about = dict(about or {})
        self._inner = inner
        self.local_address = local_address
        self._round = 0
        self._server: TCPStore | None = None

    def get_backend(self) -> str:
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._server = None
        # With the store shared between rounds, torch's handler leaves a node that joins later waiting for an address
        # that nobody writes into its round. The ranks were forked off before: they do not see this.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        info = self._inner.next_rendezvous()
        # A dynamic rendezvous has a new key space per round; the static one has the same for ever,
        # and all its nodes restart together.
        self._round += 1
        number = self._round if self._inner.get_backend() == "static" else 0
        key = f"phalanx/rank-store/{number}"
        listener = None
        if info.rank == 0:
            self._server, listener = _make_server(self.local_address, 0), listen()
            board_port, token = listener.getsockname()[1], secrets.token_hex(8)
            info.store.set(key, f"{self.local_address} {self._server.port} {board_port} {token}")
        address, port, board_port, token = info.store.get(key).decode().split()
        self.board = Board(info.rank, info.world_size, about=self._about, token=token)
        if listener is not None:
            self.board.serve(listener)
        else:
            self.board.connect(address, int(board_port))
        self._check_all_there()
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(address, int(port)))

    def _check_all_there(self) -> None:
        missing = self.board.wait_for_all(_BOARD_LIMIT_S)
        about = self.board.about()
        if missing:
            names = ", ".join(f"node {node}" for node in missing)
            raise BoardError(
                f"{names} came to the rendezvous, but did not reach node 0 ({about.get(0, {}).get('host', '?')}) "
                f"within {_BOARD_LIMIT_S:.0f} s after it.\n"
                f"Fix: see what {names} printed; the nodes of a job have to reach each other on all ports."
            )
        problem = different_versions(about)
        if problem is not None:
            raise BoardError(problem)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        self._server = None
        return self._inner.shutdown()


def reachable_address(endpoint: str) -> str:
    """This node's address on the route to ``endpoint`` ("host:port"), which its peers can reach too."""
    host, _, port = endpoint.rpartition(":")
    host = (host or endpoint).strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port or 1), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()


def wait_for_name(endpoint: str, limit_s: float = _NAME_LIMIT_S) -> None:
    """Return when the host of ``endpoint`` has an address: a pod's name comes some time after the pod.

    Raises:
        BoardError: It has none within ``limit_s``.
    """
    host, _, _ = endpoint.rpartition(":")
    host = (host or endpoint).strip("[]")
    deadline, said = time.monotonic() + limit_s, False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() >= deadline:
            raise BoardError(
                f"the name {host}, where the nodes are to meet, is not known on {socket.gethostname()} ({reason}), "
                f"and was not within {limit_s:.0f} s.\nFix: check --master-addr or --rdzv-endpoint, or give an address"
            )
        if not said:
            said = True
            line = f"phalanx run: the name {host} is not known here yet ({reason}); waiting up to {limit_s:.0f} s."
            print(line, file=sys.stderr, flush=True)
        time.sleep(1.0)


def make_rendezvous(spec: RunSpec) -> RendezvousHandler:
    """The handler for a run: local on one node, torch's own for several."""
    if spec.nnodes_max == 1:
        address = spec.master_addr or "127.0.0.1"
        return LocalRendezvous(spec.rdzv_id, address, spec.master_port, ranks=spec.nproc_per_node)
    endpoint = spec.rdzv_endpoint
    if spec.rdzv_backend == "static" and not endpoint:
        endpoint = f"{spec.master_addr}:{spec.master_port}"
    conf: dict[str, Any] = dict(spec.rdzv_conf)
    if spec.rdzv_backend == "static":
        conf["rank"] = spec.node_rank
    elif spec.rdzv_backend == "c10d":
        _set_patience(conf, spec)
        if spec.node_rank is not None:
            conf.setdefault("is_host", spec.node_rank == 0)
    if spec.rdzv_backend in ("static", "c10d"):
        wait_for_name(endpoint)
    local_address = spec.local_addr or reachable_address(endpoint)
    parameters = RendezvousParameters(
        backend=spec.rdzv_backend,
        endpoint=endpoint,
        run_id=spec.rdzv_id,
        min_nodes=spec.nnodes_min,
        max_nodes=spec.nnodes_max,
        local_addr=local_address,
        **conf,
    )
    return FreshStoreRendezvous(get_rendezvous_handler(parameters), local_address, _about_this_node(spec))


def _set_patience(conf: dict[str, Any], spec: RunSpec) -> None:
    """How long the dynamic rendezvous waits for more nodes than it needs, and for signs of life.

    torch's 30 s of last call are waited out by every start and restart of an elastic job that is not full.
    """
    conf.setdefault("last_call_timeout", 3)
    conf.setdefault("keep_alive_interval", 2)
    if spec.nnodes_min == spec.nnodes_max and spec.max_restarts == 0:
        # It compares the nodes' wall clocks: with clocks 10 s apart each would take the others for dead.
        conf.setdefault("keep_alive_max_attempt", 24 * 3600)
    conf.setdefault("keep_alive_max_attempt", 5)


def _about_this_node(spec: RunSpec) -> dict[str, Any]:
    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "?"

    return {
        "host": socket.gethostname(),
        "ranks": spec.nproc_per_node,
        "torch": version("torch"),
        "phalanx": version("phalanx"),
    }


def shut_down(handler: RendezvousHandler) -> None:
    """Take leave of the rendezvous; where its host is gone or out of reach, without waiting for it."""
    if isinstance(handler, LocalRendezvous):
        handler.shutdown()
        return

    def leave() -> None:
        with contextlib.suppress(Exception):
            handler.shutdown()

    thread = threading.Thread(target=leave, name="phalanx-leave", daemon=True)
    thread.start()
    thread.join(_LEAVE_LIMIT_S)


def quiet_torch() -> None:
    """Silence the elastic agent's own log lines, unless the user asked for a level by LOGLEVEL."""
    if "LOGLEVEL" not in os.environ:
        for name in (
            "torch.distributed.elastic",
            "torch.distributed.elastic.rendezvous",
            "torch.distributed",
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)

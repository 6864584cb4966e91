"""What the agents of one job tell one another: posts by kind, signs of life, and the distance of their clocks.

Node 0 listens, the others connect to it; what one posts reaches all. The connections are served by a thread, so
that a peer that does not answer never holds up a caller. A new board is made for every attempt.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: A peer says something this often.
_BEAT_S = 0.5
#: How long a connection to node 0 may take before its port is called unreachable.
CONNECT_LIMIT_S = 10.0
#: How long the posts of the last moment may take on their way out.
_FLUSH_LIMIT_S = 2.0

How = Literal["closed", "left"]


class BoardError(RuntimeError):
    """The nodes met, but their agents cannot speak with one another; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Add these to this node's clocks to get node 0's; right to within ``uncertainty_s``."""

    monotonic_ns: int = 0
    wall_s: float = 0.0
    uncertainty_s: float = 0.0


@dataclass
class _Peer:
    """The other end of one connection."""

    socket: socket.socket
    node: int | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)

    def say(self, op: str, **values: Any) -> None:
        self.unsent += json.dumps({"op": op, **values}, default=str).encode() + b"\n"

    def lines(self) -> list[dict[str, Any]]:
        """Whole messages received so far."""
        *whole, rest = bytes(self.received).split(b"\n")
        self.received[:] = rest
        return [json.loads(line) for line in whole]


def listen() -> socket.socket:
    """A socket for node 0 to take connections on, on a free port of every address."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=128)


class Board:
    """Posts of every node of an attempt. Without arguments: the board of a job on one node, its own posts only.

    No method blocks on the network or raises because of it: with a peer gone, `read` answers what is there.

        >>> board = Board()
        >>> board.post("still", {"ranks": [0]})
        >>> board.read("still")
        {0: {'ranks': [0]}}
    """

    def __init__(
        self, node: int = 0, nodes: int = 1, *, about: Mapping[str, Any] | None = None, token: str = ""
    ) -> None:
        self.node, self.nodes = node, nodes
        self.clock = Clock()
        self._token = token
        self._lock = threading.Lock()
        self._posts: dict[str, dict[int, Any]] = {}
        self._about: dict[int, dict[str, Any]] = {node: dict(about or {})}
        self._gone: dict[int, How] = {}
        self._heard: dict[int, float] = {}  # monotonic seconds, by node
        self._best_ns: int | None = None  # the shortest round trip so far
        self._outbox: list[tuple[str, Any]] = []
        self._peers: list[_Peer] = []
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._news, self._wake = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        self._closing = False
        self._thread: threading.Thread | None = None

    # ----------------------------------------------------------------- for everybody

    def post(self, kind: str, value: Any) -> None:
        """Show ``value`` (anything that JSON holds) to all nodes; it replaces this node's last of that kind."""
        with self._lock:
            self._posts.setdefault(kind, {})[self.node] = value
            self._outbox.append((kind, value))
        self._ring(self._wake)

    def read(self, kind: str) -> dict[int, Any]:
        """The posts of a kind by node, as far as they have come."""
        with self._lock:
            return dict(self._posts.get(kind, {}))

    def fileno(self) -> int:
        """Readable when there is news: for an event loop, which then calls `take_news`."""
        return self._news

    def take_news(self) -> None:
        """Forget that there was news."""
        try:
            os.eventfd_read(self._news)
        except BlockingIOError:
            return

    def gone(self) -> dict[int, How]:
        """Nodes whose agent is no longer connected: "left" when it took leave, "closed" when it did not."""
        with self._lock:
            return dict(self._gone)

    def silence(self) -> dict[int, float]:
        """For how many seconds nothing has been heard of each other node that is still connected."""
        now = time.monotonic()
        with self._lock:
            return {node: now - at for node, at in self._heard.items() if node not in self._gone}

    def about(self) -> dict[int, dict[str, Any]]:
        """What each node said of itself when it came (host, ranks, versions)."""
        with self._lock:
            return dict(self._about)

    def close(self) -> None:
        """Take leave, once what was posted is on its way."""
        self._closing = True
        self._ring(self._wake)
        if self._thread is not None:
            self._thread.join(_FLUSH_LIMIT_S + 1.0)
            self._thread = None
        # The event descriptors stay open: an event loop may still hold their numbers.

    # ----------------------------------------------------------------- coming together

    def serve(self, listener: socket.socket) -> None:
        """Node 0: take the others' connections from now on."""
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._start()

    def connect(self, address: str, port: int) -> None:
        """Another node: go to node 0's board.

        Raises:
            BoardError: Nobody answers there.
        """
        try:
            joined = socket.create_connection((address, port), timeout=CONNECT_LIMIT_S)
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise BoardError(
                f"node {self.node} ({socket.gethostname()}) cannot reach {address} port {port} of node 0: {reason}.\n"
                "The nodes met at the rendezvous, but the ranks would not: they use ports that the system chooses.\n"
                "Fix: let the nodes of a job reach each other on all ports (a firewall?), or name a network that "
                "they share with --local-addr on node 0."
            ) from None
        peer = self._add(joined)
        peer.node = 0
        peer.say("hello", token=self._token, node=self.node, about=self._about[self.node])
        self._heard[0] = time.monotonic()
        self._start()

    def wait_for_all(self, limit_s: float) -> list[int]:
        """Wait until every node has come; returns those that have not, within ``limit_s`` seconds or because node 0 went."""
        deadline = time.monotonic() + limit_s
        while True:
            with self._lock:
                missing = [node for node in range(self.nodes) if node not in self._about]
                lost = bool(self._gone)
            if not missing or lost or time.monotonic() > deadline:
                return missing
            time.sleep(0.005)

    # ----------------------------------------------------------------- the thread

    def _start(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="phalanx-board", daemon=True)
        self._thread.start()

    def _ring(self, eventfd: int) -> None:
        os.eventfd_write(eventfd, 1)

    def _add(self, connection: socket.socket) -> _Peer:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(connection)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        return peer

    def _serve(self) -> None:
        next_beat, closing_until = 0.0, float("inf")
        while True:
            now = time.monotonic()
            if self._closing and closing_until == float("inf"):
                self._pass_on_posts()
                for peer in self._peers:
                    peer.say("bye")
                closing_until = now + _FLUSH_LIMIT_S
            if now >= closing_until or (self._closing and not any(peer.unsent for peer in self._peers)):
                break
            if now >= next_beat:
                next_beat = now + _BEAT_S
                self._beat()
            self._pass_on_posts()
            for peer in list(self._peers):
                self._send(peer)
            for key, _ in self._selector.select(
                0.02 if self._closing else max(0.0, next_beat - time.monotonic())
            ):
                self._handle(key)
        self._close_all()

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.data is not None:
            self._receive(key.data)
        elif key.fileobj is self._listener:
            assert self._listener is not None
            try:
                self._add(self._listener.accept()[0])
            except OSError:
                return
        else:
            os.eventfd_read(self._wake)

    def _beat(self) -> None:
        silence = self.silence()
        for peer in self._peers:
            if peer.node is None:
                continue
            if self.node == 0:
                peer.say("alive", silence=silence)
            else:
                peer.say("ping", ns=time.monotonic_ns(), wall=time.time())

    def _pass_on_posts(self) -> None:
        with self._lock:
            posts, self._outbox = self._outbox, []
        for kind, value in posts:
            self._tell_others("post", node=self.node, kind=kind, value=value)

    def _tell_others(self, op: str, *, but: _Peer | None = None, **values: Any) -> None:
        for peer in self._peers:
            if peer.node is not None and peer is not but:
                peer.say(op, **values)

    def _send(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                del peer.unsent[: peer.socket.send(peer.unsent)]
        except BlockingIOError:
            wanted = selectors.EVENT_READ | selectors.EVENT_WRITE
        except OSError:
            self._drop(peer)
            return
        else:
            wanted = selectors.EVENT_READ
        if self._selector.get_key(peer.socket).events != wanted:
            self._selector.modify(peer.socket, wanted, peer)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.received += data
        if peer.node is not None:
            self._heard[peer.node] = time.monotonic()
        try:
            for message in peer.lines():
                self._on_message(peer, message)
        except (ValueError, KeyError, TypeError):  # not one of us
            self._drop(peer)

    def _on_message(self, peer: _Peer, message: dict[str, Any]) -> None:
        op = message["op"]
        if peer.node is None and (op != "hello" or message["token"] != self._token):
            raise ValueError(op)
        if op == "hello":
            self._on_hello(peer, message)
        elif op == "about":
            with self._lock:
                self._about |= {int(node): about for node, about in message["about"].items()}
        elif op == "ping":
            peer.say("pong", sent=message["ns"], ns=time.monotonic_ns(), wall=time.time())
        elif op == "pong":
            self._set_clock(message)
        elif op == "alive":
            self._on_alive(message["silence"])
        elif op == "post":
            self._on_post(peer, message)
        elif op in ("gone", "bye"):
            node = message["node"] if op == "gone" else peer.node
            assert node is not None  # `_on_message` lets nobody speak before a hello
            self._set_gone(int(node), message.get("how", "left"))

    def _on_hello(self, peer: _Peer, message: dict[str, Any]) -> None:
        peer.node = int(message["node"])
        with self._lock:
            self._about[peer.node] = message["about"]
            self._heard[peer.node] = time.monotonic()
            about, posts = dict(self._about), {kind: dict(by_node) for kind, by_node in self._posts.items()}
        self._tell_others("about", about=about)
        for kind, by_node in posts.items():
            for node, value in by_node.items():
                peer.say("post", node=node, kind=kind, value=value)
        self._ring(self._news)

    def _on_alive(self, silence: Mapping[str, float]) -> None:
        now = time.monotonic()
        with self._lock:
            for node, silent_s in silence.items():
                if int(node) != self.node:
                    self._heard[int(node)] = now - silent_s

    def _on_post(self, peer: _Peer, message: dict[str, Any]) -> None:
        node = int(message["node"]) if self.node or peer.node is None else peer.node
        with self._lock:
            self._posts.setdefault(message["kind"], {})[node] = message["value"]
        if self.node == 0:
            self._tell_others("post", but=peer, node=node, kind=message["kind"], value=message["value"])
        self._ring(self._news)

    def _set_clock(self, message: Mapping[str, Any]) -> None:
        now_ns = time.monotonic_ns()
        trip_ns = now_ns - message["sent"]
        if self._best_ns is not None and trip_ns >= self._best_ns:
            return
        self._best_ns = trip_ns
        self.clock = Clock(
            monotonic_ns=message["ns"] - (message["sent"] + trip_ns // 2),
            wall_s=message["wall"] - (time.time() - trip_ns / 2e9),
            uncertainty_s=trip_ns / 2e9,
        )

    def _set_gone(self, node: int, how: How) -> None:
        with self._lock:
            if node in self._gone:
                return
            self._gone[node] = how
        if self.node == 0:
            self._tell_others("gone", node=node, how=how)
        self._ring(self._news)

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.socket)
            peer.socket.close()
            if peer.node is not None:
                self._set_gone(peer.node, "closed")

    def _close_all(self) -> None:
        for peer in self._peers:
            self._selector.unregister(peer.socket)
            peer.socket.close()
        self._peers.clear()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

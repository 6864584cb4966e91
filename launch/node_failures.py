"""The failures of several nodes in one list: each node's own, told on its board, and the nodes that went silent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from phalanx.launch.board import Clock
from phalanx.launch.failures import Failure, by_cause


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """A node whose agent took no leave."""

    node: int
    host: str
    ranks: tuple[int, ...]
    silent_s: float | None  # None: its connection was closed
    since_ns: int  # node 0's monotonic clock: when it was last heard
    said: str = ""  # why its agent could not go on, if it got to say so


def on_node_zero(failure: Failure, clock: Clock, host: str) -> Failure:
    """The failure with its times by node 0's clocks.

    The order comes from the monotonic clocks, which nobody sets: wall clocks that are apart change nothing.
    """
    return replace(
        failure,
        host=host,
        time=failure.time + clock.wall_s,
        order_ns=failure.order_ns + clock.monotonic_ns,
        uncertainty_s=clock.uncertainty_s,
    )


def to_json(failure: Failure) -> dict[str, Any]:
    """Everything about a failure, for the other nodes."""
    return asdict(failure)


def from_json(content: Mapping[str, Any]) -> Failure:
    """The inverse of `to_json`; what another version added is left out."""
    known = {field.name for field in fields(Failure)}
    return Failure(**{name: value for name, value in content.items() if name in known})


def lost(node: LostNode, now: float) -> Failure:
    """A lost node as a failure of its first rank; ``now`` is the wall clock's time."""
    ranks = f"rank{'s' * (len(node.ranks) > 1)} {', '.join(map(str, node.ranks))}"
    if node.said:
        what = f"cannot go on: {node.said.rstrip('.')}"
    elif node.silent_s is None:
        what = "lost its agent (killed, or its machine went down: the connection closed without a word)"
    else:
        what = f"has not answered for {node.silent_s:.0f} s"
    return Failure(
        rank=node.ranks[0],
        local_rank=0,
        node=node.node,
        exit_code=None,
        signal=None,
        exception=None,
        message=f"node {node.node} ({node.host}) {what}; its {ranks} {'are' if len(node.ranks) > 1 else 'is'} lost with it",
        traceback="",
        time=now - (node.silent_s or 0.0),
        order_ns=node.since_ns,
        is_consequence=False,
        host=node.host,
        uncertainty_s=1.0,
    )


def merge(
    of_nodes: Iterable[Sequence[Failure]], lost_nodes: Sequence[LostNode] = (), now: float = 0.0
) -> list[Failure]:
    """One list of all nodes' failures, the first cause in front; a rank that several told of counts once.

    Args:
        of_nodes: Failures by node 0's clocks (`on_node_zero`), one sequence from each node that answered.
        lost_nodes: Nodes that did not.
        now: The time, seconds since the epoch.
    """
    by_rank: dict[int, Failure] = {}
    for failures in of_nodes:
        for failure in failures:
            by_rank.setdefault(failure.rank, failure)
    for node in lost_nodes:
        by_rank.setdefault(node.ranks[0], lost(node, now))
    return by_cause(list(by_rank.values()))


def different_versions(about: Mapping[int, Mapping[str, Any]]) -> str | None:
    """What to tell the user where nodes have different versions of torch or phalanx; None where they have not."""
    for package in ("torch", "phalanx"):
        found = {node: str(one.get(package)).partition("+")[0] for node, one in sorted(about.items())}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"node {n} ({about[n].get('host')}) has {v}" for n, v in found.items())
            return (
                f"the nodes have different versions of {package}: {listed}.\n"
                "Ranks of different versions may hang or compute different things.\n"
                f"Fix: install the same {package} on all nodes."
            )
    return None

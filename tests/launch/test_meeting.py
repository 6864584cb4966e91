"""Where nodes meet, for each way of asking that torchrun has."""

from __future__ import annotations

import socket

import pytest

from phalanx.launch.meeting import Meeting, meeting
from phalanx.launch.options import Given
from phalanx.tools.usage import UsageMistake


def asked(**options: str) -> Meeting:
    return meeting({key: Given(text, "--" + key.replace("_", "-")) for key, text in options.items()})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"standalone": ""},
        {"nnodes": "1"},
        {"nnodes": "1:1", "rdzv_backend": "c10d"},
        {"master_addr": "127.0.0.1"},
        {"node_rank": "0"},
        {"standalone": "", "rdzv_endpoint": "node1:29400", "master_port": "29500"},
    ],
)
def test_one_node_without_a_wish_meets_on_a_free_port(options: dict[str, str]) -> None:
    assert asked(**options).standalone


def test_a_port_asked_for_is_used() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = asked(master_port=str(port))
    assert (found.standalone, found.backend) == (False, "static")
    assert (found.master_addr, found.master_port, found.node_rank) == ("127.0.0.1", port, 0)


def test_a_port_that_is_taken_is_named_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            UsageMistake, match=rf"--master-port {port}: port {port} cannot be used .*\nFix: leave"
        ):
            asked(master_port=str(port))


def test_static_with_several_nodes() -> None:
    found = asked(nnodes="2", node_rank="1", master_addr="node1")
    assert (found.backend, found.master_addr, found.master_port, found.node_rank) == (
        "static",
        "node1",
        29500,
        1,
    )
    found = asked(nnodes="2", node_rank="1", rdzv_endpoint="node1:4000")
    assert (found.backend, found.master_addr, found.master_port) == ("static", "node1", 4000)


def test_static_without_node_rank_is_node_0_and_says_so() -> None:
    found = asked(nnodes="2", master_addr="node1", master_port="4000")
    assert found.node_rank == 0
    assert found.notes == ("no --node-rank given: this is node 0.",)


def test_an_endpoint_alone_is_c10d() -> None:
    found = asked(nnodes="1:4", rdzv_endpoint="node1:29400", rdzv_id="job")
    assert (found.backend, found.endpoint, found.job_id) == ("c10d", "node1:29400", "job")
    assert (found.nnodes_min, found.nnodes_max, found.node_rank) == (1, 4, None)


def test_several_nodes_without_a_place_to_meet_are_refused() -> None:
    with pytest.raises(UsageMistake, match=r"--nnodes 2: the nodes do not know where to meet"):
        asked(nnodes="2")
    with pytest.raises(UsageMistake, match=r"--standalone with --nnodes 2"):
        asked(nnodes="2", standalone="")


def test_a_node_rank_beyond_the_nodes_is_refused() -> None:
    with pytest.raises(UsageMistake, match=r"--node-rank 2: with 2 nodes the node ranks are 0 to 1"):
        asked(nnodes="2", node_rank="2", master_addr="node1")


def test_an_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(
        UsageMistake, match=r"--rdzv-backend c10: must be one of static, c10d.*\nFix: --rdzv-backend c10d"
    ):
        asked(rdzv_backend="c10")

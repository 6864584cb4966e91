"""The board of a job's agents, with real connections; and what the agents make of what it says."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from phalanx.launch import node_failures
from phalanx.launch.board import Board, BoardError, Clock, listen
from phalanx.launch.failures import Failure
from phalanx.launch.node_failures import LostNode, different_versions, merge
from tests.launch.launching import wait_until


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    listener = listen()
    port = listener.getsockname()[1]
    made = [Board(node, 3, about={"host": f"n{node}"}, token="word") for node in range(3)]
    made[0].serve(listener)
    for board in made[1:]:
        board.connect("127.0.0.1", port)
    assert [board.wait_for_all(30.0) for board in made] == [[], [], []]
    yield made
    for board in reversed(made):
        board.close()


def test_what_one_posts_reaches_all_and_replaces_its_last(boards: list[Board]) -> None:
    for board in boards:
        board.post("sum", {"of": board.node, "text": "x" * 300_000})
    boards[1].post("sum", "second")
    for board in boards:
        wait_until(lambda b=board: len(b.read("sum")) == 3 and b.read("sum")[1] == "second", "posts")
        assert board.read("sum")[2]["of"] == 2
    assert boards[0].read("nothing") == {}


def test_who_took_leave_is_told_from_who_did_not(boards: list[Board]) -> None:
    boards[1].post("last", "words")
    boards[1].close()
    boards[2]._peers[0].socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: len(boards[0].gone()) == 2, "two nodes gone")
    assert boards[0].gone() == {1: "left", 2: "closed"}
    assert boards[0].read("last") == {1: "words"}
    wait_until(lambda: boards[2].gone().get(0) == "closed", "node 0 gone for node 2")


def test_clocks_are_measured_and_silence_is_known(boards: list[Board]) -> None:
    wait_until(lambda: boards[1].clock.uncertainty_s > 0, "a measured clock")
    assert (
        abs(boards[1].clock.monotonic_ns) <= boards[1].clock.uncertainty_s * 1e9 + 1e6
    )  # one machine, one clock
    wait_until(lambda: set(boards[2].silence()) == {0, 1}, "news of node 1 by way of node 0")


def test_a_stranger_is_not_let_in() -> None:
    listener = listen()
    board = Board(0, 2, token="word")
    board.serve(listener)
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as stranger:
        stranger.sendall(b'{"op": "hello", "token": "another", "node": 1, "about": {}}\n')
        stranger.settimeout(30)
        assert stranger.recv(1) == b""
    assert board.wait_for_all(0.0) == [1]
    board.close()


def test_a_board_that_nobody_serves_is_an_error_that_names_its_port() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(
            BoardError, match=f"cannot reach 127.0.0.1 port {port} of node 0: Connection refused"
        ):
            Board(1, 2).connect("127.0.0.1", port)


def _failure(rank: int, at_s: float, *, node: int, consequence: bool = False, **values: object) -> Failure:
    known = {"exception": "ValueError", "message": "boom", "exit_code": 1, "signal": None} | values
    return Failure(
        rank=rank,
        local_rank=0,
        node=node,
        traceback="",
        time=at_s,
        order_ns=int(at_s * 1e9),
        is_consequence=consequence,
        **known,  # type: ignore[arg-type]
    )


def test_failures_come_in_the_order_of_one_clock() -> None:
    """By its own clocks the second node failed first; by node 0's it was 2 s later."""
    far = node_failures.on_node_zero(
        _failure(1, 10.0, node=1), Clock(monotonic_ns=5 * 10**9, wall_s=5.0), "n1"
    )
    near = _failure(0, 13.0, node=0)
    assert [f.rank for f in merge([[far], [near]])] == [0, 1]
    assert far.time == 15.0
    assert node_failures.from_json(node_failures.to_json(far) | {"of a newer version": 1}) == far


def test_what_the_clocks_cannot_tell_apart_is_ordered_by_what_is_known() -> None:
    bare = _failure(0, 10.00, node=0, exception=None, message="exit code 1")
    known = node_failures.on_node_zero(_failure(1, 10.02, node=1), Clock(uncertainty_s=0.05), "n1")
    assert [f.rank for f in merge([[bare], [known]])] == [1, 0]
    sure = node_failures.on_node_zero(_failure(1, 10.02, node=1), Clock(uncertainty_s=0.001), "n1")
    assert [f.rank for f in merge([[bare], [sure]])] == [0, 1]


def test_a_lost_node_is_the_cause_of_broken_connections() -> None:
    lost = LostNode(node=1, host="n1", ranks=(2, 3), silent_s=12.3, since_ns=20 * 10**9)
    found = merge([[_failure(0, 10.0, node=0, consequence=True)]], [lost], now=100.0)
    assert found[0].headline == "node 1 (n1) has not answered for 12 s; its ranks 2, 3 are lost with it"
    assert found[0].is_lost_node
    assert (found[0].rank, found[0].node) == (2, 1)


def test_different_versions_are_named() -> None:
    same = {"host": "a", "torch": "2.6.0+cu124", "phalanx": "1.0"}
    assert different_versions({0: same, 1: same | {"torch": "2.6.0+cpu"}}) is None
    problem = different_versions({0: same, 1: same | {"host": "b", "torch": "2.7.0"}})
    assert problem is not None
    assert "torch: node 0 (a) has 2.6.0, node 1 (b) has 2.7.0" in problem

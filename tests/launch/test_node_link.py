"""Frames between a driver and a node, and the environment that goes over them."""

from __future__ import annotations

import doctest
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch import host_outputs, node_link
from phalanx.launch.node_environ import job_environ, sent_environ
from phalanx.launch.node_link import Link, silence_limit
from phalanx.tools.usage import UsageMistake


def test_examples() -> None:
    assert doctest.testmod(node_link).failed == 0
    assert doctest.testmod(host_outputs).failed == 0


@pytest.fixture
def pipes() -> Iterator[tuple[Link, int]]:
    """A link that reads what is written to a descriptor."""
    read, write = os.pipe()
    back_read, back_write = os.pipe()
    yield Link(read, back_write), write
    for fd in (read, write, back_read, back_write):
        os.close(fd)


@given(st.lists(st.tuples(st.sampled_from("J012K"), st.binary(max_size=300)), max_size=8), st.data())
def test_frames_arrive_whole_however_they_are_cut(
    frames: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    read, write = os.pipe()
    back_read, back_write = os.pipe()
    try:
        link = Link(read, back_write, greeted=True)
        stream = b"".join(Link.frame(kind, content) for kind, content in frames)
        found = []
        while stream:
            cut = data.draw(st.integers(1, len(stream)))
            os.write(write, stream[:cut])
            stream = stream[cut:]
            found += link.receive()
        assert found == frames
    finally:
        for fd in (read, write, back_read, back_write):
            os.close(fd)


def test_what_a_shell_prints_first_is_kept_apart(pipes: tuple[Link, int]) -> None:
    link, write = pipes
    os.write(write, b"Welcome!\n\0phalanx li")
    assert link.receive() == []
    os.write(write, Link.greeting()[11:] + Link.frame("J", b"{}"))
    assert link.receive() == [("J", b"{}")]
    assert link.noise == b"Welcome!\n"


def test_garbage_between_frames_closes_the_link(pipes: tuple[Link, int]) -> None:
    link, write = pipes
    os.write(write, Link.greeting() + Link.frame("1", b"x") + b"z" * 100)
    assert link.receive() == [("1", b"x")]
    assert not link.is_open


def test_a_closed_end_is_seen_and_writing_to_it_is_no_error() -> None:
    read, write = os.pipe()
    back_read, back_write = os.pipe()
    link = Link(read, back_write)
    os.close(back_read)
    link.send({"order": "go"})
    assert link.pending_bytes == 0
    os.close(write)
    assert link.receive() == []
    assert not link.is_open
    link.close()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_silence_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageMistake, match="PHALANX_LINK_TIMEOUT_S"):
        silence_limit({"PHALANX_LINK_TIMEOUT_S": text})


def test_a_variable_of_one_host_stays_there() -> None:
    here = {
        "TOKEN": "a",
        "HOSTNAME": "here",
        "SSH_AUTH_SOCK": "/x",
        "SLURM_JOB_ID": "7",
        "XDG_RUNTIME_DIR": "/run/user/0",
        "PHALANX_RUN_HOSTS": "n1,n2",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PATH": "/venv/bin",
    }
    sent = sent_environ(here)
    assert sent == {"TOKEN": "a", "CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/venv/bin"}
    there = {"HOSTNAME": "there", "SSH_CONNECTION": "1 2 3 4", "PATH": "/bin", "OTHER": "x"}
    assert job_environ(sent, there) == {**sent, "HOSTNAME": "there", "SSH_CONNECTION": "1 2 3 4"}
    assert "CUDA_VISIBLE_DEVICES" not in sent_environ({"CUDA_VISIBLE_DEVICES": "GPU-1234"})

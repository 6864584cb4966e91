"""Host files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist.environments.hostfile import Host, InvalidHostfile, parse_hostfile


def test_blank_lines_comments_and_crlf() -> None:
    text = "\ufeffnode1 slots=4\r\n\r\n# spare\r\n  node2 slots=4   # the other one  \n\n"
    assert parse_hostfile(text) == [Host(name="node1", slots=4), Host(name="node2", slots=4)]


def test_every_part() -> None:
    text = "user@10.0.0.1 slots=2\nroot@[fd00::2] gpus=0,2 port=2222\nbare\n"
    assert parse_hostfile(text) == [
        Host(name="10.0.0.1", slots=2, user="user"),
        Host(name="fd00::2", slots=2, user="root", port=2222, gpus=(0, 2)),
        Host(name="bare"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "10.0.0.1 slots=8\n10.0.0.2 lots=8\n",
            r"hostfile line 2: expected slots=<n>, got 'lots=8': '10.0.0.2 lots=8'",
        ),
        ("a slots=x", r"line 1: expected slots=<n>, got 'slots=x'"),
        ("a slots=0", r"expected slots=<n>, got 'slots=0' \(1 to 4096\)"),
        ("a slots=", "expected slots=<n>, got 'slots='"),
        ("a 4", r"expected slots=<n>, gpus=<n,n> or port=<n>, got '4'"),
        ("a slots=1 slots=2", "slots= comes twice"),
        ("a slots=1\n\nb\nA slots=2", "line 4: A is on line 1 already"),
        ("a slots=3 gpus=0,1", "slots=3 for 2 GPUs"),
        ("a gpus=0,", "empty GPU number"),
        ("a gpus=0,6.7", "'6.7' is no GPU number"),
        ("a gpus=1,1", "1 comes twice"),
        ("a port=70000", "port=<n>, got 'port=70000'"),
        ("fd00::2 slots=1", r"an IPv6 address needs brackets.*\nFix: \[fd00::2\]"),
        ("[fd00::zz]", "no IPv6 address in brackets"),
        ("a:8", r"could mean a port or slots.*\nFix: a slots=8, or a port=8"),
        ("-oProxyCommand=x", "is no host name"),
        ("@a", "'' is no user name"),
        ("-l@a", "'-l' is no user name"),
        ("# nothing\n", "names no host"),
        ("", "names no host"),
    ],
)
def test_bad_lines(text: str, message: str) -> None:
    with pytest.raises(InvalidHostfile, match=message) as error:
        parse_hostfile(text)
    assert "\nFix: " in str(error.value)


@given(st.text("ab0@[]:=, #\nslotpru", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        hosts = parse_hostfile(text)
    except InvalidHostfile:
        return
    assert all(not host.name.startswith("-") and " " not in host.name for host in hosts)
    assert len({host.name.lower() for host in hosts}) == len(hosts)

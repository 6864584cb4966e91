"""Each option's value is checked once, and the message says where it came from."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, strategies

from phalanx.launch import values
from phalanx.launch.options import Given
from phalanx.tools.usage import UsageMistake


def one(key: str, text: str, source: str | None = None) -> dict[str, Given]:
    return {key: Given(text, source or "--" + key.replace("_", "-"))}


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1, 1)), ("4", (4, 4)), ("2:4", (2, 4)), ("1:1", (1, 1))]
)
def test_nnodes(text: str, expected: tuple[int, int]) -> None:
    assert values.nnodes(one("nnodes", text)) == expected


@pytest.mark.parametrize("text", ["0", "0:2", "2:1", "-1", "a", "1:2:3", "1:", ":2", "", "1.5"])
def test_nnodes_refused(text: str) -> None:
    with pytest.raises(UsageMistake, match=r"--nnodes .*\nFix: --nnodes"):
        values.nnodes(one("nnodes", text))


def test_nnodes_the_wrong_way_round_is_turned_in_the_fix() -> None:
    with pytest.raises(UsageMistake, match=r"--nnodes 2:1: .*\nFix: --nnodes 1:2$"):
        values.nnodes(one("nnodes", "2:1"))


@pytest.mark.parametrize("text", ["-1", "x", "", "1.0", "1e3"])
def test_whole_number_refused(text: str) -> None:
    with pytest.raises(UsageMistake, match=r"^PHALANX_RUN_MAX_RESTARTS="):
        values.whole_number(one("max_restarts", text, "PHALANX_RUN_MAX_RESTARTS"), "max_restarts", low=0)


def test_whole_number_in_a_range() -> None:
    assert values.whole_number(one("master_port", "65535"), "master_port", low=1, high=65535) == 65535
    assert values.whole_number({}, "master_port", low=1) is None
    with pytest.raises(UsageMistake, match="must be 1 to 65535"):
        values.whole_number(one("master_port", "65536"), "master_port", low=1, high=65535)


@pytest.mark.parametrize(
    ("text", "zero"), [("nan", True), ("inf", True), ("-0.1", True), ("0", False), ("soon", True)]
)
def test_seconds_refused(text: str, zero: bool) -> None:
    with pytest.raises(UsageMistake, match=r"--grace-s .* seconds"):
        values.seconds(one("grace_s", text), "grace_s", zero=zero)


def test_seconds() -> None:
    assert values.seconds(one("grace_s", "0"), "grace_s", zero=True) == 0.0
    assert values.seconds(one("grace_s", "2.5"), "grace_s", zero=False) == 2.5
    assert values.seconds({}, "grace_s", zero=True) is None


def test_choice_names_the_nearest() -> None:
    assert values.choice(one("show", "all"), "show", ("rank0", "all")) == "all"
    with pytest.raises(UsageMistake, match=r"--show rank_0: must be one of rank0, all.\nFix: --show rank0"):
        values.choice(one("show", "rank_0"), "show", ("rank0", "all"))


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(UsageMistake, match="--role is empty"):
        values.text(one("role", " "), "role")


@pytest.mark.parametrize("text", ["node1:29400", "node1", "[::1]:29400", "[::1]", "10.0.0.1:0"])
def test_endpoint(text: str) -> None:
    assert values.endpoint(one("rdzv_endpoint", text)) == text


@pytest.mark.parametrize("text", ["node1:", ":29400", "node1:port", "node1:99999", "::1:29400"])
def test_endpoint_refused(text: str) -> None:
    with pytest.raises(UsageMistake, match="HOST:PORT"):
        values.endpoint(one("rdzv_endpoint", text))


def test_pairs() -> None:
    assert values.pairs(one("rdzv_conf", "timeout=900, is_host = 1"), "rdzv_conf") == {
        "timeout": "900",
        "is_host": "1",
    }
    assert values.pairs(one("rdzv_conf", "url=a=b"), "rdzv_conf") == {"url": "a=b"}
    for text in ("timeout", "timeout=", "=1", "a=1,,b=2"):
        with pytest.raises(UsageMistake, match="KEY=VALUE"):
            values.pairs(one("rdzv_conf", text), "rdzv_conf")


def test_local_ranks() -> None:
    assert values.local_ranks(one("local_ranks_filter", "1,0,1"), 2) == (1, 0)
    with pytest.raises(UsageMistake, match="local ranks are 0 to 1"):
        values.local_ranks(one("local_ranks_filter", "0,2"), 2)
    with pytest.raises(UsageMistake, match="'x' is not a local rank"):
        values.local_ranks(one("local_ranks_filter", "x"), 2)


def test_signal_names() -> None:
    assert values.signal_names(one("signals_to_handle", "SIGTERM, sigusr1")) == ("SIGTERM", "SIGUSR1")
    with pytest.raises(UsageMistake, match="no process can catch SIGKILL"):
        values.signal_names(one("signals_to_handle", "SIGKILL"))
    with pytest.raises(UsageMistake, match=r"did you mean SIGTERM\?"):
        values.signal_names(one("signals_to_handle", "TERM"))


KEYS = (
    *("nnodes", "rdzv_endpoint", "signals_to_handle", "rdzv_conf"),
    *("local_ranks_filter", "grace_s", "max_restarts"),
)


@given(strategies.text(max_size=12))
def test_no_text_gets_past_a_check_as_anything_but_a_value_or_a_mistake(text: str) -> None:
    for check in (
        values.nnodes,
        values.endpoint,
        values.signal_names,
        lambda v: values.pairs(v, "rdzv_conf"),
        lambda v: values.local_ranks(v, 2),
        lambda v: values.seconds(v, "grace_s", zero=True),
        lambda v: values.whole_number(v, "max_restarts", low=0),
    ):
        with contextlib.suppress(UsageMistake):
            check(dict.fromkeys(KEYS, Given(text, "--x")))

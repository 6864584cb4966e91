"""Slurm's short forms: node lists and tasks per node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist.environments.slurm import expand_hostlist, expand_tasks_per_node


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("linux[1,2]", ["linux1", "linux2"]),
        ("alpha,beta,gamma", ["alpha", "beta", "gamma"]),
        ("nodeA,nodeB[001,003],nodeC", ["nodeA", "nodeB001", "nodeB003", "nodeC"]),
        (
            "ml-16-node-[001-002,004],ml-17-node-[001-003]",
            [f"ml-16-node-{i}" for i in ("001", "002", "004")]
            + [f"ml-17-node-{i}" for i in ("001", "002", "003")],
        ),
        ("rack[0-1]_blade[0-1]", ["rack0_blade0", "rack0_blade1", "rack1_blade0", "rack1_blade1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("[1-2]x", ["1x", "2x"]),
        (" a , b ", ["a", "b"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty name"),
        ("a,,b", "empty name"),
        ("n[1-3", "not closed"),
        ("n1-3]", "do not match"),
        ("n[[1]]", "do not match"),
        ("n[]", "'' is no number"),
        ("n[1,]", "'' is no number"),
        ("n[3-1]", "runs backwards"),
        ("n[a-c]", "'a-c' is no number"),
        ("n[1-]", "'1-' is no number"),
        ("n[1-2-3]", "'1-2-3' is no number"),
        ("n[1-99999999999]", "more than 65536"),
        ("n[1-300]m[1-300]", "more than 65536"),
        ("a b", "space"),
    ],
)
def test_bad_node_lists(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        expand_hostlist(text)
    assert repr(text) in str(error.value)


_names = st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True)
_range = st.tuples(st.integers(0, 60), st.integers(0, 6), st.integers(1, 4))


@given(
    st.lists(
        st.tuples(_names, st.lists(st.lists(_range, min_size=1, max_size=3), max_size=2)),
        min_size=1,
        max_size=3,
    )
)
def test_any_node_list(parts: list[tuple[str, list[list[tuple[int, int, int]]]]]) -> None:
    """Written with brackets and expanded by hand: the same names in the same order."""
    texts, expected = [], []
    for name, brackets in parts:
        names = [name]
        text = name
        for ranges in brackets:
            numbers = [str(n).zfill(width) for low, span, width in ranges for n in range(low, low + span + 1)]
            text += (
                "[" + ",".join(f"{low:0{width}}-{low + span:0{width}}" for low, span, width in ranges) + "]_"
            )
            names = [f"{head}{number}_" for head in names for number in numbers]
        texts.append(text)
        expected += names
    assert expand_hostlist(",".join(texts)) == expected


@given(st.text("ab[]-,012 ", max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except ValueError:
        return
    assert names
    assert all(name and "[" not in name and "," not in name for name in names)


def test_tasks_per_node() -> None:
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks_per_node("4") == [4]
    for text in ("", "2(x)", "x", "2(3)", "2,,1"):
        with pytest.raises(ValueError, match="is not a count"):
            expand_tasks_per_node(text)

"""No text makes doctor raise, and its time grows with the text's length alone."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.tools.doctor.checks import diagnose
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.facts_json import from_json, to_json
from phalanx.tools.doctor.render import render_markdown, render_text
from phalanx.tools.doctor.report_labels import LABELS
from phalanx.tools.doctor.report_text import facts_from_text
from tests.tools.doctor import reports_faulty

_PIECES = [text for _, text in reports_faulty.REPORTS]
_LINES = sorted({line for text in _PIECES for line in text.split("\n")})
_WORDS = st.sampled_from(
    [
        "CUDA",
        "GPU",
        "0:",
        ":",
        "=",
        "....",
        "torch",
        "2.6.0+cu126",
        "12.4",
        "[pip3]",
        "|",
        "||",
        "ERR!",
        "N/A",
        "MiB",
        "/",
        "Xid",
        "(PCI:0000:01:00):",
        "sm_90",
        "gfx1100",
        "NVRM:",
        "libcudnn.so.8",
        "undefined",
        "symbol:",
        "nccl",
        "docker",
        "run",
        "--shm-size=",
        "/dev/shm",
        "64M",
        "%",
        "-1",
        ">",
        "```",
        "<details>",
        "\x1b[31m",
        "\r",
        "\x00",
        "：",
        "é",
    ]
)
_TEXTS = st.one_of(
    st.text(max_size=400),
    st.lists(_WORDS, max_size=80).map(" ".join),
    st.lists(st.one_of(st.sampled_from(_LINES), st.text(max_size=60)), max_size=30).map("\n".join),
    st.sampled_from(_PIECES).flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end])),
)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=40),
    st.sampled_from(_LINES),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)
_QUIET = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _everything(text: str) -> None:
    read = facts_from_text(text)
    report = diagnose(read.facts)
    json.dumps(report.to_json())
    render_text(report, found=read.found, lacked=read.lacked, verbose=True)
    render_markdown(report)


@_QUIET
@given(_TEXTS)
def test_no_text_raises(text: str) -> None:
    _everything(text)


@_QUIET
@given(st.dictionaries(st.one_of(st.sampled_from(sorted(LABELS)), st.text(max_size=12)), _VALUES, max_size=8))
def test_no_loose_facts_raise(data: dict[str, object]) -> None:
    _everything(json.dumps(data))


@_QUIET
@given(st.dictionaries(st.sampled_from([*Facts.__dataclass_fields__]), _VALUES, max_size=8))
def test_no_facts_of_the_wrong_kind_raise(data: dict[str, object]) -> None:
    facts = from_json(data)
    assert from_json(to_json(facts)) == facts
    diagnose(facts)


@pytest.mark.parametrize(
    "piece",
    [
        "a", " ", "\n", ">", "|", ".", "(", "[", "=", ":", "0.", "/x", "nccl ", "cuda_visible_devices ", "torch torch ", "GPU 0: A100\n",
        "undefined symbol: ", "libcudnn.so.8 ", "docker ", "ldd ld_library_path cuda ", "\x1b[", "<b", "| 0 x On |", "[pip3] a ",
        "sm_90 ", "'sm_90', ", "NVIDIA GeForce RTX 5090 with CUDA ", "a: ", "A=", "Xid 63 and ", "1.1.1.", "fabric\nstate ", "{", "[{",
        "PyTorch version ", "127.0.0.1 ", "hostname ", "p2p ", "flash_attn ", "ibv_reg_mr ", "/home/a", "a@", "ff:",
    ],
)  # fmt: skip
def test_time_grows_with_length_alone(piece: str) -> None:
    """Eight times the text may take at most some twenty times as long: a quadratic search takes 64."""

    def seconds(length: int) -> float:
        text = (piece * (length // len(piece) + 1))[:length]
        started = time.process_time()
        _everything(text)
        return time.process_time() - started

    short = max(min(seconds(10_000) for _ in range(2)), 0.01)
    assert seconds(80_000) < 20 * short

"""No input makes `explain` raise, and none makes it slow."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.tools.explain import Source, explain_sources, explain_text, render
from phalanx.tools.explain.rules import RULES

WORDS = sorted({text for rule in RULES for text in rule.when})
CORPUS = (Path(__file__).parent / "corpus" / "messages.txt").read_text().splitlines()
PIECES = st.one_of(
    st.sampled_from(CORPUS),
    st.sampled_from(WORDS),
    st.sampled_from(["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    g()", "[rank3]: ", "3: ", "> "]),
    st.text(max_size=40),
    st.sampled_from(["\n", "\n", "\r", "\x1b[31m", "\0", "\ufeff", "🏖", " " * 50]),
)  # fmt: skip


def _check(data: bytes) -> None:
    explanation = explain_text(data, name="x")
    json.dumps(explanation.to_json())
    assert explanation.outcome in ("explained", "unknown", "no-failure")
    assert (explanation.outcome == "explained") == bool(explanation.diagnoses)
    assert render(explanation)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PIECES, max_size=60).map("".join))
def test_no_text_raises(text: str) -> None:
    _check(text.encode(errors="surrogatepass"))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=2000))
def test_no_bytes_raise(data: bytes) -> None:
    _check(data)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_no_compressed_file_raises(data: bytes) -> None:
    _check(b"\x1f\x8b" + data)


HOSTILE: dict[str, Callable[[int], str]] = {
    "one line of one letter": lambda n: "a" * n,
    "one line of spaces": lambda n: " " * n + "x",
    "nested prefixes": lambda n: "> " * (n // 2),
    "open brackets": lambda n: "[" * n,
    "half a missing-keys message": lambda n: 'Missing key(s) in state_dict: "' + "a.b" * (n // 3),
    "many keys": lambda n: "Missing key(s) in state_dict: " + '"a.b.c", ' * (n // 9) + "\n\tUnexpected key(s) in state_dict: " + '"m.a.b.c", ' * 9,
    "NCCL without an end": lambda n: "NCCL WARN Cuda failure Connect " * (n // 31),
    "tracebacks that never end": lambda n: "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n" * (n // 70),
    "tracebacks of many ranks": lambda n: "".join(f"[rank{i}]: Traceback (most recent call last):\n" for i in range(n // 45)),
    "one deep traceback": lambda n: "Traceback (most recent call last):\n" + '  File "a.py", line 1, in f\n    f()\n' * (n // 40),
    "an exception a line": lambda n: "".join(f"ValueError: {i}\n" for i in range(n // 18)),
    "time-outs": lambda n: "".join(f"[rank{i % 64}]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum={i}, OpType=BROADCAST)\n" for i in range(n // 110)),
    "every word of every rule": lambda n: (" ".join(WORDS) + "\n") * (n // 9000),
    "escape sequences": lambda n: "\x1b[" * (n // 2),
    "carriage returns": lambda n: "10%\r" * (n // 4),
}  # fmt: skip


def _steps(text: str) -> int:
    """Lines of our code that run: what time is made of, without the clock's noise."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        explain_sources([Source(name="x", data=text.encode())])
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", HOSTILE)
def test_four_times_the_text_takes_about_four_times_the_work(name: str) -> None:
    small, large = (_steps(HOSTILE[name](size)) for size in (20_000, 80_000))
    assert large <= 5 * small + 5000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_no_pattern_runs_away(name: str) -> None:
    """Two megabytes: a pattern that tries every start against every end would need hours."""
    _check(HOSTILE[name](200_000 if "every word" in name else 2_000_000).encode())

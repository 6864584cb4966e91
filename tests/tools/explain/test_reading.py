"""Files, folders, standard input, compressed, in other encodings; whole lines out of any pieces."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.tools.explain import Source, explain_paths, explain_sources, explain_text, find_sources
from phalanx.tools.explain.decoding import REDRAWN, whole_lines
from phalanx.tools.usage import UsageMistake

NINJA = "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)\n"
OOM = "RuntimeError: CUDA error: out of memory\n"


def ids(*paths: Path | str) -> list[str]:
    return [diagnosis.id for diagnosis in explain_paths([str(path) for path in paths]).diagnoses]


@given(st.binary(max_size=300), st.lists(st.integers(1, 50), max_size=10))
def test_pieces_make_no_difference_to_lines(data: bytes, sizes: list[int]) -> None:
    data = data.replace(b"\r", b"").replace(b"\0", b"").removeprefix(b"\xff\xfe").removeprefix(b"\xfe\xff")
    if data[:3] == b"\xef\xbb\xbf":
        data = data[3:]
    pieces, rest = [], data
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    joined = b"".join(whole_lines([*filter(None, pieces), rest] if rest else filter(None, pieces)))
    assert joined == (data if data.endswith(b"\n") or not data else data + b"\n")


def test_what_follows_a_carriage_return_is_marked() -> None:
    assert list(whole_lines([b"1%\r2%\n3%\r\n"])) == [b"1%\n" + REDRAWN + b"2%\n3%\n"]


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 3_000_000 + b"\n" + NINJA.encode())
    assert ids(log) == ["ninja-missing"]


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"]
)
def test_encodings(tmp_path: Path, encoding: str) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(("größer\n" * 20 + NINJA).encode(encoding))
    assert ids(log) == ["ninja-missing"]


def test_compressed_and_damaged(tmp_path: Path) -> None:
    whole = gzip.compress((NINJA * 1000).encode())
    (tmp_path / "a.log.gz").write_bytes(whole)
    (tmp_path / "b.log.gz").write_bytes(whole[: len(whole) - 20])
    (tmp_path / "c.log.gz").write_bytes(b"\x1f\x8bno")
    assert ids(tmp_path / "a.log.gz") == ["ninja-missing"]
    assert ids(tmp_path / "b.log.gz") == ["ninja-missing"]
    assert explain_paths([tmp_path / "c.log.gz"]).outcome == "unknown"


def test_standard_input_in_small_pieces() -> None:
    sources = find_sources(["-"], stdin=io.BytesIO(NINJA.encode()))
    assert explain_sources(sources).diagnoses[0].id == "ninja-missing"


def test_a_folder_of_ranks(tmp_path: Path) -> None:
    """torchrun's log folder: attempt, rank, stdout.log and stderr.log."""
    for rank in (0, 1):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
    (tmp_path / "attempt_0/0/stderr.log").write_text("Connection closed by peer\n")
    (tmp_path / "attempt_0/1/stderr.log").write_text(NINJA)
    (tmp_path / "attempt_0/1/model.pt").write_bytes(OOM.encode())
    (best,) = explain_paths([tmp_path]).diagnoses
    assert (best.id, best.rank) == ("ninja-missing", 1)


def test_the_last_attempt_of_the_last_run_is_read(tmp_path: Path) -> None:
    for number, (name, text) in enumerate([("old", OOM), ("new", NINJA)]):
        for attempt in (1, 2, 10):
            folder = tmp_path / "phalanx-logs" / name / f"attempt-{attempt}"
            folder.mkdir(parents=True)
            (folder / "rank-0.log").write_text(text if attempt == 10 else "PermissionError: [Errno 13]\n")
        run = tmp_path / "phalanx-logs" / name / "run.json"
        run.write_text("{}")
        os.utime(run, (1000 + number, 1000 + number))
    found = find_sources([], folder=tmp_path)
    assert [source.name for source in found] == [str(tmp_path / "phalanx-logs/new/attempt-10/rank-0.log")]
    assert ids(tmp_path / "phalanx-logs") == ["ninja-missing"]


def test_reports_are_read(tmp_path: Path) -> None:
    first = {"rank": 3, "local_rank": 1, "node": 1, "exception": "IndexError", "message": "Target 7 is out of bounds.",
             "traceback": 'Traceback (most recent call last):\n  File "/h/t.py", line 5, in <module>\n    f()\nIndexError: Target 7 is out of bounds.\n'}  # fmt: skip
    (tmp_path / "failure.json").write_text(
        json.dumps({"schema": 1, "first": first, "others": [], "diagnoses": []})
    )
    (best,) = explain_paths([tmp_path]).diagnoses
    assert (best.id, best.rank, best.where) == ("label-out-of-range", 3, "/h/t.py:5: f()")
    error = tmp_path / "elastic" / "2" / "error.json"
    error.parent.mkdir(parents=True)
    error.write_text(
        json.dumps({"message": {"message": "x", "extraInfo": {"py_callstack": NINJA, "timestamp": "1"}}})
    )
    assert ids(error) == ["ninja-missing"]
    for broken in ("", "[]", "{", '{"first": 3}', '{"message": 3}'):
        error.write_text(broken)
        assert explain_paths([error]).outcome in ("unknown", "no-failure")


@pytest.mark.parametrize("name", ["missing.log", "empty-folder"])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty-folder").mkdir()
    with pytest.raises(UsageMistake, match=f"{name}.*\nFix: "):
        find_sources([str(tmp_path / name)])


def test_without_a_last_run_it_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UsageMistake, match="Fix: phalanx explain LOG"):
        find_sources([], folder=tmp_path)


def test_line_numbers_are_those_of_the_file() -> None:
    log = "a\n10%\r20%\r30%\nb\r\n" + NINJA
    (best,) = explain_text(log, name="x.log").diagnoses
    assert best.evidence[0].startswith("x.log:4: RuntimeError")


def test_a_long_log_is_read_to_its_end_and_forgets_nothing() -> None:
    steps = "".join(f"[rank{n % 8}]: step {n} loss 0.{n}\n" for n in range(60_000))
    trace = 'Traceback (most recent call last):\n  File "/h/train.py", line 7, in <module>\n    f()\n'
    text = steps + "".join(f"[rank5]: {line}\n" for line in (trace + NINJA).splitlines())
    source = Source(name="x", stream=io.BytesIO(text.encode()))
    best = explain_sources([source]).diagnoses[0]
    assert (best.id, best.rank, best.where) == ("ninja-missing", 5, "/h/train.py:7: f()")
    assert explain_text(NINJA + steps).outcome == "no-failure"

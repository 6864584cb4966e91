"""Texts in parts, streams whose segments follow one another, and lines."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.recipes.settings import SettingsError
from phalanx.recipes.texts import UNKNOWN, InOrder, Lines, Streams, load_text


def test_the_text_that_comes_with_python_is_split_in_order() -> None:
    text = load_text(None, 0.1)
    whole = text.characters_of([*text.train.tolist(), *text.validation.tolist()])
    assert len(text.train) > 100_000
    assert len(text.test) == pytest.approx(0.1 * (len(whole) + len(text.test)), abs=2)
    assert len(text.validation) == pytest.approx(len(text.test) / 2, abs=2)
    assert "\ufffd" not in text.characters_of(text.train.tolist())
    assert 1 < text.gzip_bits < 4


def test_a_file_is_read_as_utf_8_and_unknown_characters_have_a_number(tmp_path: Path) -> None:
    content = "Grüße\n" * 40 + "x" * 10 + "Ω" * 40
    (tmp_path / "t.txt").write_text(content, encoding="utf-8")
    text = load_text(str(tmp_path / "t.txt"), 0.1)
    assert text.characters == "".join(sorted(set("Grüße\n" + "x")))
    assert set(text.test.tolist()) == {UNKNOWN}
    assert text.symbols == len(text.characters) + 1
    assert text.gzip_bits == 8 * len(gzip.compress(("Ω" * 29).encode(), 9)) / 29


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe" * 300, "is no UTF-8 text: byte 0 is 0xff.\nFix: iconv"),
        (b"short", "5 characters are too few"),
        (b"", "0 characters are too few"),
    ],
)
def test_what_is_no_text_is_one_message(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load_text(str(path), 0.1)
    assert told in str(caught.value)


@given(length=st.integers(1, 400), streams=st.integers(1, 7), segment=st.integers(1, 9))
def test_segments_of_a_stream_follow_one_another(length: int, streams: int, segment: int) -> None:
    numbers = torch.arange(length)
    if (length - 1) // (streams * segment) < 1:
        with pytest.raises(SettingsError, match="too few"):
            Streams(numbers, streams, segment)
        return
    items = Streams(numbers, streams, segment)
    read = [torch.cat([items[i][0] for i in range(stream, len(items), streams)]) for stream in range(streams)]
    following = [
        torch.cat([items[i][1] for i in range(stream, len(items), streams)]) for stream in range(streams)
    ]
    assert torch.cat(read).tolist() == list(range(items.segments * streams * segment))
    assert torch.equal(torch.cat(following), torch.cat(read) + 1)
    assert len(items) == streams * items.segments
    assert length - 1 - len(torch.cat(read)) < streams * segment


def test_in_order_is_in_order() -> None:
    assert list(InOrder(4)) == [0, 1, 2, 3]
    assert len(InOrder(4)) == 4


def test_lines_are_padded_and_start_after_a_newline() -> None:
    numbers = torch.tensor([5, 6, 1, 1, 7, 1, 8, 9])  # 1 is the newline
    lines = Lines(numbers, newline=1)
    assert [line.tolist() for line in lines.lines] == [[5, 6, 1], [7, 1], [8, 9]]
    assert lines.lengths == [3, 2, 2]
    before, after = lines.padded([lines[0], lines[1]])
    assert before.tolist() == [[1, 5, 6], [1, 7, 1]]
    assert after.tolist() == [[5, 6, 1], [7, 1, -100]]
    whole = Lines(numbers, newline=1, keep_empty=True)
    assert torch.equal(torch.cat(whole.lines), numbers)

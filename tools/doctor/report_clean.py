"""Pasted text as plain lines: colours, quoting, fences and odd punctuation taken off."""

from __future__ import annotations

import html
import re

LONGEST_TEXT = 2_000_000  # characters; of a longer one the two ends are read
LONGEST_LINE = 3_000

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|\x1b\][^\x07\x1b]{0,200}\x07?")
_TAG = re.compile(
    r"</?(?:details|summary|code|pre|b|i|p|br|div|span|li|ul|sub|strong|em)\b[^<>]{0,80}>", re.I
)
_QUOTE = re.compile(r"^(?:\s{0,8}>)+ ?")
_FENCE = re.compile(r"^\s{0,8}(?:```|~~~)[\w+.-]{0,20}\s*$")
_ODD = str.maketrans(
    {
        "：": ":",
        "﹕": ":",
        "∶": ":",
        "\u00a0": " ",
        "\u3000": " ",
        "\u200b": "",
        "\ufeff": "",
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
        "，": ",",
        "（": "(",
        "）": ")",
    }
)


def clean_lines(text: str) -> list[str]:
    """The lines of a report, as the tool printed them.

    >>> clean_lines("> ```\\r\\n> PyTorch version： 1.5.0\\r\\n> ```")
    ['PyTorch version: 1.5.0']
    """
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        text = text[:half] + "\n" + text[-half:]
    text = _ANSI.sub("", text).translate(_ODD).replace("\r\n", "\n").replace("\r", "\n")
    lines = []
    for line in text.split("\n"):
        plain = _plain(line[:LONGEST_LINE])
        if plain is not None:
            lines.append(plain)
    return lines


def _plain(line: str) -> str | None:
    line = _QUOTE.sub("", line)
    if _FENCE.match(line):
        return None
    if "<" in line:
        line = _TAG.sub(" ", line)
    if "&" in line:
        line = html.unescape(line)
    return line.replace("\x00", "").rstrip()

"""Blocks of bytes as blocks of whole lines: other encodings, carriage returns, lines without an end."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

#: Marks a line that is no line of the file, so that line numbers stay those of an editor.
REDRAWN = b"\x02"
_LONGEST = 256 * 1024  # bytes of one line; what is longer is cut into several


def _wide_encoding(head: bytes) -> str | None:
    """The encoding of text with two or four bytes a character, by its mark or its zeros."""
    for mark, name in (
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(mark):
            return name
    sample = head[:512]
    if len(sample) >= 16:
        even, odd = sample[0::2].count(0), sample[1::2].count(0)
        if odd > 0.4 * len(sample) > 20 * even:
            return "utf-16-le"
        if even > 0.4 * len(sample) > 20 * odd:
            return "utf-16-be"
    return None


def _narrow(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Blocks in UTF-8, or in whatever one-byte encoding they came in."""
    decoder = None
    is_first = True
    for block in blocks:
        if is_first:
            is_first = False
            name = _wide_encoding(block)
            if name is not None:
                decoder = codecs.getincrementaldecoder(name)(errors="replace")
            elif block.startswith(codecs.BOM_UTF8):
                block = block[3:]
        yield block if decoder is None else decoder.decode(block).encode(errors="replace")


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Blocks that end with a line's end; what follows a carriage return is a line that starts with `REDRAWN`.

    A progress bar redraws itself behind a carriage return, and an exception can follow on the same line.

    >>> list(whole_lines([b"10%\r20%\rKeyErr", b"or: 1\r\nend"]))
    [b'10%\n\x0220%\n', b'\x02KeyError: 1\n', b'end\n']
    """
    rest = b""
    for block in _narrow(blocks):
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n" + REDRAWN)
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
        while len(rest) > _LONGEST:
            yield rest[:_LONGEST] + b"\n"
            rest = rest[_LONGEST:]
    if rest:
        yield rest + b"\n"

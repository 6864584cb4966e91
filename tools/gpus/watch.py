"""The screen again and again, until Ctrl-C."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

_HOME, _CLEAR_REST, _CLEAR_LINE = "\033[H", "\033[J", "\033[K"
_OPEN, _CLOSE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"


def _rows(out: TextIO) -> int | None:
    """Lines that fit; one more would scroll the first away."""
    try:
        return max(1, os.get_terminal_size(out.fileno()).lines - 1)
    except OSError:
        return None


def watch(draw: Callable[[], str], every_s: float, stream: TextIO | None = None) -> None:
    """Show what ``draw`` returns every ``every_s`` seconds; returns at Ctrl-C.

    On a terminal in place, on a screen of its own that leaves what was there; elsewhere one after another, with an
    empty line between them.
    """
    out = sys.stdout if stream is None else stream
    own_screen = out.isatty()
    try:
        if own_screen:
            out.write(_OPEN)
        while True:
            begun = time.monotonic()
            text = draw()
            if own_screen:
                lines = text.split("\n")[: _rows(out)]
                out.write(_HOME + "\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_REST)
            else:
                out.write(text + "\n\n")
            out.flush()
            time.sleep(max(0.0, begun + every_s - time.monotonic()))
    except KeyboardInterrupt:
        return
    finally:
        if own_screen:
            out.write(_CLOSE)
            out.flush()

"""Python tracebacks put together again, per stream, out of lines that may be interleaved."""

from __future__ import annotations

import re
from collections.abc import Iterable

from phalanx.tools.explain.events import Frame, Line, Stream, Traceback

HEAD = "Traceback (most recent call last)"
_FRAME = re.compile(r'\s*File "([^"\n]{1,500})", line (\d{1,8})(?:, in (.{1,200}))?\s*$')
_EXCEPTION = re.compile(r"((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80})(?:: ?(.{0,8000}))?$")
_BOX = re.compile(r"^[│|╭╰─┃]")  # tracebacks that rich draws
_RICH_HEAD = re.compile(r"^╭─+ Traceback \(most recent call last\)")
_RICH_FRAME = re.compile(r"^│ (\S{1,300}?):(\d{1,8}) in (\S{1,200})")
_NOT_A_NAME = frozenset({"Traceback", "During", "The", "Original", "Loading", "Epoch", "File", "Error"})
_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_MARKS = re.compile(r"^\s*[\^~]+\s*$|^\s*\[Previous line repeated")
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python\d|\\lib\\|/lib64/python\d|^<frozen |^<string>|^<__array_function__"
    r"|/torch/(?:nn|utils|distributed|optim|autograd|cuda|serialization|_)|/deepspeed/(?:runtime|ops|launcher|comm)"
    r"|/(?:usr|opt/conda|anaconda3?|miniconda3?)/(?:envs/[^/]+/)?bin/|/importlib/",
    re.IGNORECASE,
)
_LIMIT = 400  # lines of one traceback; deeper ones are cut
_OPEN_LIMIT = 64  # tracebacks that are open at the same time
_NAME_ENDS = (
    "Error",
    "Exception",
    "Interrupt",
    "Exit",
    "Timeout",
    "Failure",
    "Mismatch",
    "Iteration",
)


def is_users(frame: Frame) -> bool:
    """Whether a frame is in the user's own code rather than in an installed package."""
    return not _LIBRARY.search(frame.file)


def user_frame(traceback: Traceback) -> Frame | None:
    """The innermost frame of the user's own code."""
    for frame in reversed(traceback.frames):
        if is_users(frame):
            return frame
    return None


def exception_in(text: str) -> tuple[str, str] | None:
    """``("ValueError", "boom")`` for the last line of a traceback, also one that stands alone.

    >>> exception_in("torch.cuda.OutOfMemoryError: CUDA out of memory.")
    ('torch.cuda.OutOfMemoryError', 'CUDA out of memory.')
    >>> exception_in("see the error above: it is odd") is None
    True
    """
    found = _EXCEPTION.match(text.strip()[:9000])
    if not found or found[1] in _NOT_A_NAME:
        return None
    name = found[1].rpartition(".")[2]
    if name.startswith("nccl") or not (name.endswith(_NAME_ENDS) or (name[:1].isupper() and "." in found[1])):
        return None
    return found[1], found[2] or ""


class Tracebacks:
    """Assembles tracebacks while lines pass by; `closed` holds those that have ended."""

    def __init__(self) -> None:
        self.closed: list[Traceback] = []
        self._open: dict[Stream, tuple[Traceback, int]] = {}
        self._last: dict[Stream, Traceback] = {}
        self._chain: dict[Stream, Traceback] = {}
        self._harmless_next: set[Stream] = set()

    @property
    def is_reading(self) -> bool:
        """Whether a traceback is open, so that every line counts."""
        return bool(self._open)

    def current(self, line: Line) -> Traceback | None:
        """The traceback that a line of this stream would belong to: an open one, or the one just ended."""
        held = self._open.get(line.stream)
        return held[0] if held else self._last.get(line.stream)

    def feed(self, line: Line) -> Traceback | None:
        """Take one line; returns a traceback when this line ends it."""
        stream, text = line.stream, line.text
        if HEAD in text:
            self._start(line)
            return None
        if text.startswith(_CHAINED):
            if stream in self._last:
                self._chain[stream] = self._last[stream]
            return None
        if text.startswith("Exception ignored in"):
            self._harmless_next.add(stream)
            return None
        held = self._open.get(stream)
        if held is None:
            return None
        traceback, count = held
        self._open[stream] = (traceback, count + 1)
        return self._take(traceback, line, count)

    def _start(self, line: Line) -> None:
        stream = line.stream
        held = self._open.get(stream)
        if held and not held[0].frames and "Original" not in line.text:
            return  # two ranks without prefixes, interleaved
        if held:
            self._close(stream, held[0])
        if len(self._open) >= _OPEN_LIMIT:
            self.finish()
        traceback = Traceback(head=line, is_harmless=stream in self._harmless_next)
        self._harmless_next.discard(stream)
        before = self._chain.pop(stream, None)
        if before is not None:
            before.replaced_by = line.order
        self._open[stream] = (traceback, 0)

    def _take(self, traceback: Traceback, line: Line, count: int) -> Traceback | None:
        text = line.text
        frame = _FRAME.match(text) or _RICH_FRAME.match(text)
        if frame:
            name = (frame[3] or "").strip()
            traceback.frames.append(Frame(file=frame[1], line=int(frame[2]), function=name))
            return None
        if _BOX.match(text) or _MARKS.match(text) or not text.strip():
            return None
        if text[0].isspace() or text.startswith("❱"):
            self._add_code(traceback, text)
        else:
            found = exception_in(text) or self._odd_exception(text, traceback)
            if found:
                traceback.exception, message = found
                traceback.message = [message] if message else []
                traceback.end = line
                return self._close(line.stream, traceback)
        if count >= _LIMIT:
            return self._close(line.stream, traceback)
        return None

    @staticmethod
    def _odd_exception(text: str, traceback: Traceback) -> tuple[str, str] | None:
        """A name that does not look like an exception, right after frames."""
        found = _EXCEPTION.match(text.strip()[:9000])
        if not found or not traceback.frames or found[1] in _NOT_A_NAME:
            return None
        return (found[1], found[2] or "") if ":" in text or text.strip() == found[1] else None

    @staticmethod
    def _add_code(traceback: Traceback, text: str) -> None:
        if traceback.frames and not traceback.frames[-1].code:
            last = traceback.frames[-1]
            traceback.frames[-1] = Frame(
                file=last.file, line=last.line, function=last.function, code=text.strip()[:300]
            )

    def _close(self, stream: Stream, traceback: Traceback) -> Traceback:
        self._open.pop(stream, None)
        traceback.is_closed = bool(traceback.exception)
        self.closed.append(traceback)
        self._last[stream] = traceback
        return traceback

    def stand_alone(self, line: Line, exception: str, message: str) -> Traceback | None:
        """An exception's line without a traceback above it, as in what people paste; None if it belongs to one."""
        if self.current(line) is not None:
            return None
        traceback = Traceback(head=line, exception=exception, message=[message], end=line, is_closed=True)
        self._last[line.stream] = traceback
        return traceback

    def finish(self) -> None:
        """The log has ended: what is open stays without an exception."""
        for stream, (traceback, _) in list(self._open.items()):
            self._close(stream, traceback)


def rooted(tracebacks: Iterable[Traceback]) -> list[Traceback]:
    """Those that are closed, in the order in which they ended."""
    return sorted((t for t in tracebacks if t.exception), key=lambda t: t.order)

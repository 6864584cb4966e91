"""One pass over a log: lines that rules know, tracebacks, facts, and whether the run went on afterwards.

A training log repeats itself: the same line, with other numbers. So lines are looked at by their shape
(the line without its digits). A shape that no rule, fact or traceback wants is remembered and costs next
to nothing from then on; that is what lets gigabytes pass in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.tools.explain.decoding import REDRAWN, whole_lines
from phalanx.tools.explain.events import Hit, Line, Stream, Traceback
from phalanx.tools.explain.lines import make_line
from phalanx.tools.explain.log_facts import MANY_STEPS, SIGNS, Fact, Facts, health_of
from phalanx.tools.explain.rule import Rule
from phalanx.tools.explain.rules import TRACEBACK_WORDS, Entry, candidates, index
from phalanx.tools.explain.sources import Source
from phalanx.tools.explain.tracebacks import HEAD, Tracebacks, exception_in
from phalanx.tools.explain.vocabulary import Vocabulary, lines_with

BLOCK_BYTES = 1 << 20
_DIGITS = b"0123456789"
_MAX_SHAPES = 100_000  # of lines that nobody wants
_SAMPLED_SPARSELY = 64
_SAMPLED = 16  # of the steps in a large log one in so many is looked at
_SMALL = 20_000  # lines of one source; in more than that, wrapped lines are not put together again
_ESCAPED = b'\\n  File \\"'  # a traceback inside of JSON, as torch's elastic agent logs it
_EXCEPTIONS = (b"Error", b"Exception", b"Interrupt", b"Failure", b"Exit", b"Timeout")
_LOOKED_AT = 50  # last lines of a block of which each is new, to see whether the run goes on
_MISSES = 64  # times that a shape was looked at in vain, until it is taken for one that nobody wants
_MAX_HITS = 2_000  # of one rule; the first count
_MAX_TRACEBACKS = 2_000
_MAX_LINE = 6_000  # of one line is matched, its two ends
_MAX_WRAPPED = 400  # a longer line was not wrapped by a terminal
_AFTER_TRACEBACK = 60  # lines that still belong to its message
_CONTEXT = 40  # lines before a time-out that are kept


@dataclass
class Scan:
    """What one pass found."""

    hits: list[Hit] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    signs: list[Line] = field(default_factory=list)
    #: Order and worth of lines of a run that goes on, per stream.
    health: dict[Stream, list[tuple[int, int]]] = field(default_factory=dict)
    context: list[str] = field(default_factory=list)
    line_count: int = 0

    def worth_after(self, order: int, stream: Stream | None = None) -> int:
        """How much speaks for a run that went on after line ``order`` (in one stream)."""
        streams = [self.health.get(stream, [])] if stream else list(self.health.values())
        return sum(worth for marks in streams for at, worth in marks if at > order)


class Scanner:
    """Reads sources one after another into one `Scan`."""

    def __init__(self) -> None:
        self.scan = Scan()
        self._boring: set[bytes] = set()
        self._healthy: set[bytes] = set()
        self._counts: dict[str, int] = {}
        self._misses: dict[bytes, int] = {}
        self._order = 0
        self._words = Vocabulary(index())
        self._keys: set[bytes] = set()

    def read(self, source: Source) -> None:
        """Read one source to its end."""
        self._source = source
        self._number = 0
        self._time: float | None = None
        self._tracebacks = Tracebacks()
        self._recent: deque[bytes] = deque(maxlen=_CONTEXT)
        self._waiting: tuple[Line, list[Rule]] | None = None
        for block in whole_lines(source.blocks(BLOCK_BYTES)):
            self._read_block(block)
        self._tracebacks.finish()
        self._keep_tracebacks()
        self.scan.line_count += self._number

    def _read_block(self, block: bytes) -> None:
        lines = block[:-1].split(b"\n")
        shapes = block[:-1].translate(None, _DIGITS).split(b"\n")
        if not self._tracebacks.is_reading and self._boring.issuperset(shapes):
            self._skip(block, lines, not self._healthy.isdisjoint(shapes))
            return
        self._keys = self._words.keys_in(block)
        if not self._keys and not self._tracebacks.is_reading:
            self._learn(lines, shapes)
            self._skip(block, lines, any(health_of(line.decode("latin-1")) for line in lines[-_LOOKED_AT:]))
            return
        is_large = self._number > _SMALL and REDRAWN not in block
        if is_large and not self._tracebacks.is_reading:
            self._read_sparsely(block, lines, shapes)
        else:
            self._read_lines(lines, shapes)
        self._recent.extend(lines[-_CONTEXT:])

    def _read_sparsely(self, block: bytes, lines: list[bytes], shapes: list[bytes]) -> None:
        """Of a block in a large log only the lines that hold a key, and those of a traceback behind one."""
        order, number, done = self._order, self._number, 0
        for first in lines_with(block, lines, self._keys):
            at = max(first, done)
            while at < len(lines) and (at == first or self._tracebacks.is_reading):
                self._order, self._number = order + at + 1, number + at + 1
                if self._tracebacks.is_reading or shapes[at] not in self._boring:
                    self._take(lines[at], shapes[at], lines, at)
                at += 1
            done = max(done, at)
        if self.scan.hits or self.scan.tracebacks or self.scan.signs:
            for at in range(0, len(lines), _SAMPLED_SPARSELY):
                self._order = order + at + 1
                self._note_health(lines[at], _SAMPLED_SPARSELY)
        self._order, self._number = order + len(lines), number + len(lines)
        self._learn(lines, shapes)

    def _read_lines(self, lines: list[bytes], shapes: list[bytes]) -> None:
        """The lines of a block in which something may matter, one by one."""
        boring, healthy, keys = self._boring, self._healthy, tuple(self._keys)
        for number, shape in enumerate(shapes):
            data = lines[number]
            self._order += 1
            if not data.startswith(REDRAWN):
                self._number += 1
            if not self._tracebacks.is_reading:
                if shape in boring:
                    if shape in healthy and (number % _SAMPLED == 0 or self._number <= _SMALL):
                        self._note_health(data, 1 if self._number <= _SMALL else _SAMPLED)
                    continue
                lower = data.lower()
                for key in keys:
                    if key in lower:
                        break
                else:
                    if self._waiting is None:
                        self._bore(data, shape)
                        continue
            self._take(data, shape, lines, number)

    def _learn(self, lines: list[bytes], shapes: list[bytes]) -> None:
        """Take shapes for boring, as long as they repeat: what is new in every line is not worth it."""
        examples = dict(zip(shapes, lines, strict=True))
        if len(examples) * 4 < len(shapes) or len(lines) < _LOOKED_AT:
            for shape, data in examples.items():
                lower = data.lower()
                if shape not in self._boring and not any(key in lower for key in self._keys):
                    self._bore(data, shape)

    def _skip(self, block: bytes, lines: list[bytes], is_healthy: bool) -> None:
        """A block in which nothing is new."""
        if is_healthy:
            self._mark(("", ""), self._order + len(lines), len(lines))
            self._mark((self._source.name, ""), self._order + len(lines), len(lines))
        self._order += len(lines)
        self._number += len(lines) - block.count(b"\n" + REDRAWN) - block.startswith(REDRAWN)
        self._recent.extend(lines[-_CONTEXT:])

    def _mark(self, stream: Stream, order: int, worth: int) -> None:
        marks = self.scan.health.setdefault(stream, [])
        if len(marks) >= 4096:  # what is old may count together: only what comes last decides
            marks[:2048] = [(marks[2047][0], sum(w for _, w in marks[:2048]))]
        marks.append((order, worth))

    def _note_health(self, data: bytes, weight: int = 1) -> None:
        """Progress counts only after something that looked like a failure."""
        if not (self.scan.hits or self.scan.tracebacks or self.scan.signs):
            return
        line = self._line(data)
        worth = health_of(line.text)
        if worth:
            self._mark(line.stream, self._order, worth * weight)

    def _line(self, data: bytes) -> Line:
        if len(data) > _MAX_LINE:
            data = data[: _MAX_LINE // 2] + b" .. " + data[-_MAX_LINE // 2 :]
        return make_line(
            data,
            source=self._source.name,
            number=self._number,
            order=self._order,
            rank=self._source.rank,
            time=self._time,
        )

    def _take(self, data: bytes, shape: bytes, lines: list[bytes], number: int) -> None:
        """A line that is new, or known to matter."""
        if _ESCAPED in data:
            for part in data.replace(b'\\"', b'"').split(b"\\n"):
                self._take_one(part, part, lines, number)
            return
        self._take_one(data, shape, lines, number)

    def _take_one(self, data: bytes, shape: bytes, lines: list[bytes], number: int) -> None:
        lower = data.lower()
        wanted: list[Entry] = []
        wanted_before = False
        is_traceback = False
        if any(key in lower for key in self._keys):
            seen = self.scan.facts
            wanted = [
                e
                for e in candidates(lower, self._keys)
                if not (isinstance(e, Fact) and e.once and seen.has(e.name))
            ]
            is_traceback = any(word in lower for word in TRACEBACK_WORDS)
            wanted_before = bool(wanted)
            if wanted and self._number > _SMALL:
                raw = data[:_MAX_LINE].decode(errors="replace")
                wanted = [entry for entry in wanted if entry.may_fit(raw)]
        is_alone = not (wanted or is_traceback or self._tracebacks.is_reading or self._waiting)
        if is_alone and not any(word in data for word in _EXCEPTIONS):
            (self._miss if wanted_before else self._bore)(data, shape)
            return
        line = self._line(data)
        self._time = line.time
        if line.rank is not None:
            self.scan.facts.ranks.add(line.rank)
        closed = None
        if is_traceback or self._tracebacks.is_reading:
            closed = self._tracebacks.feed(line)
            self._keep_tracebacks()
        self._join_waiting(line)
        told = self._apply(line, wanted, closed, lines, number)
        if told or closed or is_traceback:
            return
        worth = health_of(line.text)
        if worth:
            self._mark(line.stream, self._order, worth)
        else:
            self._lone_exception(line)
        self._miss(data, shape)

    def _miss(self, data: bytes, shape: bytes) -> None:
        """A line with the words of a rule that does not fit it."""
        count = self._misses[shape] = self._misses.get(shape, 0) + 1
        if count >= _MISSES and not self._tracebacks.is_reading:
            self._bore(data, shape)
        elif len(self._misses) >= _MAX_SHAPES:
            self._misses.clear()

    def _bore(self, data: bytes, shape: bytes) -> None:
        if len(self._boring) >= _MAX_SHAPES:
            self._boring.clear()
            self._healthy.clear()
            self._misses.clear()
        self._boring.add(shape)
        if (data != shape or self._number <= _SMALL) and health_of(data[:400].decode("latin-1")):
            self._healthy.add(shape)
            self._note_health(data)

    def _lone_exception(self, line: Line) -> None:
        found = exception_in(line.text)
        if found is not None and len(self.scan.tracebacks) < _MAX_TRACEBACKS:
            alone = self._tracebacks.stand_alone(line, *found)
            if alone is not None:
                self.scan.tracebacks.append(alone)

    def _apply(
        self, line: Line, wanted: Iterable[Entry], closed: Traceback | None, lines: list[bytes], number: int
    ) -> bool:
        """Whether anything fits the line."""
        told = False
        is_exception = closed is not None or exception_in(line.text) is not None
        missed: list[Rule] = []
        for entry in wanted:
            if isinstance(entry, Fact):
                told |= self._apply_fact(entry, line)
            elif not entry.exception or is_exception:
                groups = entry.match(line.text)
                if groups is None:
                    missed.append(entry)
                else:
                    told = True
                    self._hit(entry, line, groups, closed, lines, number)
        waits = missed or (is_exception and not told)
        self._waiting = (line, missed) if waits and self._number <= _SMALL else None
        return told

    def _join_waiting(self, line: Line) -> None:
        """Try what did not fit a line on that line with the next: terminals and mails wrap lines."""
        if self._waiting is None:
            return
        before, rules = self._waiting
        self._waiting = None
        if before.stream != line.stream or HEAD in line.text or len(before.text) > _MAX_WRAPPED:
            return
        text = f"{before.text} {line.text.strip()}"
        if not rules:
            lower = text[:_MAX_LINE].lower().encode(errors="replace")
            rules = [entry for entry in candidates(lower, self._keys) if isinstance(entry, Rule)]
        for rule in rules:
            groups = rule.match(text)
            if groups is not None and rule.match(line.text) is None:
                self._hit(rule, before, groups, None, [], 0)

    def _apply_fact(self, fact: Fact, line: Line) -> bool:
        found = fact.search(line.text)
        if not found:
            return False
        if fact is SIGNS:
            if len(self.scan.signs) >= 200:
                self.scan.signs.pop(100)
            self.scan.signs.append(line)
        else:
            self.scan.facts.add(
                fact.name, line, {k: v for k, v in found.groupdict().items() if v is not None}
            )
        return True

    def _hit(
        self,
        rule: Rule,
        line: Line,
        groups: dict[str, str],
        closed: Traceback | None,
        lines: list[bytes],
        number: int,
    ) -> None:
        count = self._counts[rule.id] = self._counts.get(rule.id, 0) + 1
        if count > _MAX_HITS:
            return
        traceback = closed
        if traceback is None:
            near = self._tracebacks.current(line)
            if near is not None and line.order - near.order <= _AFTER_TRACEBACK and not near.is_harmless:
                traceback = near
        if rule.refine == "timeout" and not self.scan.context:
            recent = [*self._recent, *lines[max(0, number - _CONTEXT) : number + 1]][-_CONTEXT:]
            self.scan.context = [raw.decode(errors="replace")[:400] for raw in recent]
        self.scan.hits.append(Hit(rule_id=rule.id, line=line, groups=groups, traceback=traceback))

    def _keep_tracebacks(self) -> None:
        closed, self._tracebacks.closed = self._tracebacks.closed, []
        kept = self.scan.tracebacks
        for traceback in closed:
            if len(kept) >= _MAX_TRACEBACKS:
                kept.pop(_MAX_TRACEBACKS // 2)  # the first and the last ones count
            kept.append(traceback)


def scan_sources(sources: Iterable[Source]) -> Scan:
    """Read everything once."""
    scanner = Scanner()
    for source in sources:
        scanner.read(source)
    return scanner.scan


__all__ = ["BLOCK_BYTES", "MANY_STEPS", "Scan", "Scanner", "scan_sources"]

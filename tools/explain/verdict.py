"""From everything that a log told to one outcome: the first cause in time and kind, and the next best."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from phalanx.tools.explain.events import Hit, Line, Traceback
from phalanx.tools.explain.explanation import Diagnosis, Explanation, FirstFailure
from phalanx.tools.explain.log_facts import MANY_STEPS
from phalanx.tools.explain.refinements import Refined, refinements
from phalanx.tools.explain.rule import Kind, Rule, fill
from phalanx.tools.explain.rules import BY_ID
from phalanx.tools.explain.scanning import Scan
from phalanx.tools.explain.tracebacks import user_frame

_LEVELS: dict[Kind, int] = {"cause": 0, "symptom": 2, "warning": 3, "consequence": 4}
_CAUGHT = 10
_NEAR = 15  # lines of one stream this close are about one failure
_MOST = 3  # diagnoses that are shown
_MOST_HITS = 24  # of one rule are judged, at either end
_EVIDENCE_CHARS = 300
#: Exceptions that only say that another process failed.
_SECONDHAND = re.compile(
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|CalledProcessError|SystemExit|RayTaskError|SignalException"
    r"|DistBackendError|DistNetworkError|DistStoreError|BrokenPipeError|ConnectionResetError|EOFError|KeyboardInterrupt|WorkerCrashedError"
)
_SECONDHAND_TEXT = re.compile(
    r"Connection (?:closed|reset)|Broken pipe|NCCL communicator|Socket Timeout|wait timeout|DataLoader worker \(pid"
    r"|Pin memory thread exited|Timed out waiting|NCCL error|Gloo connectFullMesh|died with <Signals|rank \d+ ended first",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A diagnosis with what decides its place."""

    rule: Rule
    refined: Refined
    hit: Hit
    level: int
    cluster: int
    position: int  # among what one hit stands for


def explain_scan(scan: Scan) -> Explanation:
    """The verdict over one pass."""
    found = _candidates(scan)
    live = [candidate for candidate in found if candidate.level < _CAUGHT]
    first = _first_failure(scan)
    standing = _standing(scan)
    if not live and first is None and not _ended_badly(scan):
        outcome = "explained" if standing else "no-failure" if scan.line_count else "unknown"
        return Explanation(outcome=outcome, diagnoses=tuple(standing), line_count=scan.line_count)  # type: ignore[arg-type]
    ordered = _by_cause(live or found, scan)
    causes = [candidate for candidate in ordered if candidate.level % _CAUGHT < _LEVELS["consequence"]]
    if causes and _is_overruled(causes[0], first, scan):
        causes = []
    if causes and causes[0].level == 0:  # "the log does not explain it" is then no longer true
        causes = [candidate for candidate in causes if candidate.rule.id != "nccl-timeout-unknown"]
    diagnoses = [_diagnosis(candidate, scan) for candidate in causes]
    diagnoses = _unique([*diagnoses, *standing])
    if not diagnoses:
        return Explanation(outcome="unknown", first_failure=first, line_count=scan.line_count)
    return Explanation(
        outcome="explained",
        diagnoses=tuple(diagnoses[:_MOST]),
        first_failure=first,
        line_count=scan.line_count,
    )


# --------------------------------------------------------------------------- candidates


def _candidates(scan: Scan) -> list[Candidate]:
    found: list[Candidate] = []
    clusters = _clusters(scan.hits)
    ended_badly = _ended_badly(scan)
    for hit in _judged(scan.hits):
        rule = BY_ID[hit.rule_id]
        caught = _CAUGHT if not ended_badly and _went_on(scan, hit.line, hit.traceback) else 0
        refine = refinements().get(rule.refine)
        for position, refined in enumerate(
            refine(hit, scan) if refine else [Refined(id=rule.id, groups=hit.groups)]
        ):
            own = BY_ID[refined.id]
            kind = refined.kind or rule.kind
            is_aside = position > 0 or _is_warning(hit)
            level = _LEVELS[kind] + caught + (1 if is_aside and kind == "cause" else 0)
            if kind == "warning":
                level = _LEVELS["warning"] + (caught and _CAUGHT)
            found.append(
                Candidate(
                    rule=own,
                    refined=refined,
                    hit=hit,
                    level=level,
                    cluster=clusters[id(hit)],
                    position=position,
                )
            )
    if (
        not any(c.level < _LEVELS["warning"] for c in found)
        and not ended_badly
        and _first_failure(scan) is None
    ):
        # Warnings alone are no failure.
        found = [replace(c, level=c.level + _CAUGHT) if c.level == _LEVELS["warning"] else c for c in found]
    return found


_WARNING = re.compile(r"\bWARN(?:ING)?\b|UserWarning|FutureWarning|^\[?W\d{3,4} |^\[W ")


def _is_warning(hit: Hit) -> bool:
    """Whether a line calls itself a warning: an exception elsewhere is then more likely the cause."""
    is_message = hit.traceback is not None and hit.traceback.end is not None and hit.traceback.end is hit.line
    return not is_message and "NCCL WARN" not in hit.line.raw and bool(_WARNING.search(hit.line.raw[:300]))


def _judged(hits: Sequence[Hit]) -> list[Hit]:
    """The first and the last hits of each rule: the first may have done no harm, and later ones add nothing."""
    by_rule: dict[str, list[Hit]] = {}
    for hit in hits:
        if hit.traceback is None or not hit.traceback.is_harmless:
            by_rule.setdefault(hit.rule_id, []).append(hit)
    kept = [h for own in by_rule.values() for h in (*own[:_MOST_HITS], *own[_MOST_HITS:][-_MOST_HITS:])]
    return sorted(kept, key=lambda hit: hit.line.order)


def _clusters(hits: Sequence[Hit]) -> dict[int, int]:
    """For each hit the first line of the failure that it belongs to."""
    result: dict[int, int] = {}
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for hit in sorted(hits, key=lambda hit: hit.line.order):
        stream, order = hit.line.stream, hit.line.order
        if hit.traceback is not None:
            order = min(order, hit.traceback.head.order)
        before = last.get(stream)
        start = before[0] if before and order - before[1] <= _NEAR else order
        last[stream] = (start, hit.line.order)
        result[id(hit)] = start
    return result


def _went_on(scan: Scan, line: Line, traceback: Traceback | None) -> bool:
    """Whether the run went on after a line, so that what it says did no harm."""
    own = scan.worth_after(line.order, line.stream)
    if own >= 2:
        return True
    after = scan.worth_after(line.order, (line.source, ""))
    return after >= (20 if line.rank is not None or line.label else 2)


def _ended_badly(scan: Scan) -> bool:
    """Whether a launcher, the shell or the interpreter says so, and nothing went on after that."""
    return bool(scan.signs) and scan.worth_after(scan.signs[-1].order) < 2


def _by_cause(found: Iterable[Candidate], scan: Scan) -> list[Candidate]:
    """Kind before time, time before weight; of one failure the most specific."""
    preferred = scan.facts.first_rank
    times = {candidate.hit.line.source: candidate.hit.line.time for candidate in found}
    use_time = len(times) > 1 and all(moment is not None for moment in times.values())

    def key(candidate: Candidate) -> tuple[float, ...]:
        line = candidate.hit.line
        is_first = preferred is not None and line.rank == preferred
        moment = (line.time or 0.0) if use_time else 0.0
        return (
            candidate.level,
            candidate.position,
            0 if is_first and candidate.level < 2 else 1,
            moment,
            candidate.cluster,
            -candidate.rule.weight,
            line.order,
        )

    ordered: list[Candidate] = []
    seen: set[str] = set()
    for candidate in sorted(found, key=key):
        if candidate.rule.id not in seen:
            seen.add(candidate.rule.id)
            ordered.append(candidate)
    return _beaten_last(ordered)


def _beaten_last(ordered: list[Candidate]) -> list[Candidate]:
    """Views of another cause come after it."""
    for winner in list(ordered):
        losers = [c for c in ordered if c.rule.id in winner.rule.beats and c.rule.id != winner.rule.id]
        first = min((ordered.index(c) for c in losers), default=len(ordered))
        if (
            winner.position == 0
            and first < ordered.index(winner)
            and winner.level % _CAUGHT <= _LEVELS["warning"]
        ):
            ordered.remove(winner)
            ordered.insert(first, winner)
    return ordered


def _is_overruled(best: Candidate, first: FirstFailure | None, scan: Scan) -> bool:
    """A symptom is not named where another rank's own exception, unknown to the rules, came first."""
    if best.level < _LEVELS["symptom"] or first is None or best.rule.id in ("ended-from-outside",):
        return False
    known = {
        id(hit.traceback) for hit in scan.hits if hit.traceback is not None and hit.rule_id not in _HOLLOW
    }
    for traceback in _failures(scan):
        if _is_secondhand(traceback) or id(traceback) in known:
            continue
        return traceback.order < best.hit.line.order
    return False


_HOLLOW = frozenset({"another-rank-failed", "peer-lost"})


# --------------------------------------------------------------------------- tracebacks


def _failures(scan: Scan) -> list[Traceback]:
    """Tracebacks that ended a process, in time."""
    ended_badly = _ended_badly(scan)
    return sorted(
        (
            t
            for t in scan.tracebacks
            if t.exception and not t.is_harmless and t.replaced_by is None
            and (ended_badly or not _went_on(scan, t.end or t.head, t))
        ),
        key=lambda t: t.order,
    )  # fmt: skip


def _is_secondhand(traceback: Traceback) -> bool:
    return bool(_SECONDHAND.search(traceback.exception) or _SECONDHAND_TEXT.search(traceback.text))


def _first_failure(scan: Scan) -> FirstFailure | None:
    found = _failures(scan)
    if not found:
        return None
    preferred = scan.facts.first_rank
    first = min(
        found,
        key=lambda t: (
            _is_secondhand(t),
            0 if preferred is not None and t.head.rank == preferred else 1,
            t.order,
        ),
    )
    return FirstFailure(
        rank=first.head.rank,
        exception=first.exception.rpartition(".")[2],
        message=" ".join(" ".join(first.message).split())[:500],
        where=_where(first),
        place=(first.end or first.head).place,
    )


def _where(traceback: Traceback | None) -> str | None:
    frame = user_frame(traceback) if traceback is not None else None
    if frame is None:
        return None
    text = f"{frame.file}:{frame.line}"
    if frame.function and frame.function != "<module>":
        text += f" in {frame.function}"
    return f"{text}: {frame.code}" if frame.code else text


# --------------------------------------------------------------------------- diagnoses


def _diagnosis(candidate: Candidate, scan: Scan) -> Diagnosis:
    hit, rule = candidate.hit, candidate.rule
    groups = dict(candidate.refined.groups)
    traceback = hit.traceback or _chained(hit, scan)
    rank = hit.line.rank
    if rank is None and hit.groups.get("at_rank", "").isdigit():
        rank = int(hit.groups["at_rank"])
    if rank is None and not _several_ranks(scan):
        rank = scan.facts.first_rank
    return Diagnosis(
        id=rule.id,
        rank=rank,
        cause=rule.in_words(groups),
        fix=tuple(fill(rule.fix, groups)),
        evidence=tuple(_evidence(candidate, scan)),
        where=_where(traceback),
        look=tuple(fill(rule.look, groups)),
    )


def _several_ranks(scan: Scan) -> bool:
    return len(scan.facts.ranks) > 1 and scan.facts.first_rank is None


def _chained(hit: Hit, scan: Scan) -> Traceback | None:
    """A line that stands by itself may still be the message of a traceback that ends right there."""
    for traceback in scan.tracebacks:
        end = (traceback.end or traceback.head).order
        same = traceback.head.stream == hit.line.stream
        if same and traceback.exception and 0 <= end - hit.line.order <= 30:
            return traceback
    return None


def _evidence(candidate: Candidate, scan: Scan) -> list[str]:
    lines: dict[str, str] = {}
    for hit in [candidate.hit, *scan.hits]:
        near = hit.line.stream == candidate.hit.line.stream or hit is candidate.hit
        if hit.rule_id == candidate.hit.rule_id and near and len(lines) < 3:
            text = " ".join(hit.line.text.split())
            lines.setdefault(text, f"{hit.line.place}: {text[:_EVIDENCE_CHARS]}")
    return list(lines.values())


def _unique(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    return list({diagnosis.id: diagnosis for diagnosis in reversed(list(diagnoses))}.values())[::-1]


# --------------------------------------------------------------------------- what shows without a failure


def _standing(scan: Scan) -> list[Diagnosis]:
    """Causes that a log shows though nothing in it fails."""
    found = []
    zero = scan.facts.of("rank-zero-of-one")
    if len(zero) > 1 and _is_repeated(zero):
        found.append(
            _of_lines("every-process-is-rank0", [line for line, _ in zero], {"count": str(len(zero))})
        )
    by_pid: dict[str, set[str]] = {}
    rows = scan.facts.of("gpu-process")
    for _, groups in rows:
        by_pid.setdefault(groups["pid"], set()).add(groups["gpu"])
    shared = [pid for pid, gpus in by_pid.items() if "0" in gpus and len(gpus) > 1]
    if shared:
        lines = [line for line, groups in rows if groups["pid"] in shared and groups["gpu"] == "0"]
        found.append(_of_lines("checkpoint-loaded-on-gpu0", lines, {"pids": ", ".join(shared)}))
    return found


def _is_repeated(zero: Sequence[tuple[Line, dict[str, str]]]) -> bool:
    """The same words several times, and not of a run that was started again and again."""
    texts = [re.sub(r"\d\d:\d\d:\d\d\S*|pid[= ]\d+", "", line.text).strip() for line, _ in zero[:64]]
    most = max(set(texts), key=texts.count)
    same = [line for (line, _), text in zip(zero[:64], texts, strict=False) if text == most]
    return len(same) > 1 and same[-1].order - same[0].order < 200 * len(same)


def _of_lines(id: str, lines: Sequence[Line], groups: dict[str, str]) -> Diagnosis:
    rule = BY_ID[id]
    return Diagnosis(
        id=id,
        rank=None,
        cause=rule.in_words(groups),
        fix=tuple(fill(rule.fix, groups)),
        evidence=tuple(
            f"{line.place}: {' '.join(line.text.split())[:_EVIDENCE_CHARS]}" for line in lines[:3]
        ),
        look=rule.look,
    )


__all__ = ["MANY_STEPS", "explain_scan"]

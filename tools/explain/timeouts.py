"""Why ranks waited until a time-out: who came, who did not, and what was going on before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from phalanx.tools.explain.events import Hit, Traceback
from phalanx.tools.explain.log_facts import Facts

_SAVE_CALL = re.compile(
    r"save|consolidat|gather_full|state_dict|checkpoint|_zero3_consolidated", re.IGNORECASE
)
_NO_SAVE = re.compile(r"torch/utils/checkpoint|checkpoint_wrapper|gradient_checkpoint|load_", re.IGNORECASE)
_SAVING = re.compile(
    r"\bsav(?:e|ing|ed)\b.{0,60}(?:check ?-?point|model|state|optim|weights|\.pt\b|\.pth|\.ckpt|to /|to \.)|save_checkpoint"
    r"|check-?point.{0,30}\bsav|Configuration saved in|train_runtime|tokenizer config file saved|checkpoint-\d+|zero_to_fp32|consolidat",
    re.IGNORECASE,
)
_SOLO_WORK = re.compile(
    r"\b(?:tokeniz\w+|preprocess\w*|processing (?:data|dataset|examples)|building (?:the )?(?:vocab|index|dataset)|download\w*"
    r"|Map(?: \(num_proc=\d+\))?:|Filter:|Generating .{0,20}split|computing .{0,30}|caching|indexing|loading data\w*|unzip\w*|extract\w*)\b",
    re.IGNORECASE,
)
_EVALUATING = re.compile(
    r"\b(?:evaluat\w+|validat\w+|testing|inference|generat\w+ samples|beam search)\b", re.IGNORECASE
)
_EPOCH_END = re.compile(
    r"100%\||\b(\d{2,9})/\1\b|end of epoch|epoch .{0,20}(?:finished|done|completed)", re.IGNORECASE
)
_FIRST = re.compile(
    r"main_process_first|rank_zero_first|local_main_process_first|rank0_first|zero_rank_first", re.IGNORECASE
)
_FIRST_RANK_WAITS = frozenset({"BROADCAST", "BARRIER"})


def in_time(milliseconds: str | None) -> str:
    """``30 min``.

    >>> in_time("1800000"), in_time("90000"), in_time(None)
    ('30 min', '90 s', '')
    """
    if not milliseconds or not milliseconds.isdigit():
        return ""
    seconds = int(milliseconds) / 1000
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{milliseconds} ms"


def _positions(hits: Iterable[Hit]) -> dict[int, int]:
    """The sequence number at which each rank gave up first."""
    found: dict[int, int] = {}
    for hit in hits:
        if hit.line.rank is not None and "seq" in hit.groups:
            found.setdefault(hit.line.rank, int(hit.groups["seq"]))
    return found


def _enqueued(facts: Facts) -> dict[int, int]:
    found: dict[int, int] = {}
    for line, groups in facts.of("work"):
        if line.rank is not None:
            found.setdefault(line.rank, int(groups["enqueued"]))
    return found


def _in_a_save(tracebacks: Sequence[Traceback]) -> bool:
    for traceback in tracebacks:
        for frame in traceback.frames:
            text = f"{frame.file} {frame.function} {frame.code}"
            called = f"{frame.function} {frame.code}"
            if _SAVE_CALL.search(called) and not _NO_SAVE.search(text):
                return True
    return False


def _in_rank_zero_first(tracebacks: Sequence[Traceback]) -> bool:
    return any(_FIRST.search(f"{frame.function} {frame.code}") for t in tracebacks for frame in t.frames)


def _spoken(positions: Mapping[int, int]) -> str:
    by_place: dict[int, list[int]] = {}
    for rank, place in sorted(positions.items()):
        by_place.setdefault(place, []).append(rank)
    parts = []
    for place, ranks in sorted(by_place.items())[:4]:
        names = ", ".join(map(str, ranks[:8])) + (" .." if len(ranks) > 8 else "")
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {names} at number {place}")
    return "; ".join(parts)


def judge(
    hits: Sequence[Hit], facts: Facts, tracebacks: Sequence[Traceback], context: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The diagnoses that fit a time-out, best first, and what can be said of it."""
    first = hits[0]
    groups = {name: value for hit in reversed(hits[:50]) for name, value in hit.groups.items()}
    groups |= first.groups
    words: dict[str, str] = {}
    if in_time(groups.get("limit_ms")):
        words["limit"] = in_time(groups.get("limit_ms"))
    words["op"] = groups.get("op", "a collective")
    missing = [int(rank) for rank in re.findall(r"\d+", groups.get("missing", ""))]
    if missing:
        words["missing"] = ", ".join(map(str, missing))
    recent = "\n".join(context[-12:])
    if groups.get("host") == "0" or _in_rank_zero_first(tracebacks):
        return ["nccl-timeout-slow-rank0", "nccl-timeout-unknown"], words
    if _in_a_save(tracebacks) or _SAVING.search(recent):
        return ["nccl-timeout-during-save", "nccl-timeout-unknown"], words
    ids = _by_ranks(hits, facts, words, missing)
    if ids:
        return ids, words
    if _SOLO_WORK.search(recent):
        return ["nccl-timeout-slow-rank0", "nccl-timeout-unknown"], words
    if _EVALUATING.search(recent):
        return ["nccl-timeout-unknown", "nccl-timeout-slow-rank0"], words
    if _EPOCH_END.search(recent):
        return ["nccl-timeout-unknown", "nccl-timeout-uneven-ranks"], words
    return ["nccl-timeout-unknown"], words


def _by_ranks(hits: Sequence[Hit], facts: Facts, words: dict[str, str], missing: Sequence[int]) -> list[str]:
    """What the ranks that complained, and those that did not, say."""
    if missing:
        return [
            "nccl-timeout-slow-rank0" if list(missing) == [0] else "nccl-timeout-uneven-ranks",
            "nccl-timeout-unknown",
        ]
    waiting = {hit.line.rank for hit in hits if hit.line.rank is not None}
    positions = _positions(hits)
    enqueued = _enqueued(facts)
    operations = {hit.groups["op"] for hit in hits if "op" in hit.groups}
    for places in (positions, enqueued):
        if len(set(places.values())) > 1:
            spread = max(places.values()) - min(places.values())
            words["positions"] = _spoken(places)
            if spread > 1 or places is positions:
                return ["nccl-timeout-uneven-ranks", "nccl-timeout-unknown"]
    if len(waiting) >= 1 and 0 not in waiting and (operations & _FIRST_RANK_WAITS or len(waiting) > 1):
        return ["nccl-timeout-slow-rank0", "nccl-timeout-unknown"]
    return []

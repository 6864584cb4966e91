"""All rules together, and the index by which a line finds those that could fit it."""

from __future__ import annotations

from functools import lru_cache

from phalanx.tools.explain import (
    rules_build,
    rules_checkpoints,
    rules_environment,
    rules_launch,
    rules_memory,
    rules_nccl,
    rules_python,
    rules_training,
)
from phalanx.tools.explain.log_facts import FACTS, SIGNS, Fact
from phalanx.tools.explain.rule import Rule
from phalanx.tools.explain.siblings import SIBLINGS

RULES: tuple[Rule, ...] = (
    *rules_memory.RULES,
    *rules_training.RULES,
    *rules_checkpoints.RULES,
    *rules_launch.RULES,
    *rules_nccl.RULES,
    *rules_environment.RULES,
    *rules_build.RULES,
    *rules_python.RULES,
)
BY_ID: dict[str, Rule] = {**SIBLINGS, **{rule.id: rule for rule in RULES}}

#: Words of tracebacks, which are put together whatever rules say.
TRACEBACK_WORDS = (b"traceback (most recent call last)", b"the above exception", b"exception ignored in")

Entry = Rule | Fact


@lru_cache(maxsize=1)
def index() -> tuple[tuple[bytes, tuple[Entry, ...]], ...]:
    """Each ``when`` text, with whatever waits for it."""
    by_word: dict[bytes, list[Entry]] = {}
    entries: list[Entry] = [*RULES, *FACTS, SIGNS]
    for entry in entries:
        for word in entry.when:
            by_word.setdefault(word.encode(), []).append(entry)
    return tuple((word, tuple(waiting)) for word, waiting in by_word.items())


@lru_cache(maxsize=1)
def stems() -> tuple[bytes, ...]:
    """Few short texts, one of which is in every ``when`` text: what most lines of a healthy log lack."""
    words = [word for word, _ in index()] + list(TRACEBACK_WORDS) + [b"error", b"exception"]
    chosen = [stem for stem in _STEMS if any(stem in word for word in words)]
    for word in sorted(words, key=len):
        if not any(stem in word for stem in chosen):
            chosen.append(word)
    return tuple(chosen)


#: Chosen by hand: each covers several words, and is rare in what training prints.
_STEMS = (
    b"err", b"fail", b"not ", b"cuda", b"cannot", b"nccl", b"kill", b"memory", b"timed out", b"unexpected",
    b"mismatch", b"argument", b"no such", b"libc", b"must ", b"signal", b"expect", b"exception", b"undefined", b"driver",
    b"unable", b"connection", b"gpu", b"version", b"exit", b"assert", b"invalid", b"already", b"unsupported", b"torch",
    b"too ", b"size", b"device", b"differ", b"cxx", b"core dumped", b"closed", b"range",
)  # fmt: skip


def candidates(lower: bytes) -> list[Entry]:
    """Rules and facts that could fit a line, given in lower case."""
    found: dict[int, Entry] = {}
    for word, entries in index():
        if word in lower:
            for entry in entries:
                found[id(entry)] = entry
    return list(found.values())

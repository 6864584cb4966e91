"""All rules together, and the index by which a line finds those that could fit it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from phalanx.tools.explain import (
    rules_build,
    rules_checkpoints,
    rules_data,
    rules_environment,
    rules_launch,
    rules_libraries,
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
    *rules_data.RULES,
    *rules_checkpoints.RULES,
    *rules_launch.RULES,
    *rules_nccl.RULES,
    *rules_environment.RULES,
    *rules_libraries.RULES,
    *rules_build.RULES,
    *rules_python.RULES,
)
BY_ID: dict[str, Rule] = {**SIBLINGS, **{rule.id: rule for rule in RULES}}

#: Lines that the assembly of tracebacks needs, whatever rules say.
TRACEBACK_WORDS = (b"traceback (most recent call last)", b"the above exception", b"exception ignored in")
#: Ends of exceptions' names, for lines that stand alone.
_EXCEPTION_WORDS = (b"error", b"exception", b"interrupt", b"failure", b"exit", b"timeout")

Entry = Rule | Fact
Waiting = tuple[tuple[bytes, tuple[Entry, ...]], ...]

#: Words that much text has: of a ``when`` text another word is looked for.
_COMMON = frozenset(
    b"""is was not no the a an in on of to for from with without by and or but has have had been be are were all any at
    that this when while then same size only file files node found loss load open input index ready equal state train world
    limit retry built array number values option method system module master model device number version failed failing
    before after between instead more than too old must requires expects require cannot can't call calls runtime library
    does mode write read machine python class type types support supported ran time import image function status space such
    object process tensor tensors range look available return count missing should local find same once got one sent send
    training batch rank ranks data error tasks gpu gpus inf reached out per name code get key self many match custom store
    .py match required exits""".split()
)


def key_of(when: str) -> bytes | None:
    """The word of a ``when`` text by which lines are found: the longest one that little text has.

    None where all its words are common; then the text itself has to be looked for.

    >>> key_of("failed finding central directory"), key_of("is nan"), key_of("file write failed")
    (b'directory', b'nan', None)
    """
    words = when.encode().split()
    rare = [word for word in words if word not in _COMMON and len(word) > (3 if len(words) > 2 else 2)]
    return max(rare, key=len, default=None)


@lru_cache(maxsize=1)
def index() -> dict[bytes, Waiting]:
    """By key word (or a text of common words): the ``when`` texts that have it, each with whatever waits for it."""
    by_text: dict[str, list[Entry]] = {}
    entries: list[Entry] = [*RULES, *FACTS, SIGNS]
    for entry in entries:
        for text in entry.when:
            by_text.setdefault(text, []).append(entry)
    found: dict[bytes, list[tuple[bytes, tuple[Entry, ...]]]] = {}
    for text, waiting in by_text.items():
        found.setdefault(key_of(text) or text.encode(), []).append((text.encode(), tuple(waiting)))
    for word in (*TRACEBACK_WORDS, *_EXCEPTION_WORDS):
        found.setdefault(key_of(word.decode()) or word, [])
    return {key: tuple(texts) for key, texts in found.items()}


def candidates(lower: bytes, keys: Iterable[bytes]) -> list[Entry]:
    """Rules and facts that could fit a line (in lower case), of those that wait for one of ``keys``."""
    found: dict[int, Entry] = {}
    known = index()
    for key in keys:
        if key in lower:
            for text, entries in known[key]:
                if text in lower:
                    for entry in entries:
                        found[id(entry)] = entry
    return list(found.values())

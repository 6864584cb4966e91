"""Where ranks stand: stacks as faulthandler writes them, which collective each waits in, and who is missing there.

Pure rules on text; nothing here looks at a process.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_HEAD = re.compile(r"(Current thread|Thread|Stack) .*\(most recent call first\):")
_DISTRIBUTED = "/torch/distributed/"
#: What torch puts around a collective to log and time it.
_WRAPPERS = frozenset({"wrapper", "func_wrapper"})


@dataclass(frozen=True)
class Frame:
    """One call: a line of a file, in a function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]  # the innermost call first


@dataclass(frozen=True)
class Group:
    """Ranks that stand at the same place."""

    ranks: tuple[int, ...]
    stack: Stack


def last_stack(text: str) -> Stack:
    """The stack of the newest whole dump in ``text``, of its current thread; () without one.

    >>> last_stack('Stack (most recent call first):\\n  File "a.py", line 3 in f\\n  File "a.py", line 9 in <module>\\n')
    (Frame(file='a.py', line=3, function='f'), Frame(file='a.py', line=9, function='<module>'))
    """
    lines = text[: text.rfind("\n") + 1].splitlines()
    heads = [number for number, line in enumerate(lines) if _HEAD.match(line)]
    current = [number for number in heads if not lines[number].startswith("Thread")]
    if not heads:
        return ()
    matches = takewhile(bool, map(_FRAME.fullmatch, lines[(current or heads)[-1] + 1 :]))
    return tuple(Frame(m["file"], int(m["line"]), m["function"]) for m in matches if m is not None)


def collective(stack: Stack) -> str | None:
    """The function of torch.distributed that a stack waits in; None when it is elsewhere.

    >>> collective((Frame("/x/torch/distributed/distributed_c10d.py", 1, "all_reduce"), Frame("train.py", 2, "step")))
    'all_reduce'
    """
    inner = stack[0] if stack else None
    if inner is None or _DISTRIBUTED not in inner.file:
        return None
    return next((frame.function for frame in stack if frame.function not in _WRAPPERS), None)


def groups(stacks: Mapping[int, Stack]) -> list[Group]:
    """Equal stacks put together, the largest group first, then by rank."""
    ranks_of: dict[Stack, list[int]] = defaultdict(list)
    for rank in sorted(stacks):
        ranks_of[stacks[rank]].append(rank)
    found = [Group(tuple(ranks), stack) for stack, ranks in ranks_of.items()]
    return sorted(found, key=lambda group: (-len(group.ranks), group.ranks))


def stragglers(stacks: Mapping[int, Stack | None]) -> list[int]:
    """The ranks that keep the others waiting: those not in the collective that most of the waiting ranks are in.

    Args:
        stacks: By rank; None for a rank that has ended.

    Returns:
        Ranks in order. Empty when no rank waits in a collective, when all wait in the same one, and when two
        collectives have as many ranks each: nothing then says which side is wrong.

    >>> wait = (Frame("/x/torch/distributed/distributed_c10d.py", 1, "all_reduce"),)
    >>> stragglers({0: wait, 1: (Frame("train.py", 7, "save"),), 2: wait})
    [1]
    """
    waits = {rank: collective(stack or ()) for rank, stack in stacks.items()}
    counts = Counter(name for name in waits.values() if name is not None).most_common(2)
    if not counts:
        return []
    if len(counts) == 2 and counts[0][1] == counts[1][1]:
        return sorted(rank for rank, name in waits.items() if name is None)
    return sorted(rank for rank, name in waits.items() if name != counts[0][0])

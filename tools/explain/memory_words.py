"""The numbers of an out-of-memory message in words, and which of its causes they show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SIZE = r"(-?[\d.]+) ?([KMGT]?i?B|bytes)"
_UNITS = {"B": 1, "BYTES": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FIELDS = {
    "asked": r"[Tt]ried to allocate " + _SIZE,
    "total": r"(?:total capaci?ty of " + _SIZE + r"|" + _SIZE + r" total capacity)",
    "free": r"(?:of which " + _SIZE + r" is free|" + _SIZE + r" free)",
    "allocated": r"(?:"
    + _SIZE
    + r" already allocated|allocated memory "
    + _SIZE
    + r" is allocated by PyTorch)",
    "reserved": r"" + _SIZE + r" reserved in total",
    "cached": r"" + _SIZE + r" cached",
    "unallocated": r"" + _SIZE + r" is reserved by PyTorch but unallocated",
    "own": r"this process has " + _SIZE + r" memory in use",
}
_OTHER = re.compile(r"Process (\d+) has " + _SIZE + r" memory in use")
_GPU = re.compile(r"\(?GPU (\d+)[;: ]")
_COMPILED = {name: re.compile(pattern) for name, pattern in _FIELDS.items()}
_CONTEXT_BYTES = 2**30  # what CUDA itself holds per process is no other process


def _bytes(found: re.Match[str] | None) -> float | None:
    if found is None:
        return None
    groups = [group for group in found.groups() if group]
    try:
        return float(groups[0]) * _UNITS[groups[1][0].upper() if groups[1] != "bytes" else "BYTES"]
    except (ValueError, KeyError, IndexError):
        return None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What an out-of-memory message says, in bytes."""

    asked: float | None = None
    total: float | None = None
    free: float | None = None
    allocated: float | None = None
    reserved: float | None = None
    cached: float | None = None
    unallocated: float | None = None
    own: float | None = None
    others: Mapping[int, float] | None = None
    gpu: int | None = None

    @property
    def spare(self) -> float | None:
        """Reserved by torch, and not in use."""
        if self.unallocated is not None:
            return self.unallocated
        if self.cached is not None:  # torch 1.0 to 1.3 print what is cached beyond the allocated
            return self.cached
        if self.reserved is not None and self.allocated is not None:
            return self.reserved - self.allocated
        return None

    @property
    def foreign(self) -> float | None:
        """What processes other than this one hold, as far as the message tells."""
        if self.others:
            return sum(self.others.values()) - (0.0 if self.own is not None else self._own_among_others)
        if self.total is None or self.free is None:
            return None
        if self.own is not None and self.own < self.total * 4:  # some containers report nonsense
            rest = self.total - self.free - self.own
            return rest if rest > _CONTEXT_BYTES / 2 else 0.0
        held = (self.allocated or 0) + (self.spare or 0)
        if self.allocated is None:
            return None
        rest = self.total - self.free - held - _CONTEXT_BYTES
        return max(rest, 0.0)

    @property
    def _own_among_others(self) -> float:
        """In containers torch cannot tell its own entry from the rest: the one nearest to what it uses."""
        used = (self.allocated or 0.0) + (self.spare or 0.0)
        nearest = min((self.others or {}).values(), key=lambda held: abs(held - used), default=0.0)
        return nearest if used and nearest >= used else 0.0

    @property
    def kind(self) -> str:
        """``cuda-oom-other-process``, ``cuda-oom-fragmentation`` or ``cuda-oom``."""
        asked = self.asked or 0.0
        foreign, spare = self.foreign or 0.0, self.spare or 0.0
        total = self.total or 0.0
        if total and foreign >= max(0.15 * total, asked) and foreign >= 2**30:
            return "cuda-oom-other-process"
        # A few spare blocks are normal; as much again as was asked for, in pieces, is not.
        if asked and spare >= max(asked, 0.05 * total):
            return "cuda-oom-fragmentation"
        return "cuda-oom"

    @property
    def words(self) -> str:
        """``GPU 0: asked for 2.5 GiB with 1.1 GiB free of 24; 9 GiB held by another process``."""
        if self.asked is None:
            return ""
        text = f"asked for {in_words(self.asked)}"
        if self.free is not None:
            text += f" with {in_words(self.free)} free"
            if self.total is not None:
                text += f" of {in_words(self.total)}"
        if self.gpu is not None:
            text = f"GPU {self.gpu}: {text}"
        details = []
        if self.allocated is not None:
            details.append(f"torch uses {in_words(self.allocated)}")
        if self.spare is not None and self.spare >= 2**20:
            details.append(f"it holds {in_words(self.spare)} more in free pieces")
        foreign = self.foreign
        if self.others and len(self.others) == 1:
            ((pid, held),) = self.others.items()
            details.append(f"{in_words(held)} held by another process ({pid})")
        elif self.others:
            listed = ", ".join(f"{in_words(held)} ({pid})" for pid, held in list(self.others.items())[:4])
            details.append(f"{in_words(sum(self.others.values()))} held by other processes: {listed}")
        elif foreign and self.kind == "cuda-oom-other-process":
            details.append(f"{in_words(foreign)} held by another process")
        return "; ".join([text, *details])


def in_words(size: float) -> str:
    """``2.5 GiB``.

    >>> in_words(2684354560), in_words(24 * 2**30), in_words(20 * 2**20)
    ('2.5 GiB', '24 GiB', '20 MiB')
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size:.0f} bytes"


def memory_of(text: str) -> Memory:
    """Read an out-of-memory message of torch 0.4 to 2.14."""
    values = {name: _bytes(pattern.search(text)) for name, pattern in _COMPILED.items()}
    others = {}
    for found in _OTHER.finditer(text):
        size = _bytes(re.match(_SIZE, f"{found[2]} {found[3]}"))
        if size is not None:
            others[int(found[1])] = size
    gpu = _GPU.search(text)
    return Memory(**values, others=others or None, gpu=int(gpu[1]) if gpu else None)

"""What a benchmark is asked to do, checked; as words of a command line for the ranks. No torch needed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.tools.bench.bandwidth import CONVENTIONS
from phalanx.tools.usage import UsageMistake, nearest

KINDS = (*CONVENTIONS, "latency", "loader")
BACKENDS = ("gloo", "nccl")
DTYPES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int32": 4, "int64": 8, "int8": 1, "uint8": 1
}  # fmt: skip
_SHORT = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
    "float": "float32",
    "half": "float16",
}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MOST_BYTES = 1 << 40


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """One benchmark of collectives.

    Args:
        kind: A key of `CONVENTIONS`, or ``latency``.
        min_bytes: Smallest size.
        max_bytes: Largest size; each is ``factor`` times the one before.
        iterations: Timed operations of a size.
        warmup: Operations before those.
        backend: ``gloo`` or ``nccl``; None: nccl with GPUs.
        dtype: Of the elements.
    """

    kind: str
    min_bytes: int = 1 << 10
    max_bytes: int = 16 << 20
    factor: int = 4
    iterations: int = 20
    warmup: int = 5
    backend: str | None = None
    dtype: str = "float32"

    def sizes(self, world_size: int) -> list[int]:
        """Bytes of each size, rounded so that every rank's part is a whole number of elements."""
        grain = DTYPES[self.dtype]
        if self.kind in ("all-gather", "reduce-scatter", "all-to-all"):
            grain *= world_size
        sizes, size = [], self.min_bytes
        while size <= self.max_bytes:
            sizes.append(max(grain, size // grain * grain))
            size *= self.factor
        return list(dict.fromkeys(sizes))

    def words(self) -> list[str]:
        """The command line of the ranks."""
        words = [self.kind, "--min-bytes", str(self.min_bytes), "--max-bytes", str(self.max_bytes)]
        words += [
            "--factor",
            str(self.factor),
            "--iterations",
            str(self.iterations),
            "--warmup",
            str(self.warmup),
        ]
        words += ["--dtype", self.dtype]
        return words + (["--backend", self.backend] if self.backend else [])


def checked_settings(kind: str, given: dict[str, str | None]) -> BenchSettings:
    """Settings from what a user typed: option by its name without dashes, None where it was left out.

    Raises:
        UsageMistake: A value is out of its range.
    """
    kind = check_kind(kind)
    low = _bytes(given, "min_bytes", BenchSettings.min_bytes)
    high = _bytes(given, "max_bytes", max(low, BenchSettings.max_bytes))
    if high < low:
        raise UsageMistake(
            f"--min-bytes {given['min_bytes']} --max-bytes {given['max_bytes']}: the smallest is above the largest.",
            fix=f"--max-bytes {low}",
        )
    backend = _choice(given.get("backend"), "--backend", BACKENDS)
    dtype = given.get("dtype")
    dtype = _choice(_SHORT.get(dtype or "", dtype), "--dtype", tuple(DTYPES))
    return BenchSettings(
        kind=kind,
        min_bytes=low,
        max_bytes=high,
        factor=_whole(given, "factor", 2, BenchSettings.factor, most=1 << 20),
        iterations=_whole(given, "iterations", 1, BenchSettings.iterations),
        warmup=_whole(given, "warmup", 0, BenchSettings.warmup),
        backend=backend,
        dtype=dtype or BenchSettings.dtype,
    )


def check_kind(kind: str) -> str:
    """A benchmark by its name; underscores and one word are understood.

    >>> check_kind("all_reduce"), check_kind("allreduce")
    ('all-reduce', 'all-reduce')
    """
    flat = re.sub(r"[-_ ]", "", kind.lower())
    for known in KINDS:
        if flat == known.replace("-", ""):
            return known
    near = nearest(kind, KINDS, count=1)
    raise UsageMistake(
        f"{kind!r}: there is no such benchmark, only {', '.join(KINDS)}.",
        fix=f"phalanx bench {near[0] if near else 'all-reduce'}",
    )


def parse_bytes(text: str) -> int | None:
    """A size as people write it, None where it is none.

    >>> parse_bytes("1K"), parse_bytes("64MiB"), parse_bytes("1.5 GB"), parse_bytes("300"), parse_bytes("two")
    (1024, 67108864, 1610612736, 300, None)
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([kmg]?)(?:i?b)?", text.strip().lower())
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def _bytes(given: dict[str, str | None], key: str, default: int) -> int:
    text = given.get(key)
    if text is None:
        return default
    option = "--" + key.replace("_", "-")
    size = parse_bytes(text)
    if size is None or not 1 <= size <= MOST_BYTES:
        raise UsageMistake(
            f"{option} {text}: a size is 1 byte to 1024 GiB, such as 1K, 64M or 1G.", fix=f"{option} 1M"
        )
    return size


def _whole(given: dict[str, str | None], key: str, low: int, default: int, most: int = 10**7) -> int:
    text = given.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= most):
        raise UsageMistake(f"--{key} {text}: a whole number of {low} to {most}.", fix=f"--{key} {default}")
    return int(text)


def _choice(text: str | None, option: str, choices: tuple[str, ...]) -> str | None:
    if text is None or text in choices:
        return text
    near = nearest(text, choices, count=1) or choices[:1]
    raise UsageMistake(f"{option} {text}: must be one of {', '.join(choices)}.", fix=f"{option} {near[0]}")

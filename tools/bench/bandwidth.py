"""Algorithm and bus bandwidth, as nccl-tests defines them. No torch needed."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9  # bytes, as network speeds are given


@dataclass(frozen=True)
class Bandwidth:
    """GB/s, 1 GB = 10^9 bytes.

    Args:
        algorithm: Size over time: how fast the data of the user gets there.
        bus: What the slowest link carries, whatever the number of ranks: comparable with the hardware's figure. None
            with one rank, which uses no link.
    """

    algorithm: float
    bus: float | None


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What ``size`` means for a collective, and its bus bandwidth's factor, by words and number."""

    size: str
    factor: str

    def bus_factor(self, world_size: int) -> float:
        """How many times the size goes over the slowest link."""
        share = (world_size - 1) / world_size
        return {"2(n-1)/n": 2 * share, "(n-1)/n": share, "1": 1.0}[self.factor]


CONVENTIONS = {
    "all-reduce": Convention(size="bytes of each rank's buffer", factor="2(n-1)/n"),
    "all-gather": Convention(size="bytes of the whole result, on every rank", factor="(n-1)/n"),
    "reduce-scatter": Convention(size="bytes of the whole input, on every rank", factor="(n-1)/n"),
    "broadcast": Convention(size="bytes of the buffer", factor="1"),
    "all-to-all": Convention(size="bytes that each rank sends, its own part included", factor="(n-1)/n"),
    "send-recv": Convention(size="bytes that each rank sends to the next", factor="1"),
}


def bandwidth(kind: str, size_bytes: int, seconds: float, world_size: int) -> Bandwidth:
    """The two bandwidths of one operation.

    >>> bandwidth("all-reduce", 10**9, 0.010, 8)
    Bandwidth(algorithm=100.0, bus=175.0)
    >>> bandwidth("all-gather", 10**9, 0.010, 8).bus, bandwidth("broadcast", 10**9, 0.010, 8).bus
    (87.5, 100.0)
    >>> bandwidth("all-reduce", 10**9, 0.010, 1)
    Bandwidth(algorithm=100.0, bus=None)

    Args:
        kind: A key of `CONVENTIONS`, which say what its size is.
        size_bytes: Its size.
        seconds: How long it took; above 0.
        world_size: Ranks that took part.
    """
    algorithm = size_bytes / seconds / GB
    bus = algorithm * CONVENTIONS[kind].bus_factor(world_size) if world_size > 1 else None
    return Bandwidth(algorithm, bus)

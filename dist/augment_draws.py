"""Random numbers that belong to a sample rather than to a generator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The increment and the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
# number generators", OOPSLA 2014): every step is a bijection of 64 bits, so different positions never
# share a number within one draw.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser on every element; a new array."""
    words = words ^ (words >> np.uint64(30))
    words *= _FIRST
    words ^= words >> np.uint64(27)
    words *= _SECOND
    words ^= words >> np.uint64(31)
    return words


class Draws:
    """Numbers for a batch of samples: a function of ``(key, position, draw index)`` and of nothing else.

    There is no state to advance by the batch: row i is the same whichever other rows stand beside it, on any
    machine and any device. Each call is the next draw index, so the order of the calls matters::

        >>> whole = Draws(7, np.arange(6))
        >>> part = Draws(7, np.array([4, 1]))
        >>> whole.integers(10)[[4, 1]].tolist() == part.integers(10).tolist()
        True
        >>> whole.uniform()[[4, 1]].tolist() == part.uniform().tolist()
        True

    Args:
        key: Any integer; its low 64 bits count. Two keys give two unrelated streams.
        positions: One integer per sample, shape (n,).
    """

    def __init__(self, key: int, positions: NDArray[np.int64]) -> None:
        self._key = key & 0xFFFFFFFFFFFFFFFF
        self._positions = np.asarray(positions, dtype=np.int64)
        self._base: NDArray[np.uint64] | None = None  # made when something is drawn
        self._index = 0

    def __len__(self) -> int:
        """Samples in the batch."""
        return len(self._positions)

    def words(self) -> NDArray[np.uint64]:
        """64 random bits per sample, shape (n,)."""
        if self._base is None:
            start = mix(np.array([self._key], dtype=np.uint64))
            self._base = mix(start + (self._positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
        self._index += 1
        step = np.array([self._index], dtype=np.uint64) * _GAMMA
        return mix(self._base + step)

    def uniform(self) -> NDArray[np.float64]:
        """One number in [0, 1) per sample, a multiple of 2**-53."""
        numbers: NDArray[np.float64] = (self.words() >> np.uint64(11)).astype(np.float64)
        numbers *= 2.0**-53
        return numbers

    def integers(self, high: int) -> NDArray[np.int64]:
        """One integer in [0, high) per sample; high <= 2**31. Uneven by less than high / 2**32."""
        if not 1 <= high <= 2**31:
            raise ValueError(
                f"high={high}: an integer in [0, high) needs 1 <= high <= 2**31; there would be nothing to draw "
                "from, or 32 random bits would not reach all of it.\nFix: pass a high in that range"
            )
        words = (self.words() >> np.uint64(32)) * np.uint64(high)
        words >>= np.uint64(32)
        numbers: NDArray[np.int64] = words.view(np.int64)
        return numbers

"""A shuffle that is computed where it is looked at, instead of being drawn and kept."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from phalanx.dist.keys import derive_key

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# Up to here one table of 8 bytes an item is faster than the network below, and uniform by construction.
TABLE_LIMIT = 65536

# A balanced network of four rounds is already indistinguishable from random for few look-ups; the halves
# of the smallest network here have eight and nine bits, hence twice as many.
ROUNDS = 8

# The network works on blocks that stay in the cache of one core.
_BLOCK = 1 << 15

_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(32)


def mix_words(words: Words) -> Words:
    """Scramble 64-bit words in place (xor-shift and multiply); a bijection of 64-bit words."""
    words ^= words >> _SHIFT
    words *= _MULTIPLIER_1
    words ^= words >> _SHIFT
    words *= _MULTIPLIER_2
    words ^= words >> _SHIFT
    return words


class KeyedPermutation:
    """A pseudo-random order of ``range(num_items)``, given by a key alone.

    It takes no time or memory to set up, however large ``num_items`` is: an element is computed when
    it is asked for. The same key gives the same order on every machine.

    >>> order = KeyedPermutation(10, key=7)
    >>> sorted(order) == list(range(10))
    True
    >>> order.take(np.array([3, 4])).tolist() == [order[3], order[4]]
    True

    Up to 65,536 items the order is the argsort of keyed random words, made once at the first look-up.
    Above it is a Feistel network of eight rounds on the smallest power of two that holds
    ``num_items``; results outside of the range are fed in again until they fall inside (cycle
    walking), which keeps it a bijection.

    Args:
        num_items: Length, ``0 <= num_items <= 2**62``.
        key: Any integer, see `phalanx.dist.keys.derive_key`.

    Raises:
        ValueError: ``num_items`` is out of range.
    """

    def __init__(self, num_items: int, key: int) -> None:
        if not 0 <= num_items <= 1 << 62:
            raise ValueError(f"num_items={num_items}: a permutation has 0 to 2**62 items.")
        self._num_items = num_items
        self._key = key
        self._table: Indices | None = None
        self._use_table = num_items <= TABLE_LIMIT
        bits = max(2, (num_items - 1).bit_length())
        self._right_bits = np.uint64(bits // 2)
        self._left_bits = np.uint64(bits - bits // 2)
        self._round_keys = [np.uint64(derive_key(key, number, "feistel")) for number in range(ROUNDS)]

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._num_items:
            raise IndexError(f"position {position} of a permutation of {self._num_items} items")
        return int(self.take(np.array([position], dtype=np.int64))[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._num_items, _BLOCK):
            stop = min(start + _BLOCK, self._num_items)
            yield from self.take(np.arange(start, stop, dtype=np.int64)).tolist()

    def take(self, positions: Indices) -> Indices:
        """The elements at ``positions`` (int64, one-dimensional, in ``[0, num_items)``), as a new array.

        Raises:
            IndexError: A position is out of range.
        """
        if positions.size == 0:
            return np.empty(0, dtype=np.int64)
        if positions.min() < 0 or positions.max() >= self._num_items:
            raise IndexError(
                f"positions from {positions.min()} to {positions.max()} of a permutation of {self._num_items} items"
            )
        if self._use_table:
            if self._table is None:
                self._table = self._make_table()
            return self._table[positions]
        result = np.empty(positions.size, dtype=np.int64)
        for start in range(0, positions.size, _BLOCK):
            block = positions[start : start + _BLOCK].astype(np.uint64)
            result[start : start + _BLOCK] = self._walk(block)
        return result

    def _make_table(self) -> Indices:
        words = np.arange(self._num_items, dtype=np.uint64)
        words *= np.uint64(0x9E3779B97F4A7C15)
        words += self._round_keys[0]
        mix_words(words)
        words ^= self._round_keys[1]
        return np.argsort(mix_words(words), kind="stable").astype(np.int64, copy=False)

    def _walk(self, words: Words) -> Words:
        limit = np.uint64(self._num_items)
        words = self._network(words)
        outside = np.flatnonzero(words >= limit)
        while outside.size:
            again = self._network(words[outside])
            words[outside] = again
            outside = outside[again >= limit]
        return words

    def _network(self, words: Words) -> Words:
        """One pass through the rounds: a bijection of ``[0, 2**(left_bits + right_bits))``."""
        left_bits, right_bits = self._left_bits, self._right_bits
        left = words >> right_bits
        right = words & np.uint64((1 << int(right_bits)) - 1)
        for number, round_key in enumerate(self._round_keys):
            source, target, bits = (right, left, left_bits) if number % 2 == 0 else (left, right, right_bits)
            mixed = source + round_key
            mixed *= _MULTIPLIER_1
            mixed ^= mixed >> _SHIFT
            mixed *= _MULTIPLIER_2
            mixed >>= np.uint64(64) - bits
            target ^= mixed
        left <<= right_bits
        left |= right
        joined: Words = left
        return joined

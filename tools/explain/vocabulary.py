"""Which words of a block of text can matter: a question asked once per word, not once per line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

_DIGITS = b"0123456789"
_LOWER = bytes(range(256)).lower()
_MOST_WORDS = 300_000


class Vocabulary:
    """Remembers for each word that was seen which of some keys are part of it; keys of several words are searched for.

    Logs are made of few words, used again and again: a block whose words are all known, and none of which
    holds a key, is done with by two set operations.

    >>> words = Vocabulary([b"memory", b"error"])
    >>> words.keys_in(b"Epoch 1 loss 2"), words.keys_in(b"ValueError: 3 out of memory") == {b"memory", b"error"}
    (set(), True)
    """

    def __init__(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        self._keys = frozenset(key for key in keys if b" " not in key)
        # Of a text of several words the longest one tells whether it is worth a search.
        self._phrases: dict[bytes, list[bytes]] = {}
        for key in keys:
            if b" " in key:
                self._phrases.setdefault(max(key.split(), key=len), []).append(key)
        self._parts = tuple(self._keys | self._phrases.keys())
        self._known: set[bytes] = set()
        self._telling: dict[bytes, tuple[bytes, ...]] = {}

    def keys_in(self, block: bytes) -> set[bytes]:
        """The keys that occur in a block, in whatever case; digits do not count."""
        words = set(block.translate(_LOWER, _DIGITS).split())
        new = words - self._known
        if len(self._known) + len(new) > _MOST_WORDS:
            self._known.clear()
            self._known.update(self._telling)
        self._known |= new
        for word in new:
            found = tuple(part for part in self._parts if part in word)
            if found:
                self._telling[word] = found
        told = {part for word in words & self._telling.keys() for part in self._telling[word]}
        phrases = [phrase for part in told & self._phrases.keys() for phrase in self._phrases[part]]
        if phrases:
            lower = block.lower()
            phrases = [phrase for phrase in phrases if phrase in lower]
        return (told & self._keys).union(phrases)


def lines_with(block: bytes, lines: Sequence[bytes], keys: Iterable[bytes]) -> list[int]:
    r"""Which lines of a block hold one of some keys (in lower case).

    >>> lines_with(b"a\nKeyError: b\nc\n", [b"a", b"KeyError: b", b"c"], [b"error"])
    [1]
    """
    lower = block.lower()
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    found = set()
    for key in keys:
        at = lower.find(key)
        while at >= 0:
            number = bisect_right(starts, at) - 1
            found.add(number)
            at = lower.find(key, starts[number + 1]) if number + 1 < len(starts) else -1
    return sorted(number for number in found if number < len(lines))

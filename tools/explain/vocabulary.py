"""Which words of a block of text can matter: a question asked once per word, not once per line."""

from __future__ import annotations

from collections.abc import Iterable

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
        self._keys = tuple(key for key in keys if b" " not in key)
        self._phrases = tuple(key for key in keys if b" " in key)
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
            found = tuple(key for key in self._keys if key in word)
            if found:
                self._telling[word] = found
        told = {key for word in words & self._telling.keys() for key in self._telling[word]}
        lower = block.lower()
        return told.union(phrase for phrase in self._phrases if phrase in lower)

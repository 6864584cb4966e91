"""Random keys derived from what a run is at, instead of generator states that have to be stored."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from hashlib import blake2b
from operator import index
from typing import Any

_KEY_MASK = (1 << 63) - 1


def derive_key(*parts: int | str) -> int:
    """A 63-bit key that depends on every part, its type and its place: the same on any machine.

    >>> derive_key(0, 3, 17, "loop") == derive_key(0, 3, 17, "loop")
    True
    >>> derive_key(1, 23) == derive_key(12, 3)
    False

    Args:
        parts: Integers of any size and sign, and strings.

    Returns:
        An integer in ``[0, 2**63)``, which every generator of torch, numpy and random accepts.

    Raises:
        ValueError: A part is neither.
    """
    packed = bytearray()
    for part in parts:
        if isinstance(part, str):
            text = part.encode()
            packed += b"s" + struct.pack("<Q", len(text)) + text
            continue
        try:
            packed += struct.pack("<cq", b"i", part)
        except (struct.error, TypeError, RuntimeError):  # beyond 64 bits, or no integer
            whole = _whole(part)
            number = whole.to_bytes(whole.bit_length() // 8 + 1, "little", signed=True)
            packed += b"I" + struct.pack("<Q", len(number)) + number
    digest = blake2b(packed, digest_size=8).digest()
    return int.from_bytes(digest, "little") & _KEY_MASK


def _whole(part: Any) -> int:
    try:
        return index(part)
    except TypeError:
        raise ValueError(
            f"a random key is made of integers and strings, not {part!r}.\nFix: say seed, epoch and step as integers"
        ) from None


def reseed(key: int, *, cuda: bool = True) -> None:
    """Put the global generators of torch, random and numpy at the start of the stream of ``key``.

    Each generator takes its own bits of the key, so that their streams differ from one another.

    Args:
        key: A key in ``[0, 2**63)``, as `derive_key` returns it.
        cuda: Also reseed the generators of the CUDA devices. CUDA is never initialised for that: a
            process that has not used it has no generator to reseed.
    """
    import numpy as np
    import torch

    # The three share one algorithm (MT19937), torch reads 32 bits: equal seeds would be equal streams.
    torch.default_generator.manual_seed(key)
    np.random.seed(key >> 31)
    random.seed(key)
    cuda_is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    if cuda and cuda_is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(key)


def generator_states() -> tuple[Any, ...]:
    """The states of the global generators on the CPU, for `restore_generator_states`."""
    import numpy as np
    import torch

    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def restore_generator_states(states: tuple[Any, ...]) -> None:
    """Put the global generators on the CPU back to what `generator_states` returned."""
    import numpy as np
    import torch

    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])

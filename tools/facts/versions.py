"""Version numbers as tuples: "535.104.05" sorts by number, never by text."""

from __future__ import annotations

import functools
import re

Version = tuple[int, ...]
_NUMBERS = re.compile(r"\d{1,9}(?:\.\d{1,9}){0,5}")


@functools.lru_cache(maxsize=4096)
def version_of(text: str | None) -> Version:
    """The first version number in a text, () where there is none.

    >>> version_of("2.6.0+cu126"), version_of("V12.1.105"), version_of("535.104.05 (host)"), version_of(None)
    ((2, 6, 0), (12, 1, 105), (535, 104, 5), ())
    """
    match = _NUMBERS.search(text or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def minor(text: str | None) -> str:
    """Major and minor number alone: "12.1" for "12.1.105", "" where there is none."""
    return ".".join(str(part) for part in version_of(text)[:2])


def at_least(found: str | None, needed: str | None) -> bool:
    """Whether version ``found`` is ``needed`` or newer; what is missing counts as zero.

    >>> at_least("535.54.03", "525.60.13"), at_least("418.67", "440.33"), at_least("525", "525.60.13")
    (True, False, True)
    """
    have, need = version_of(found), version_of(needed)
    shortest = min(len(have), len(need))  # "525" alone may be any 525 driver
    return have[:shortest] >= need[:shortest]


def same(first: str | None, second: str | None, parts: int = 2) -> bool:
    """Whether two versions agree in as many parts as both have, at most ``parts``."""
    have, other = version_of(first), version_of(second)
    shortest = min(len(have), len(other), parts)
    return have[:shortest] == other[:shortest]


def cuda_of_tag(tag: str | None) -> str | None:
    """The CUDA version a wheel's tag names.

    >>> cuda_of_tag("2.6.0+cu126"), cuda_of_tag("1.4.0+cu92"), cuda_of_tag("2.6.0+cpu"), cuda_of_tag("2.6.0")
    ('12.6', '9.2', '', None)
    """
    match = re.search(r"\+(cpu|cu(\d{2,3}))", tag or "")
    if match is None:
        return None
    digits = match.group(2)
    return f"{int(digits[:-1])}.{digits[-1]}" if digits else ""


def tag_of_cuda(cuda: str) -> str:
    """ "cu126" for "12.6", "cpu" for ""."""
    return "cu" + minor(cuda).replace(".", "") if cuda else "cpu"

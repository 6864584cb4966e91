"""What keys that do not match have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KEY = re.compile(r"[\"']([\w.]{1,300})[\"']")
#: Components that wrappers put into the path of a parameter.
WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_forward_module",
    "_checkpoint_wrapped_module",
    "model",
)
_LIMIT = 400


def keys_in(text: str) -> list[str]:
    """The quoted keys of a message.

    >>> keys_in('"conv.weight", "conv.bias". ')
    ['conv.weight', 'conv.bias']
    """
    found = _KEY.findall(text[:20_000])[:_LIMIT]
    return found or [word for word in re.findall(r"[\w.]+", text[:2000]) if "." in word][:_LIMIT]


def prefix_between(missing: Iterable[str], unexpected: Iterable[str]) -> str | None:
    """The components by which the checkpoint's keys and the model's differ.

    >>> prefix_between(["conv.weight"], ["module.conv.weight"])
    'module.'
    >>> prefix_between(["a.weight"], ["b.weight"]) is None
    True
    """
    lacking, extra = list(missing)[:_LIMIT], list(unexpected)[:_LIMIT]
    for longer, shorter in ((extra, set(lacking)), (lacking, set(extra))):
        counts: dict[str, int] = {}
        for key in longer:
            for cut, letter in enumerate(key):
                if letter == "." and key[cut + 1 :] in shorter:
                    counts[key[: cut + 1]] = counts.get(key[: cut + 1], 0) + 1
        best = max(counts, key=lambda prefix: counts[prefix], default=None)
        if best is not None and 2 * counts[best] > max(len(longer), len(shorter)):
            return best
    bare = {_unwrapped(key): key for key in lacking}
    for key in extra:
        if _unwrapped(key) in bare:
            return next(
                (f"{part}." for part in WRAPPERS if part in key.split(".") or part in bare[_unwrapped(key)]),
                None,
            )
    for only in (extra, lacking):
        other = lacking if only is extra else extra
        if only and not other:
            heads = {key.partition(".")[0] for key in only}
            if len(heads) == 1 and heads & set(WRAPPERS[:5]):
                return f"{heads.pop()}."
    return None


def _unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)

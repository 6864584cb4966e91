"""What `phalanx ckpt inspect` tells: tensors, their sizes, what else is there, and on request what their values are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.tools.ckpt.contents import Contents, Entry


@dataclass(frozen=True)
class Statistics:
    """What a tensor's values are; least, greatest and mean are of the finite ones."""

    nan: int
    inf: int
    zero: int
    minimum: float | None
    maximum: float | None
    mean: float | None


def inspect_json(contents: Contents, stats: Mapping[str, Statistics | str] | None = None) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {
        "schema": 1,
        "path": str(contents.path),
        "format": contents.format,
        "tensors": [_tensor(entry, stats) for entry in contents.entries],
        "other": contents.other,
        "total_bytes": contents.total_bytes,
        "facts": dict(contents.facts),
        "code": list(contents.code),
        "problems": list(contents.problems),
    }


def _tensor(entry: Entry, stats: Mapping[str, Statistics | str] | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "key": entry.key,
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "bytes": entry.bytes,
        "shared_with": entry.shared_with,
    }
    if entry.note:
        described["note"] = entry.note
    if entry.problem:
        described["problem"] = entry.problem
    found = (stats or {}).get(entry.key)
    if isinstance(found, Statistics):
        described["stats"] = vars(found)
    elif found is not None:
        described["stats"] = {"unreadable": found}
    return described


def statistics_of(contents: Contents) -> dict[str, Statistics | str]:
    """Per key what its values are, or why that cannot be told. All values are read, a few MB at a time."""
    from phalanx.tools.ckpt.errors import BadCheckpoint
    from phalanx.tools.ckpt.reading import ValueReader

    found: dict[str, Statistics | str] = {}
    with ValueReader() as reader:
        for entry in contents.entries:
            if entry.shared_with in found:
                found[entry.key] = found[entry.shared_with]
                continue
            try:
                found[entry.key] = _statistics(reader, entry)
            except BadCheckpoint as error:
                found[entry.key] = error.problem
    return found


def _statistics(reader: Any, entry: Entry) -> Statistics:
    import numpy as np

    from phalanx.tools.ckpt.dtypes import item_bytes
    from phalanx.tools.ckpt.reading import aligned, numbers

    nan = inf = zero = count = 0
    least, greatest, total = math.inf, -math.inf, 0.0
    for data in aligned(reader.pieces(entry), item_bytes(entry.dtype)):
        values = numbers(data, entry.dtype)
        if values.dtype.kind == "c":
            values = np.abs(values)
        if values.dtype.kind in "fc":
            isnan, isinf = np.isnan(values), np.isinf(values)
            nan, inf = nan + int(isnan.sum()), inf + int(isinf.sum())
            if isnan.any() or isinf.any():
                values = values[~(isnan | isinf)]
        zero += int((values == 0).sum())
        if values.size:
            least, greatest = min(least, float(values.min())), max(greatest, float(values.max()))
            total += float(values.sum(dtype=np.float64))
            count += values.size
    if not count:
        return Statistics(nan, inf, zero, None, None, None)
    mean = total / count
    return Statistics(nan, inf, zero, least, greatest, mean if math.isfinite(mean) else None)

"""Checks of option values: text in, a value in its range out, or one clear message."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from phalanx.launch.options import Given
from phalanx.tools.usage import UsageMistake, nearest

Values = Mapping[str, Given]


def whole_number(values: Values, key: str, *, low: int, high: int | None = None) -> int | None:
    """A whole number from ``low`` to ``high``, None when the option was not given."""
    given = values.get(key)
    if given is None:
        return None
    bounds = f"{low} or more" if high is None else f"{low} to {high}"
    try:
        number = int(given.text)
    except ValueError:
        raise UsageMistake(f"{given}: not a whole number.", fix=_example(given, f"({bounds})", low)) from None
    if number < low or (high is not None and number > high):
        raise UsageMistake(f"{given}: must be {bounds}.", fix=_example(given, f"({bounds})", low))
    return number


def seconds(values: Values, key: str, *, zero: bool) -> float | None:
    """A time in seconds, finite; ``zero`` says whether 0 is a time."""
    given = values.get(key)
    if given is None:
        return None
    try:
        number = float(given.text)
    except ValueError:
        raise UsageMistake(f"{given}: not a number of seconds.", fix=_example(given, "", 10)) from None
    if not (number >= 0 if zero else number > 0) or number == float("inf"):
        raise UsageMistake(
            f"{given}: must be {'0 or more' if zero else 'more than 0'} seconds.", fix=_example(given, "", 10)
        )
    return number


def choice(values: Values, key: str, choices: tuple[str, ...]) -> str | None:
    """One of ``choices``, None when the option was not given."""
    given = values.get(key)
    if given is None or given.text in choices:
        return None if given is None else given.text
    near = nearest(given.text, choices, count=1) or [choices[0]]
    raise UsageMistake(f"{given}: must be one of {', '.join(choices)}.", fix=_example(given, "", near[0]))


def text(values: Values, key: str, default: str = "") -> str:
    """The value as it is; given, it must not be empty."""
    given = values.get(key)
    if given is None:
        return default
    if not given.text.strip():
        raise UsageMistake(f"{given.source} is empty.", fix=f"give {given.source} a value, or leave it out")
    return given.text


def nnodes(values: Values) -> tuple[int, int]:
    """``--nnodes 4`` is (4, 4), ``--nnodes 2:4`` is (2, 4)."""
    given = values.get("nnodes")
    if given is None:
        return 1, 1
    parts = given.text.split(":")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise UsageMistake(
            f"{given}: neither a number of nodes nor MIN:MAX.", fix=_example(given, "", "2 or 1:4")
        )
    low, high = int(parts[0].strip()), int(parts[-1].strip())
    if low < 1:
        raise UsageMistake(f"{given}: a job has at least one node.", fix=_example(given, "", "1"))
    if low > high:
        raise UsageMistake(
            f"{given}: the smallest number comes first.", fix=_example(given, "", f"{high}:{low}")
        )
    return low, high


def endpoint(values: Values) -> str:
    """``--rdzv-endpoint HOST:PORT``; "" when not given. The port may be left out, an IPv6 host has brackets."""
    value = text(values, "rdzv_endpoint")
    host, colon, port = value.rpartition(":")
    if not value or (not colon and port) or value.endswith("]"):
        return value
    given = values["rdzv_endpoint"]
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.endswith("]")):
        raise UsageMistake(f"{given}: not in the form HOST:PORT.", fix=_example(given, "", "node1:29400"))
    return value


def pairs(values: Values, key: str) -> dict[str, str]:
    """``KEY=VALUE,KEY=VALUE``."""
    given = values.get(key)
    found: dict[str, str] = {}
    if given is None or not given.text.strip():
        return found
    for part in given.text.split(","):
        name, equals, value = part.partition("=")
        if not name.strip() or not equals or not value.strip():
            raise UsageMistake(
                f"{given}: {part!r} is not in the form KEY=VALUE.",
                fix=_example(given, "", "timeout=900,is_host=1"),
            )
        found[name.strip()] = value.strip()
    return found


def local_ranks(values: Values, nproc_per_node: int) -> tuple[int, ...] | None:
    """``--local-ranks-filter 0,2``, each a local rank of this job."""
    given = values.get("local_ranks_filter")
    if given is None or not given.text.strip():
        return None
    found = []
    for part in given.text.split(","):
        if not part.strip().isdecimal():
            raise UsageMistake(f"{given}: {part!r} is not a local rank.", fix=_example(given, "", "0,1"))
        number = int(part.strip())
        if number >= nproc_per_node:
            raise UsageMistake(
                f"{given}: this node's local ranks are 0 to {nproc_per_node - 1}.",
                fix=_example(given, "", "0"),
            )
        found.append(number)
    return tuple(dict.fromkeys(found))


def signal_names(values: Values) -> tuple[str, ...] | None:
    """``--signals-to-handle SIGTERM,SIGUSR1``: names that this system knows and a process can catch."""
    given = values.get("signals_to_handle")
    if given is None:
        return None
    known = sorted({item.name for item in signal.Signals} - {"SIGKILL", "SIGSTOP"})
    found = []
    for part in given.text.split(","):
        name = part.strip().upper()
        if name in known:
            found.append(name)
        elif name in ("SIGKILL", "SIGSTOP"):
            raise UsageMistake(
                f"{given}: no process can catch {name}.", fix=_example(given, "", "SIGTERM,SIGINT")
            )
        else:
            near = nearest(name if name.startswith("SIG") else f"SIG{name}", known, count=1) or ["SIGTERM"]
            raise UsageMistake(f"{given}: there is no signal {part!r}.", fix=f"did you mean {near[0]}?")
    return tuple(dict.fromkeys(found))


def _example(given: Given, bounds: str, value: object) -> str:
    joint = " " if given.source.startswith("-") else "="
    return f"{given.source}{joint}{value} {bounds}".rstrip()

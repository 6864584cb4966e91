"""Host files: one host a line, for launching over ssh."""

from __future__ import annotations

import difflib
import ipaddress
import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # never a leading dash: ssh would read an option
_OPTIONS = ("slots", "gpus", "port")


class InvalidHostfile(ValueError):
    """A line of a host file cannot be read; the message has its number and text."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a host file.

    Args:
        name: Host name or address, an IPv6 address without its brackets.
        slots: Ranks to start there, at least 1; None leaves it to the host's devices.
        user: User to log in as, None for ssh's default.
        port: Port of its ssh server, None for ssh's default.
        gpus: nvidia-smi's numbers of the GPUs to use, None for all.
    """

    name: str
    slots: int | None = None
    user: str | None = None
    port: int | None = None
    gpus: tuple[int, ...] | None = None


def parse_hostfile(text: str) -> list[Host]:
    """The hosts of a host file, in its order.

    A line is ``[user@]host [slots=N] [gpus=0,1] [port=N]``; blank lines, ``#`` comments and CRLF are fine.

    >>> for host in parse_hostfile("node1 slots=4  # fast\\n\\nuser@[fd00::2] gpus=0,2 port=2222\\n"):
    ...     print(host)
    Host(name='node1', slots=4, user=None, port=None, gpus=None)
    Host(name='fd00::2', slots=2, user='user', port=2222, gpus=(0, 2))

    Raises:
        InvalidHostfile: A line has another form, a host comes twice, or there is no host at all.
    """
    hosts: list[Host] = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        line = re.sub(r"(^|\s)#.*", "", raw.rstrip("\r")).strip()
        if not line:
            continue
        host = _parse_line(line, number)
        earlier = seen.setdefault(host.name.lower(), number)
        if earlier != number:
            raise _bad_line(
                number,
                line,
                f"{host.name} is on line {earlier} already",
                f"one line with all of {host.name}'s slots",
            )
        hosts.append(host)
    if not hosts:
        raise InvalidHostfile(
            "The host file names no host: nothing would be started.\nFix: write a line per host, such as: node1 slots=4"
        )
    return hosts


def _parse_line(line: str, number: int) -> Host:
    address, *words = line.split()
    user, at, name = address.rpartition("@")
    if at and not _NAME.fullmatch(user):
        raise _bad_line(number, line, f"{user!r} is no user name", "user@host slots=4")
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _OPTIONS or not equals or not value:
            raise _unknown_word(line, number, word)
        if key in options:
            raise _bad_line(number, line, f"{key}= comes twice", f"{key}={value}")
        options[key] = value
    slots = _number(options.get("slots"), "slots", 1, 4096, line, number)
    gpus = _gpus(options.get("gpus"), line, number)
    if gpus is not None:
        slots = len(gpus) if slots is None else slots
        if slots != len(gpus):
            raise _bad_line(
                number, line, f"slots={slots} for {len(gpus)} GPUs", f"slots={len(gpus)}, or leave slots out"
            )
    return Host(
        name=_host_name(name, line, number),
        slots=slots,
        user=user or None,
        port=_number(options.get("port"), "port", 1, 65535, line, number),
        gpus=gpus,
    )


def _host_name(name: str, line: str, number: int) -> str:
    if name.startswith("["):
        inner = name[1:-1]
        try:
            if name.endswith("]") and isinstance(ipaddress.ip_address(inner), ipaddress.IPv6Address):
                return inner
        except ValueError:
            pass
        raise _bad_line(number, line, f"{name!r} is no IPv6 address in brackets", "[fd00::2] slots=4")
    if _NAME.fullmatch(name):
        return name
    if name.count(":") > 1:
        raise _bad_line(number, line, "an IPv6 address needs brackets", f"[{name}]")
    if ":" in name:
        host, _, value = name.partition(":")
        raise _bad_line(
            number,
            line,
            f"{name!r} could mean a port or slots",
            f"{host} slots={value}, or {host} port={value}",
        )
    raise _bad_line(number, line, f"{name!r} is no host name", "node1 slots=4")


def _number(text: str | None, key: str, minimum: int, maximum: int, line: str, number: int) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and minimum <= int(text) <= maximum):
        raise _bad_line(
            number,
            line,
            f"expected {key}=<n>, got '{key}={text}' ({minimum} to {maximum})",
            f"{key}={minimum}",
        )
    return int(text)


def _gpus(text: str | None, line: str, number: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    items = text.split(",")
    for item in items:
        if not (item.isascii() and item.isdigit() and len(item) < 5):
            what = f"{item!r} is no GPU number" if item else "there is an empty GPU number"
            raise _bad_line(number, line, f"gpus={text}: {what}", "gpus=0,1")
        if items.count(item) > 1:
            raise _bad_line(number, line, f"gpus={text}: {item} comes twice", "each GPU once")
    return tuple(int(item) for item in items)


def _unknown_word(line: str, number: int, word: str) -> InvalidHostfile:
    key = word.partition("=")[0]
    near = difflib.get_close_matches(key, _OPTIONS, n=1)
    if near or key in _OPTIONS:
        expected = f"{near[0] if near else key}=<n>" if "gpus" not in near else "gpus=<n,n>"
    else:
        expected = "slots=<n>, gpus=<n,n> or port=<n>"
    return _bad_line(number, line, f"expected {expected}, got {word!r}", f"{line.split()[0]} slots=4")


def _bad_line(number: int, line: str, what: str, fix: str) -> InvalidHostfile:
    return InvalidHostfile(f"hostfile line {number}: {what}: {line!r}\nFix: {fix}")

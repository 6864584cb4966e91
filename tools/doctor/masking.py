"""Names that a public issue should not carry, taken out of text."""

from __future__ import annotations

import re

from phalanx.tools.doctor.facts import Facts

_PATTERNS = (
    (
        re.compile(
            r"(/(?:home|Users|users|export/home|mnt/home|gpfs/home|scratch|data/home)/)[^/\s:'\",)]{1,64}"
        ),
        r"\1<user>",
    ),
    (re.compile(r"([A-Za-z]:\\Users\\)[^\\\s'\"]{1,64}", re.I), r"\1<user>"),
    (re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{6,8}-[0-9a-fA-F-]{4,30}"), r"\1-<uuid>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b(?!\.\d)"), "<address>"),
    (re.compile(r"\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b|\bfe80::[0-9a-fA-F:]{2,40}"), "<address>"),
    (re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b"), "<mac>"),
    (re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64}){0,6}"), "<user>@<host>"),
    (re.compile(r"(serial(?: number)?\s?[:=]\s?)\S{4,40}", re.I), r"\1<serial>"),
    (
        re.compile(
            r"((?:token|secret|password|passwd|api_?key|credential)\w{0,20}\s?[:=]\s?)\S{1,200}", re.I
        ),
        r"\1<hidden>",
    ),
    (re.compile(r"(?:/[\w.+@-]{1,80}){3,30}(?=/[\w.+@-]{1,80})"), "<path>"),
)
_KEPT = re.compile(r"^(?:127\.0\.[01]\.1|0\.0\.0\.0)$")
_SYSTEM_PATHS = (
    "/usr/",
    "/opt/",
    "/lib",
    "/etc/",
    "/dev/",
    "/proc/",
    "/sys/",
    "/bin/",
    "/sbin/",
    "/var/lib/",
    "/compute/redist/",
    "/deeplearning/",
)


class Masks:
    """Takes this machine's own names, and what looks like a name, out of text.

    >>> Masks(Facts()).apply("loaded: /home/ada/env/lib/libcudnn.so on 10.1.2.3, 127.0.0.1")
    'loaded: /home/<user>/env/lib/libcudnn.so on <address>, 127.0.0.1'
    """

    def __init__(self, facts: Facts) -> None:
        network = facts.network
        variables = facts.env or {}
        hosts = [
            (network and network.host_name) or "",
            variables.get("HOSTNAME", ""),
            variables.get("SLURMD_NODENAME", ""),
            variables.get("MASTER_ADDR", ""),
        ]
        users = [variables.get(name, "") for name in ("USER", "LOGNAME", "USERNAME")]
        self._names = [(name, "<host>") for name in hosts if self._is_name(name)]
        self._names += [
            (name.split(".")[0], "<host>")
            for name in hosts
            if "." in name and self._is_name(name.split(".")[0])
        ]
        self._names += [(name, "<user>") for name in users if self._is_name(name) and name != "root"]
        self._names.sort(key=lambda entry: -len(entry[0]))

    @staticmethod
    def _is_name(name: str) -> bool:
        return len(name) > 2 and name != "localhost" and not name[0].isdigit()

    def apply(self, text: str) -> str:
        """The text without names."""
        for name, instead in self._names:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(lambda match, replacement=replacement: _instead(match, replacement), text)  # type: ignore[misc]
        return text


def _instead(match: re.Match[str], replacement: str) -> str:
    found = match.group()
    if _KEPT.match(found):
        return found
    if replacement == "<path>" and (
        found.startswith(_SYSTEM_PATHS) or "<user>" in found or "/home/" in found
    ):
        return found
    return match.expand(replacement)

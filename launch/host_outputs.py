"""What one phalanx command prints on each of several hosts, asked of all at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from phalanx.dist.environments.hostfile import Host, InvalidHostfile, parse_hostfile
from phalanx.dist.environments.slurm import expand_hostlist, is_step
from phalanx.launch.remote_programs import allocation
from phalanx.tools.gpus.hosts import HostOutput
from phalanx.tools.usage import UsageMistake

AT_ONCE = 64  # hosts asked at a time
_LAST_WORDS_S = 2.0

_BETWEEN_NAMES = re.compile(r",(?![^\[]*\])")
_IPV6 = re.compile(r"(^|@)\[[^\]]*:")

Start = Callable[[str, Sequence[str]], "subprocess.Popen[bytes]"]


def hosts_named(text: str, option: str) -> list[Host]:
    """The hosts of a list as a user types it: ``node1,me@node2``, Slurm's ``node[01-04]``, or ``[fd00::3]``.

    >>> [host.name for host in hosts_named("a[1-2],me@[fd00::3]", "--hosts")]
    ['a1', 'a2', 'fd00::3']

    Raises:
        UsageMistake: A name is none, or comes twice.
    """
    try:
        words = _BETWEEN_NAMES.split(text)
        names = [name for word in words for name in ([word] if _IPV6.search(word) else expand_hostlist(word))]
        return parse_hostfile("\n".join(names))
    except InvalidHostfile as error:
        what = str(error).partition("\n")[0].partition(": ")[2]
        raise UsageMistake(
            f"{option} {text}: {what}.", fix=f"{option} node1,node2 or {option} node[01-04]"
        ) from None
    except ValueError as error:
        what = str(error).partition("\n")[0]
        raise UsageMistake(
            f"{option} {text!r}: {what}", fix=f"{option} node1,node2 or {option} node[01-04]"
        ) from None


def other_nodes_of_allocation(environ: Mapping[str, str], host: str) -> list[str]:
    """The nodes of the Slurm job this process is in, when they are more than this one; none inside a step."""
    nodes = allocation(environ)
    if is_step(environ) or nodes in ([], [host], [host.partition(".")[0]]):
        return []
    return nodes


class HostOutputs:
    """Runs phalanx command lines on hosts; ``start`` starts a program on one of them."""

    def __init__(self, hosts: Sequence[str], start: Start, timeout_s: float) -> None:
        self._hosts, self._start, self._timeout_s = hosts, start, timeout_s

    def __call__(self, words: Sequence[str]) -> dict[str, HostOutput]:
        """Output of each host, in the order of the hosts."""
        command = [sys.executable, "-m", "phalanx", *words]
        started: list[subprocess.Popen[bytes]] = []

        def one(host: str) -> HostOutput:
            try:
                process = self._start(host, command)
            except OSError as error:
                return HostOutput(exit_code=None, stderr=f"{error.filename or 'ssh'}: {error.strerror}")
            started.append(process)
            return self._output(process)

        with ThreadPoolExecutor(min(AT_ONCE, len(self._hosts))) as pool:
            try:
                return dict(zip(self._hosts, pool.map(one, self._hosts), strict=True))
            except BaseException:  # Ctrl-C: nothing may go on behind our back
                pool.shutdown(wait=False, cancel_futures=True)
                for process in started:
                    _end(process)
                raise

    def _output(self, process: subprocess.Popen[bytes]) -> HostOutput:
        try:
            out, err = process.communicate(timeout=self._timeout_s)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            _end(process)
            try:
                out, err = process.communicate(timeout=_LAST_WORDS_S)
            except subprocess.TimeoutExpired:  # something else holds its pipes
                out, err = b"", b""
            code, err = None, err + f"\nno answer within {self._timeout_s:g} s".encode()
        return HostOutput(
            exit_code=code, stdout=out.decode(errors="replace"), stderr=err.decode(errors="replace")
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass

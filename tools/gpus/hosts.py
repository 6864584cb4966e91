"""Several nodes in one table: each is asked for its JSON, and one that does not answer is a line of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.tools.gpus.processes import printable
from phalanx.tools.gpus.readings import NodeReading
from phalanx.tools.gpus.report import node_of


@dataclass(frozen=True, kw_only=True)
class HostOutput:
    """What a command printed on a host, and how it ended; ``exit_code`` None: it was not started, or not in time."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""


#: Runs `phalanx gpus --json` on every host and returns the output of each.
Ask = Callable[[], Mapping[str, HostOutput]]


def read_hosts(ask: Ask) -> list[NodeReading]:
    """The nodes, in the order of the answer."""
    return [_node(host, output) for host, output in ask().items()]


def _node(host: str, output: HostOutput) -> NodeReading:
    if output.exit_code in (0, 1):
        try:
            return node_of(output.stdout, host)
        except ValueError as error:
            return NodeReading(host=host, error=_why(str(error), output))
    what = (
        "did not answer"
        if output.exit_code is None
        else f"phalanx gpus ended with exit code {output.exit_code}"
    )
    return NodeReading(host=host, error=_why(what, output))


def _why(what: str, output: HostOutput) -> str:
    lines = [line.strip() for line in output.stderr.strip().splitlines() if line.strip()]
    return f"{what}: {printable(lines[-1])[:200]}" if lines else what

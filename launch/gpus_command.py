"""`phalanx gpus`: the GPUs of this node or of several, who is on them, and what they can do."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click

from phalanx.tools.usage import UsageMistake

if TYPE_CHECKING:
    from phalanx.tools.gpus.readings import NodeReading

TORCH_S = 60.0  # more time for a host that is to import torch

_HELP = """Show the GPUs, who is on them, and which rank of which job that is.

\b
phalanx gpus                       this node; in a Slurm allocation of other nodes, those
phalanx gpus --watch               again every second
phalanx gpus --hosts node[01-04]   several nodes in one table, by ssh
phalanx gpus --capability          what each GPU can do, and whether this torch has code for it
phalanx gpus --topology            NVLinks, PCIe and CPUs between them

Exit code: 0 fine, 1 a GPU is lost or cannot be used, or a host does not answer, 2 usage.
"""


@click.command("gpus", help=_HELP, short_help="Show GPUs, who is on them, and which rank that is.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="PHALANX_GPUS_JSON",
    help="Print one JSON object and nothing else.",
)
@click.option(
    "--watch",
    is_flag=False,
    flag_value="1",
    envvar="PHALANX_GPUS_WATCH",
    metavar="[SECONDS]",
    help="Show it again every second, or every so many, until Ctrl-C.",
)
@click.option(
    "--capability",
    is_flag=True,
    envvar="PHALANX_GPUS_CAPABILITY",
    help="What each GPU can do, and whether torch has code for it.",
)
@click.option("--topology", is_flag=True, envvar="PHALANX_GPUS_TOPOLOGY", help="How the GPUs are connected.")
@click.option(
    "--hosts",
    envvar="PHALANX_GPUS_HOSTS",
    metavar="NAMES",
    help="These hosts, by ssh: node1,me@node2 or node[01-04].",
)
@click.option(
    "--hostfile", envvar="PHALANX_GPUS_HOSTFILE", metavar="FILE", help="The hosts of a file, one a line."
)
@click.option(
    "--ssh-port", envvar="PHALANX_GPUS_SSH_PORT", metavar="PORT", help="Port of the hosts' ssh servers."
)
@click.option(
    "--local", is_flag=True, envvar="PHALANX_GPUS_LOCAL", help="This node alone, also in a Slurm allocation."
)
@click.option(
    "--timeout-s",
    default="30",
    show_default=True,
    envvar="PHALANX_GPUS_TIMEOUT_S",
    metavar="SECONDS",
    help="How long a host may take to answer.",
)
def gpus_command(
    as_json: bool,
    watch: str | None,
    capability: bool,
    topology: bool,
    hosts: str | None,
    hostfile: str | None,
    ssh_port: str | None,
    local: bool,
    timeout_s: str,
) -> int:
    """What `_HELP` says."""
    every_s = None if watch is None else _seconds(watch, "--watch")
    if every_s is not None and as_json:
        raise UsageMistake(
            "--watch and --json: one prints again and again, the other one object.", fix="one of the two"
        )
    limit_s = _seconds(timeout_s, "--timeout-s") + (TORCH_S if capability else 0)
    read = _reader(hosts, hostfile, ssh_port, local, limit_s, capability, topology)
    if every_s is not None:
        from phalanx.tools.gpus.watch import watch as show_again

        show_again(partial(_page, read, every_s), every_s)
        return 0
    nodes = read()
    if as_json:
        import json

        from phalanx.tools.gpus.report import report

        click.echo(json.dumps(report(nodes)))
    else:
        _say(_drawn(nodes))
    return int(any(node.is_bad for node in nodes))


def _reader(
    hosts: str | None,
    hostfile: str | None,
    ssh_port: str | None,
    local: bool,
    timeout_s: float,
    capability: bool,
    topology: bool,
) -> Callable[[], list[NodeReading]]:
    """What reads the nodes that were asked for."""
    if local and (hosts is not None or hostfile is not None):
        raise UsageMistake("--local with --hosts or --hostfile: this node or those?", fix="one of the two")
    if ssh_port is not None and hosts is None and hostfile is None:
        raise UsageMistake("--ssh-port without hosts: this node needs no ssh.", fix="--hosts node1,node2")
    if hosts is None and hostfile is None and (local or "SLURM_JOB_ID" not in os.environ):
        return partial(_here, capability, topology)
    from phalanx.launch.host_choice import starter
    from phalanx.tools.gpus.hosts import read_hosts

    ask = starter(hosts, hostfile, ssh_port, timeout_s)
    if ask is None:
        return partial(_here, capability, topology)
    words = ["gpus", "--json", "--local", *["--capability"] * capability, *["--topology"] * topology]
    return partial(read_hosts, partial(ask, words))


def _here(capability: bool, topology: bool) -> list[NodeReading]:
    from phalanx.tools.gpus.node_reading import read_node

    node = read_node()
    if capability:
        from phalanx.tools.gpus.capability import with_capabilities

        node = with_capabilities(node)
    if topology:
        from phalanx.tools.gpus.topology import with_topology

        node = with_topology(node)
    return [node]


def _drawn(nodes: list[NodeReading]) -> str:
    from phalanx.tools.gpus.screen import screen

    is_terminal = _is_terminal()
    colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return screen(nodes, width=_width() if is_terminal else None, colour=colour)


def _page(read: Callable[[], list[NodeReading]], every_s: float) -> str:
    text = f"{time.strftime('%H:%M:%S')}, every {every_s:g} s; Ctrl-C ends it\n{_drawn(read())}"
    return _in_reach(text)


def _say(text: str) -> None:
    click.echo(_in_reach(text))


def _in_reach(text: str) -> str:
    """With a question mark for what this terminal cannot show: a process may have any name."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()  # None: closed at the start, as by `>&-`


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except OSError:
        return 80


def _seconds(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 86400:
        raise UsageMistake(
            f"{option} {text}: a number of seconds is above 0, and a day at most.", fix=f"{option} 5"
        )
    return value

"""`phalanx run` on several nodes from one place: which hosts, what each is told, and on to the driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.dist.environments.hostfile import Host
from phalanx.launch import values as checked
from phalanx.launch.driver import NodesJob, Start, local_nodes
from phalanx.launch.options import Given
from phalanx.launch.placement import available_cores
from phalanx.launch.spec import Target
from phalanx.launch.values import Values
from phalanx.tools.usage import UsageMistake

#: Dealt with by the driver; a node agent does not see them.
_DRIVERS_OWN = frozenset(
    {"hosts", "hostfile", "ssh_port", "ssh", "local_nodes", "dry_run", "log_dir", "show", "master_addr", "master_port"}
)  # fmt: skip
#: Decided by the driver: no choice beside the hosts.
_DECIDED = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "standalone", "local_addr")


@dataclass(frozen=True, kw_only=True)
class NodesChosen:
    """The nodes of a job, in their order, and what starts a program on each."""

    hosts: Sequence[Host]
    start: Start
    option: str  # as typed, for messages
    same_machine: bool = False
    by: str = "ssh"  # what starts the agents, for messages


def nodes_chosen(given: Values) -> NodesChosen | None:
    """What ``--hosts``, ``--hostfile`` or ``--local-nodes`` name; None where this node alone is meant.

    Raises:
        UsageMistake: They contradict each other or another option, or name no host.
    """
    named = [given[key] for key in ("hosts", "hostfile", "local_nodes") if key in given]
    if not named:
        return None
    if len(named) > 1:
        raise UsageMistake(
            f"{named[0]} and {named[1]} both say which nodes.", fix=f"leave {named[1].source} out"
        )
    count = checked.whole_number(given, "local_nodes", low=1, high=64)
    if count is not None:
        hosts, start = local_nodes(count)
        chosen = NodesChosen(hosts=hosts, start=start, option=str(named[0]), same_machine=True)
    else:
        from phalanx.launch.host_choice import chosen_hosts

        found, start = chosen_hosts(given)
        chosen = NodesChosen(hosts=found, start=start, option=str(named[0]))
    _check_decided(given, chosen)
    return chosen


def _check_decided(given: Values, chosen: NodesChosen) -> None:
    count = len(chosen.hosts)
    for key in _DECIDED:
        if key in given and not (key == "nnodes" and given[key].text == str(count)):
            raise UsageMistake(
                f"{given[key]} with {chosen.option}: the {count} node{'s' * (count > 1)} named there decide that, "
                "and the two would contradict each other.",
                fix=f"leave {given[key].source} out",
            )


def nodes_job(
    chosen: NodesChosen,
    target: Target,
    typed: str,
    args: Sequence[str],
    given: Values,
    *,
    log_dir: Path,
    command_line: Sequence[str],
) -> NodesJob:
    """The job as the driver runs it.

    Raises:
        UsageMistake: A value is out of its range.
    """
    show = checked.choice(given, "show", ("rank0", "all"))
    if show is None:
        show = "rank0" if os.isatty(1) else "all"
    grace_s = checked.seconds(given, "grace_s", zero=True)
    if grace_s is None:
        grace_s = checked.seconds(given, "shutdown_timeout", zero=True)
    count = len(chosen.hosts)
    values = {key: value for key, value in given.items() if key not in _DRIVERS_OWN}
    values["show"] = Given(show, "--show")
    values["nnodes"] = Given(str(count), "--nnodes")
    values["rdzv_backend"] = Given("static", "--rdzv-backend")
    values["master_addr"] = Given("node0", "--master-addr")  # replaced once it is known
    environ: dict[str, str] = {}
    if chosen.same_machine:
        per_node, environ = _shares(count, given)
    else:
        per_node = [_of_host(host) for host in chosen.hosts]
    return NodesJob(
        given=values,
        per_node=per_node,
        target=typed,
        resolved=target,
        args=args,
        command_line=command_line,
        log_dir=log_dir,
        show=show,
        grace_s=10.0 if grace_s is None else grace_s,
        same_machine=chosen.same_machine,
        address=checked.text(given, "master_addr") or None,
        port=checked.whole_number(given, "master_port", low=1, high=65535),
        environ=environ,
    )


def _of_host(host: Host) -> dict[str, Given]:
    """What a line of a host file says of its host, as options of the agent there."""
    found: dict[str, Given] = {}
    if host.gpus is not None:
        found["gpus"] = Given(",".join(map(str, host.gpus)), f"{host.name} gpus")
    if host.slots is not None:
        found["nproc_per_node"] = Given(str(host.slots), f"{host.name} slots")
    return found


def _shares(count: int, given: Values) -> tuple[list[Mapping[str, Given]], dict[str, str]]:
    """Nodes played on one machine share its GPUs and cores."""
    from phalanx.launch.node_gpus import node_gpus

    asked = given["gpus"].text.strip().lower() if "gpus" in given else "auto"
    ranks = given["nproc_per_node"].text if "nproc_per_node" in given else "1"
    each = int(ranks) if ranks.isdecimal() and int(ranks) > 0 else 1
    environ = {} if os.environ.get("OMP_NUM_THREADS") else _threads(count * each)
    visible = () if asked in ("none", "cpu") else node_gpus(os.environ).visible
    if not visible:
        return [{} for _ in range(count)], environ
    if asked.replace(",", "").isdecimal():
        numbers = asked.split(",")
    else:
        idle = [gpu for gpu in visible if asked == "all" or not gpu.users]
        numbers = [str(gpu.index) for gpu in idle]
    each = each if ranks.isdecimal() and "nproc_per_node" in given else max(1, len(numbers) // count)
    if len(numbers) < count * each:
        raise UsageMistake(
            f"--local-nodes {count}: {count * each} ranks for {len(numbers)} free GPUs ({', '.join(numbers) or 'none'}): "
            "NCCL takes no two ranks on one GPU.",
            fix=f"--local-nodes {count} --gpus none, to play them on the CPU with gloo",
        )
    mine = [numbers[k * each : (k + 1) * each] for k in range(count)]
    return [{"gpus": Given(",".join(part), "--gpus")} for part in mine], environ


def _threads(ranks: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // ranks))}


def description(job: NodesJob, chosen: NodesChosen) -> str:
    """The job as ``--dry-run`` shows it; no host is asked."""
    lines = [f"Would start a node agent on {len(chosen.hosts)} nodes, each with its own ranks:"]
    for number, host in enumerate(chosen.hosts):
        where = "this machine" if chosen.same_machine else _address(host, chosen.by)
        own = "".join(f", {key}={given.text}" for key, given in job.per_node[number].items())
        lines.append(f"  {f'node {number}':12} {where}{own}")
    ranks = (
        job.given["nproc_per_node"].text
        if "nproc_per_node" in job.given
        else "by each node's GPUs, 1 without"
    )
    words = [job.resolved.name, *job.args]
    lines += [
        f"  {'command':12} {' '.join([sys.executable, '-u', *words])}",
        f"  {'ranks':12} {ranks}" + (", where its host does not say" if any(job.per_node) else ""),
        f"  {'folder':12} {os.getcwd()}, on every node",
        f"  {'meeting':12} node 0, at {'port ' + str(job.port) if job.port else 'a free port'} that the others reach",
        f"  {'log folder':12} {job.log_dir}, a folder in it for each node",
    ]
    return "\n".join(lines)


def _address(host: Host, by: str) -> str:
    user = f"{host.user}@" if host.user else ""
    return f"{user}{host.name}" + (f" port {host.port}" if host.port else "") + f" by {by}"

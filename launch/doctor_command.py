"""`phalanx doctor`: what on this machine, on several, or in a pasted report would break a multi-GPU job."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.tools.usage import UsageMistake, nearest

if TYPE_CHECKING:
    from phalanx.tools.doctor.findings import Finding, Report
    from phalanx.tools.doctor.host_findings import HostsReport

NODE_TIMEOUT_S = 5.0
TIMEOUT_S = 60.0
DEFAULT_PORT = 29500
_MAX_TIMEOUT_S = 3600.0
_TURNS = "|/-\\"

_HELP = """Look at this machine for what would break a multi-GPU job, and name the cause and the fix.

\b
phalanx doctor
phalanx doctor --nnodes 2 --nproc-per-node 8 --output-dir /scratch/run
phalanx doctor --report collect_env.txt
phalanx doctor --hosts node1,node2
phalanx doctor --node

Drivers, torch and what stands beside it, GPUs, libraries, limits, disks, network and variables are read, torch is
imported in a process of its own, and ranks on idle devices do an all-reduce.

Exit code: 0 fine (warnings too), 1 something fails, 2 usage, 3 phalanx itself could not finish.
"""


def _option(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """An option with its variable: ``--fail-on`` is PHALANX_DOCTOR_FAIL_ON."""
    variable = "PHALANX_DOCTOR_" + names[0].removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=variable, **settings)


@click.command("doctor", help=_HELP, short_help="Name what on this machine would break a job, and the fix.")
@_option(
    "--report",
    metavar="FILE|-",
    help="Read facts from pasted text (collect_env, nvidia-smi, ds_report, our JSON) instead.",
)
@_option(
    "--node", is_flag=True, help="For a cluster's prolog: no torch, no self-test, all within --timeout-s."
)
@_option("--timeout-s", metavar="S", help="Seconds for the slowest probe.  [default: 60, with --node 5]")
@_option("--hosts", metavar="NAMES", help="Compare these hosts: node1,node[2-4], or `all` of a Slurm job.")
@_option("--hostfile", metavar="FILE", help="Compare the hosts of this file.")
@_option("--ssh-port", metavar="N", help="Port of the hosts' ssh servers.")
@_option("--port", metavar="N", help="Rendezvous port to try.  [default: MASTER_PORT, else 29500]")
@_option("--skip", multiple=True, metavar="ID", help="Leave this finding out; may be repeated.")
@_option("--fail-on", metavar="warn|fail", default="fail", help="Exit with 1 from this on.  [default: fail]")
@_option("--no-self-test", is_flag=True, help="Do not start ranks.")
@_option("--nnodes", metavar="N", help="Nodes of the job that is planned.")
@_option("--nproc-per-node", metavar="N", help="Ranks on this node of the job that is planned.")
@_option("--loader-workers", metavar="N", help="DataLoader workers of each rank.")
@_option("--output-dir", metavar="DIR", help="Where the job will write.")
@_option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@_option("--markdown", is_flag=True, help="Print Markdown for an issue, with users, paths and hosts masked.")
def doctor_command(**given: Any) -> int:
    """What `_HELP` says."""
    asked = _asked(given)
    if asked.report is not None:
        outcome = _from_text(asked)
    elif asked.hosts is not None:
        outcome = _from_hosts(asked)
    else:
        outcome = _from_here(asked)
    click.echo(_shown(outcome, asked), nl=False)
    return _exit_code(outcome.report.verdict, asked.fail_on)


@dataclass(frozen=True)
class _Outcome:
    """A report, and the names of the facts that a pasted text gave and lacked."""

    report: Report | HostsReport
    found: tuple[str, ...] = ()
    lacked: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The options, checked."""

    report: str | None
    node: bool
    timeout_s: float
    hosts: tuple[Any, ...] | None
    by_slurm: bool
    ssh_port: int | None
    port: int | None
    skip: frozenset[str]
    fail_on: str
    self_test: bool
    nnodes: int | None
    nproc_per_node: int | None
    loader_workers: int | None
    output_dir: str | None
    as_json: bool
    markdown: bool


def _asked(given: Mapping[str, Any]) -> _Asked:
    modes = [
        name
        for name, value in (
            ("--report", given["report"]),
            ("--node", given["node"]),
            ("--hosts", given["hosts"] is not None or given["hostfile"] is not None),
        )
        if value
    ]
    if len(modes) > 1:
        raise UsageMistake(
            f"{' and '.join(modes)} are two different questions.", fix=f"phalanx doctor {modes[0]} .."
        )
    if given["as_json"] and given["markdown"]:
        raise UsageMistake("--json and --markdown are two different outputs.", fix="one of them")
    hosts, by_slurm = _hosts(given["hosts"], given["hostfile"])
    nnodes = _whole("--nnodes", given["nnodes"], 1)
    if hosts is not None and nnodes is None:
        nnodes = len(hosts)
    return _Asked(
        report=given["report"],
        node=given["node"],
        timeout_s=_seconds(given["timeout_s"], NODE_TIMEOUT_S if given["node"] else TIMEOUT_S),
        hosts=hosts,
        by_slurm=by_slurm,
        ssh_port=_whole("--ssh-port", given["ssh_port"], 1, 65535),
        port=_whole("--port", given["port"], 1, 65535),
        skip=_skipped(given["skip"]),
        fail_on=_fail_on(given["fail_on"]),
        self_test=not given["no_self_test"] and not given["node"],
        nnodes=nnodes,
        nproc_per_node=_whole("--nproc-per-node", given["nproc_per_node"], 1),
        loader_workers=_whole("--loader-workers", given["loader_workers"], 0),
        output_dir=given["output_dir"],
        as_json=given["as_json"],
        markdown=given["markdown"],
    )


def _whole(option: str, text: str | None, minimum: int, maximum: int = 1_000_000) -> int | None:
    if text is None:
        return None
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10 and minimum <= int(text) <= maximum):
        raise UsageMistake(
            f"{option} {text}: a whole number of {minimum} to {maximum}.", fix=f"{option} {max(minimum, 2)}"
        )
    return int(text)


def _seconds(text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= _MAX_TIMEOUT_S:
        raise UsageMistake(
            f"--timeout-s {text}: seconds, from 0.1 to {_MAX_TIMEOUT_S:g}.", fix=f"--timeout-s {default:g}"
        )
    return value


def _fail_on(text: str) -> str:
    if text not in ("warn", "fail"):
        raise UsageMistake(f"--fail-on {text}: warn or fail.", fix="--fail-on warn")
    return text


def _skipped(words: Sequence[str]) -> frozenset[str]:
    """Ids to leave out; one that no check has would silently skip nothing."""
    from phalanx.tools.doctor.ids import KNOWN_IDS

    ids = [word.strip() for text in words for word in text.split(",") if word.strip()]
    for identity in ids:
        if identity not in KNOWN_IDS:
            near = nearest(identity, KNOWN_IDS)
            raise UsageMistake(
                f"--skip {identity}: no finding has that id.",
                fix=f"--skip {near[0]}"
                if near
                else "an id as it stands before a finding, such as shm-too-small",
            )
    return frozenset(ids)


def _hosts(names: str | None, hostfile: str | None) -> tuple[tuple[Any, ...] | None, bool]:
    """The hosts to look at, and whether srun reaches them: they are in this job's allocation."""
    from phalanx.dist.environments.hostfile import Host, InvalidHostfile, parse_hostfile
    from phalanx.dist.environments.slurm import expand_hostlist
    from phalanx.launch.remote_programs import allocation

    if names is None and hostfile is None:
        return None, False
    nodes = allocation(os.environ)
    if names is not None and hostfile is not None:
        raise UsageMistake("--hosts and --hostfile: one of them names the hosts.", fix="leave one out")
    try:
        if hostfile is not None:
            hosts = parse_hostfile(_read_text("--hostfile", hostfile))
        elif str(names).strip() == "all":
            if not nodes:
                raise UsageMistake(
                    "--hosts all: the nodes of a Slurm job, but this is in none.", fix="--hosts node1,node2"
                )
            hosts = [Host(name=name) for name in nodes]
        else:
            words = expand_hostlist(str(names))
            hosts = parse_hostfile("\n".join(words))
    except InvalidHostfile as error:
        raise UsageMistake(
            str(error).replace("hostfile line", "--hosts entry" if names else "hostfile line")
        ) from None
    except UsageMistake:
        raise
    except ValueError as error:
        raise UsageMistake(f"--hosts {names}: {error}") from None
    return tuple(hosts), bool(nodes) and all(host.name in nodes for host in hosts)


def _read_text(option: str, path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode(errors="replace") if sys.stdin is not None else ""
        return Path(path).read_bytes().decode(errors="replace")
    except OSError as error:
        raise UsageMistake(
            f"{option} {path}: {error.strerror}.", fix=f"{option} FILE, a file that you can read"
        ) from None


def _from_text(asked: _Asked) -> _Outcome:
    from phalanx.tools.doctor.checks import diagnose
    from phalanx.tools.doctor.report_text import facts_from_text

    read = facts_from_text(_read_text("--report", str(asked.report)))
    return _Outcome(diagnose(read.facts, skip=asked.skip), found=read.found, lacked=read.lacked)


def _from_here(asked: _Asked) -> _Outcome:
    from phalanx.tools.doctor.checks import diagnose
    from phalanx.tools.doctor.gather import gather, gather_node
    from phalanx.tools.doctor.node import judge_node, silent_driver
    from phalanx.tools.doctor.probes.scene import Scene
    from phalanx.tools.doctor.self_test import SelfTest

    scene = Scene(
        output_dir=Path(asked.output_dir) if asked.output_dir else None,
        nnodes=asked.nnodes,
        local_world_size=asked.nproc_per_node,
        loader_workers=asked.loader_workers,
        port=asked.port,
    )
    if asked.node:
        return _Outcome(judge_node(gather_node(scene, timeout_s=asked.timeout_s), skip=asked.skip))
    test = SelfTest(os.environ) if asked.self_test and "self-test" not in asked.skip else None
    extra: list[Finding] = []
    with _Busy() as busy:
        try:
            if test is not None:
                test.start()
            facts = gather(scene, timeout_s=asked.timeout_s, waiting=busy.probes)
            if test is not None:
                extra.append(test.run(facts, waiting=busy.ranks))
        finally:
            if test is not None:
                test.cancel()
    extra += silent_driver(facts, skip=asked.skip)
    return _Outcome(diagnose(facts, skip=asked.skip, extra=extra))


def _from_hosts(asked: _Asked) -> _Outcome:
    from phalanx.launch.remote_programs import BySlurm, BySsh
    from phalanx.tools.doctor.host_findings import HostsReport, judge
    from phalanx.tools.doctor.hosts import examine
    from phalanx.tools.doctor.probes.network import rendezvous_port
    from phalanx.tools.doctor.probes.scene import Scene

    hosts = {host.name: host for host in asked.hosts or ()}
    start = BySlurm(os.environ) if asked.by_slurm else BySsh(hosts, os.environ, asked.ssh_port)
    port = rendezvous_port(Scene(port=asked.port)) or DEFAULT_PORT
    question = {
        "nnodes": asked.nnodes,
        "local_world_size": asked.nproc_per_node,
        "loader_workers": asked.loader_workers,
        "output_dir": asked.output_dir,
    }
    with _Busy() as busy:
        views = examine(
            list(hosts),
            start,
            port=port,
            facts_question=question,
            timeout_s=asked.timeout_s,
            waiting=busy.hosts,
        )
    return _Outcome(HostsReport(tuple(views), judge(views, port=port, skip=asked.skip)))


class _Busy:
    """One line on a terminal that says what is waited for; nothing anywhere else."""

    def __init__(self) -> None:
        self._shown = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._turn = 0

    def probes(self, names: Sequence[str]) -> None:
        self._say("asking " + ", ".join(dict.fromkeys(names)))

    def ranks(self) -> None:
        self._say("ranks on idle devices")

    def hosts(self, names: Sequence[str]) -> None:
        self._say("waiting for " + ", ".join(names))

    def _say(self, text: str) -> None:
        if self._shown:
            self._turn += 1
            width = shutil.get_terminal_size().columns
            sys.stderr.write(f"\r\x1b[K{_TURNS[self._turn % 4]} {text}"[: width + 4])
            sys.stderr.flush()

    def __enter__(self) -> _Busy:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _shown(outcome: _Outcome, asked: _Asked) -> str:
    from phalanx.tools.doctor.host_findings import HostsReport
    from phalanx.tools.doctor.render import render_markdown

    report = outcome.report
    if asked.as_json:
        more = {"found": outcome.found, "lacked": outcome.lacked} if asked.report is not None else {}
        return json.dumps({**report.to_json(), **more}) + "\n"
    read = {"found": outcome.found, "lacked": outcome.lacked}
    if isinstance(report, HostsReport):
        if asked.markdown:
            return report.masked(render_markdown(report.as_one))
        return f"{report.summary}\n{_text(report.as_one)}"
    return render_markdown(report, **read) if asked.markdown else _text(report, **read)


def _text(report: Report, **read: Any) -> str:
    from phalanx.tools.doctor.render import render_text

    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    return render_text(report, colour=_in_colour(), width=width, **read)


def _in_colour() -> bool:
    shown = sys.stdout is not None and sys.stdout.isatty()
    return shown and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _exit_code(verdict: str, fail_on: str) -> int:
    return int(verdict == "fail" or (verdict == "warn" and fail_on == "warn"))

"""The options of `phalanx run`, as data: torchrun's own, and those that only phalanx has.

Every option is read from the command line, else from ``PHALANX_RUN_<NAME>``, and one of torchrun's also
from ``PET_<NAME>`` as torchrun does. Both spellings, ``--log-dir`` and ``--log_dir``, are the same option.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import click
from click.core import ParameterSource


@dataclass(frozen=True, kw_only=True)
class RunOption:
    """One option. Values stay text here: `phalanx.launch.values` checks them."""

    name: str  # long name, without the dashes in front
    help: str
    metavar: str | None = None  # None: a flag
    short: str | None = None
    torchrun: bool = False  # torchrun has it too
    without_effect: str | None = None  # the reason, shown when the option is given

    @property
    def key(self) -> str:
        """The name as Python spells it: ``log_dir``."""
        return self.name.replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that stand in for the option, first one first."""
        own = f"PHALANX_RUN_{self.key.upper()}"
        return (own, f"PET_{self.key.upper()}") if self.torchrun else (own,)


_EACH_LOG = "every rank's output is in its own log"

OPTIONS: dict[str, tuple[RunOption, ...]] = {
    "What runs": (
        RunOption(name="module", short="m", torchrun=True, help="TARGET is a module, as in `python -m`."),
        RunOption(name="no-python", torchrun=True, help="TARGET is an executable, not a Python script."),
        RunOption(name="run-path", torchrun=True, help="Run the script by runpy.run_path."),
    ),
    "Ranks and devices": (
        RunOption(
            name="nproc-per-node",
            metavar="N|auto|gpu|cpu",
            torchrun=True,
            help="Ranks on this node. gpu: one per visible GPU; cpu: one per core; auto: gpu, or cpu without any. "
            "Default: one per GPU that nobody uses, 1 without a GPU.",
        ),
        RunOption(
            name="gpus",
            metavar="auto[:N]|all|none|LIST",
            help="GPUs for the ranks, one each: idle ones, all, none, or nvidia-smi's numbers or UUIDs (2,5).",
        ),
        RunOption(
            name="wait",
            help="With --gpus auto[:N]: wait until so many GPUs are idle, first come first served.",
        ),
        RunOption(
            name="wait-timeout-s",
            metavar="SECONDS",
            help="How long --wait waits before it gives up.  [default: for ever]",
        ),
        RunOption(
            name="virtual-local-rank",
            torchrun=True,
            help="Each rank sees its own GPU alone, as device 0, and LOCAL_RANK=0.",
        ),
        RunOption(
            name="role", metavar="NAME", torchrun=True, help="Name of the ranks' role.  [default: default]"
        ),
    ),
    "Output": (
        RunOption(
            name="log-dir",
            metavar="FOLDER",
            torchrun=True,
            help="Folder for this run's logs.  [default: phalanx-logs/<time>-<name>]",
        ),
        RunOption(
            name="show",
            metavar="rank0|all",
            help="Ranks to show here. Default: rank 0 on a terminal, all ranks in a pipe or file.",
        ),
        RunOption(
            name="local-ranks-filter",
            metavar="R,R,..",
            torchrun=True,
            help="Show only these local ranks; the logs keep all.",
        ),
        RunOption(name="dry-run", help="Print what would run, and start nothing."),
    ),
    "Failure and end": (
        RunOption(
            name="max-restarts",
            metavar="N",
            torchrun=True,
            help="How often to start all ranks again after a failure.  [default: 0]",
        ),
        RunOption(
            name="monitor-interval",
            metavar="SECONDS",
            torchrun=True,
            help="Time between two looks at the rendezvous.  [default: 0.1]",
        ),
        RunOption(
            name="grace-s",
            metavar="SECONDS",
            help="Time the ranks get to end by themselves after a signal.  [default: 10]",
        ),
        RunOption(
            name="hang-timeout-s",
            metavar="SECONDS",
            help="End the job, and say where each rank stands, when none makes progress for so long (one node).  "
            "[default: never]",
        ),
        RunOption(
            name="shutdown-timeout", metavar="SECONDS", torchrun=True, help="torchrun's name for --grace-s."
        ),
        RunOption(
            name="signals-to-handle",
            metavar="NAME,..",
            torchrun=True,
            help="Signals to pass on to the ranks.  [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT]",
        ),
        RunOption(
            name="no-preload",
            help="Start each rank as a new Python process, not from one that holds torch already.",
        ),
    ),
    "Several nodes": (
        RunOption(
            name="hosts",
            metavar="NAMES",
            help="Start on these hosts by ssh: node1,me@node2 or node[01-04]. Node 0 is the first.",
        ),
        RunOption(
            name="hostfile",
            metavar="FILE",
            help="Start on the hosts of a file: `[user@]host [slots=N] [gpus=0,1] [port=N]`, one a line.",
        ),
        RunOption(name="ssh-port", metavar="PORT", help="Port of the hosts' ssh servers."),
        RunOption(
            name="ssh", metavar="COMMAND", help="How to call ssh, as in 'ssh -J gateway'.  [default: ssh]"
        ),
        RunOption(
            name="local-nodes",
            metavar="N",
            help="Play N nodes on this machine, each with its own agent and ranks.",
        ),
        RunOption(
            name="emit",
            metavar="slurm|kubernetes",
            help="Print the job as a script or manifest for this scheduler, and start nothing.",
        ),
        RunOption(
            name="sbatch",
            metavar="'OPTIONS'",
            help="sbatch's options for --emit slurm, as in '-A account -p gpu -t 4:00:00'.",
        ),
        RunOption(
            name="kubernetes",
            metavar="'KEY=VALUE ..'",
            help="For --emit kubernetes: image=, and name=, namespace=, claim=NAME:/PATH, shm=, cpu=, memory=, retries=.",
        ),
        RunOption(name="nnodes", metavar="N|MIN:MAX", torchrun=True, help="Number of nodes.  [default: 1]"),
        RunOption(name="node-rank", metavar="N", torchrun=True, help="Number of this node, from 0."),
        RunOption(
            name="master-addr", metavar="HOST", torchrun=True, help="Address of node 0, where all nodes meet."
        ),
        RunOption(
            name="master-port",
            metavar="PORT",
            torchrun=True,
            help="Port on node 0.  [default: a free one; 29500 with several nodes]",
        ),
        RunOption(
            name="rdzv-backend", metavar="NAME", torchrun=True, help="Rendezvous: static, c10d, etcd, .."
        ),
        RunOption(
            name="rdzv-endpoint", metavar="HOST:PORT", torchrun=True, help="Where the rendezvous takes place."
        ),
        RunOption(
            name="rdzv-id",
            metavar="ID",
            torchrun=True,
            help="Name of the job, the same on all nodes.  [default: none]",
        ),
        RunOption(
            name="rdzv-conf", metavar="KEY=VALUE,..", torchrun=True, help="Settings of the rendezvous."
        ),
        RunOption(
            name="local-addr",
            metavar="HOST",
            torchrun=True,
            help="Address of this node to tell the other nodes.",
        ),
        RunOption(
            name="standalone", torchrun=True, help="One node, on a free port: what happens by default."
        ),
    ),
    "Accepted from torchrun, without effect": (
        RunOption(
            name="redirects",
            metavar="STREAMS",
            short="r",
            torchrun=True,
            help="Both streams are always kept.",
            without_effect=_EACH_LOG,
        ),
        RunOption(
            name="tee",
            metavar="STREAMS",
            short="t",
            torchrun=True,
            help="Both streams are always kept; --show says what is shown.",
            without_effect=f"{_EACH_LOG}, and --show says what is shown",
        ),
        RunOption(
            name="log-line-prefix-template",
            metavar="TEXT",
            torchrun=True,
            help="The prefix is always '[rank R] '.",
            without_effect="shown lines start with '[rank R] '",
        ),
        RunOption(
            name="duplicate-stdout-filters",
            metavar="WORD,..",
            torchrun=True,
            help="Search the logs in its place.",
            without_effect=f"{_EACH_LOG}, whole",
        ),
        RunOption(
            name="duplicate-stderr-filters",
            metavar="WORD,..",
            torchrun=True,
            help="Search the logs in its place.",
            without_effect=f"{_EACH_LOG}, whole",
        ),
        RunOption(
            name="logs-specs",
            metavar="NAME",
            torchrun=True,
            help="The log folder has one form.",
            without_effect=f"{_EACH_LOG} in --log-dir",
        ),
        RunOption(
            name="event-log-handler",
            metavar="NAME",
            torchrun=True,
            help="Failures are in failure.json.",
            without_effect="how the run went is in run.json and failure.json, in the log folder",
        ),
        RunOption(
            name="start-method",
            metavar="spawn|fork|forkserver",
            torchrun=True,
            help="See --no-preload.",
            without_effect="ranks start from a process that holds torch, or as new ones with --no-preload",
        ),
        RunOption(
            name="numa-binding",
            metavar="MODE",
            torchrun=True,
            help="Use numactl or Slurm's --cpu-bind.",
            without_effect="ranks keep the CPUs that this process may use; bind them with numactl",
        ),
    ),
    "Other": (
        RunOption(
            name="print-completion",
            metavar="bash|zsh|fish",
            torchrun=True,
            help="torchrun's name for `phalanx completion`.",
        ),
    ),
}

BY_KEY: dict[str, RunOption] = {option.key: option for options in OPTIONS.values() for option in options}


@dataclass(frozen=True)
class Given:
    """A value the user gave, and where: ``--max-restarts 3`` or ``PHALANX_RUN_MAX_RESTARTS=3``."""

    text: str
    source: str  # "--max-restarts", or the name of the variable

    def __str__(self) -> str:
        joint = " " if self.source.startswith("-") else "="
        return f"{self.source}{joint}{self.text or repr(self.text)}"


def click_options() -> list[click.Parameter]:
    """All options for click, in the order of the help text."""
    return [_click_option(option) for option in BY_KEY.values()]


def _click_option(option: RunOption) -> click.Option:
    names = [option.key, f"--{option.name}"] + ([f"-{option.short}"] if option.short else [])
    variables = list(option.variables)
    if option.metavar is None:
        return click.Option(names, is_flag=True, default=False, envvar=variables, help=option.help)
    return click.Option(
        names, type=str, metavar=option.metavar, default=None, envvar=variables, help=option.help
    )


def values_given(ctx: click.Context, environ: Mapping[str, str] = os.environ) -> dict[str, Given]:
    """What was given on the command line or in the environment, by key; defaults are left out."""
    found = {}
    for key, option in BY_KEY.items():
        value = ctx.params.get(key)
        source = ctx.get_parameter_source(key)
        if (
            value is None
            or value is False
            or source not in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
        ):
            continue
        where = f"--{option.name}"
        if source is ParameterSource.ENVIRONMENT:
            where = next(name for name in option.variables if environ.get(name))
        found[key] = Given("" if value is True else str(value), where)
    return found


def notes_without_effect(given: Mapping[str, Given]) -> list[str]:
    """One line for each given option that changes nothing here."""
    return [
        f"{given[key].source} has no effect: {option.without_effect}."
        for key, option in BY_KEY.items()
        if key in given and option.without_effect is not None
    ]

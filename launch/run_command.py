"""`phalanx run`: from the words typed to a `RunSpec`, and on to the ranks."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from phalanx.dist.environments.rank_environment import RankEnvironment
from phalanx.launch import slurm_step, waiting
from phalanx.launch import values as checked
from phalanx.launch.completion_command import completion_script
from phalanx.launch.dry_run import description
from phalanx.launch.emit import Emission, emit
from phalanx.launch.meeting import meeting
from phalanx.launch.misplaced import check_misplaced
from phalanx.launch.options import OPTIONS, Given, click_options, notes_without_effect, values_given
from phalanx.launch.placement import Placement, place
from phalanx.launch.spec import RunSpec, Target, WorkerMain
from phalanx.launch.targets import RECIPES, recipes, resolve
from phalanx.launch.values import Values
from phalanx.tools.usage import CannotFinish, UsageMistake

if TYPE_CHECKING:
    from phalanx.launch.several_nodes import NodesChosen


class _Target(click.Argument):
    """TARGET: the Tab key offers files and the recipes' names."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name) for name in sorted(recipes()) if name.startswith(incomplete)]
        return [*names, CompletionItem(incomplete, type="file")]


class RunCommand(click.Command):
    """Keeps what was typed, and shows its options in sections."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["phalanx.typed"] = tuple(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options_alone = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
        shown = {param.name: param.get_help_record(ctx) for param in options_alone}
        for title, options in OPTIONS.items():
            records = [record for option in options if (record := shown.pop(option.key)) is not None]
            if title == "Other":
                records += [record for record in shown.values() if record is not None]  # --help
            with formatter.section(title):
                formatter.write_dl(records)


_HELP = """Start TARGET on several ranks, one process each: a script, a module (-m), or a recipe.

\b
phalanx run mnist                              a recipe, see `phalanx recipes`
phalanx run --nproc-per-node 2 train.py --lr 0.1
phalanx run -m package.train

Options stand before TARGET; what follows TARGET goes to it. Each option can be given as a variable too:
PHALANX_RUN_LOG_DIR=logs is --log-dir logs. torchrun's options are accepted, in both spellings.
"""


@click.pass_context
def _run(ctx: click.Context, /, target: str | None, args: tuple[str, ...], **_: Any) -> int | WorkerMain:
    given = values_given(ctx)
    if "print_completion" in given:
        click.echo(completion_script(given["print_completion"].text, ctx.find_root().command))
        return 0
    typed: tuple[str, ...] = ctx.meta["phalanx.typed"]
    before = typed[: len(typed) - len(args) - (target is not None)]
    what = _target(target, given)
    if before[-1:] != ("--",):
        check_misplaced(what, target or "", args, before)
    if what.name.startswith(f"{RECIPES}.") and {"--help", "-h"} & set(args):
        # A help text needs no ranks, and one copy is enough.
        return partial(os.execv, sys.executable, [sys.executable, "-m", what.name, *args])
    command_line = ("phalanx", "run", *typed)
    waiting.check(given)
    if {"emit", "sbatch", "kubernetes"} & set(given):
        click.echo(emit(Emission(target=what, typed=target or "", args=args, given=given)), nl=False)
        return 0
    task = slurm_step.task(given, os.environ)
    if task is not None and not slurm_step.is_agent(task, os.environ):
        return _become_rank(task, what, args, given)
    if task is not None:
        given = slurm_step.as_agent(task, given, os.environ, what.display)
    chosen = _nodes(given)
    if chosen is not None:
        waiting.check(given, several_nodes=True)
        _check_hang_timeout(given, several_nodes=True)
        return _run_nodes(chosen, what, target or "", args, given, command_line)
    spec, placement = build_spec(what, args, given, command_line=command_line)
    if "dry_run" in given:
        click.echo(description(spec, placement))
        return 0
    if find_spec("torch") is None:
        raise CannotFinish(
            f"torch is not installed for {sys.executable}, so no rank can start.",
            fix=f"{sys.executable} -m pip install torch, or start phalanx with the Python that has it",
        )
    spec = replace(spec, log_dir=_make_folder(spec.log_dir, given.get("log_dir")))
    for line in (*spec.notes, headline(spec, placement)):
        click.echo(f"phalanx run: {line}", err=True)
    from phalanx.launch.run import run  # torch is imported in there, once the variables it reads are set

    return run(spec)


def _become_rank(task: RankEnvironment, what: Target, args: Sequence[str], given: Values) -> WorkerMain | int:
    """One of several tasks that srun started on a node: a rank itself."""
    slurm_step.refuse_agents_options(task, given)
    variables = slurm_step.rank_variables(task, os.environ)
    if "dry_run" in given:
        click.echo(f"Would be rank {task.rank} of {task.world_size}: {what.name}")
        return 0
    return partial(slurm_step.become_rank, what, args, variables)


def _nodes(given: Values) -> NodesChosen | None:
    """The nodes to start from here, None where this node's ranks are all that is to be started."""
    if not ({"hosts", "hostfile", "local_nodes"} & set(given) or os.environ.get("SLURM_JOB_ID")):
        return None
    from phalanx.launch.several_nodes import nodes_chosen
    from phalanx.launch.slurm_job import nodes_of_job

    return nodes_chosen(given) or nodes_of_job(given, os.environ)


def _run_nodes(
    chosen: NodesChosen,
    what: Target,
    typed: str,
    args: Sequence[str],
    given: Values,
    command_line: Sequence[str],
) -> int:
    """On several nodes, from here."""
    from phalanx.launch.driver import drive
    from phalanx.launch.several_nodes import description as nodes_description
    from phalanx.launch.several_nodes import nodes_job

    folder = log_folder(checked.text(given, "log_dir"), what.display)
    job = nodes_job(chosen, what, typed, args, given, log_dir=folder, command_line=command_line)
    if "dry_run" in given:
        click.echo(nodes_description(job, chosen))
        return 0
    job = replace(job, log_dir=_make_folder(folder, given.get("log_dir")))
    return drive(job, chosen.hosts, chosen.start)


run_command = RunCommand(
    "run",
    callback=_run,
    params=[
        *click_options(),
        _Target(["target"], required=False, metavar="TARGET"),
        click.Argument(["args"], nargs=-1, type=click.UNPROCESSED),
    ],
    help=_HELP,
    short_help="Start a script, module or recipe on several ranks.",
    options_metavar="[OPTIONS]",
    # From TARGET on, every word is the script's own, `--` and options included.
    context_settings={"allow_interspersed_args": False},
)


def _target(typed: str | None, given: Values) -> Target:
    if typed is None:
        swallowed = [value for value in given.values() if value.text.endswith(".py")]
        if swallowed:
            raise UsageMistake(
                f"TARGET is missing: {swallowed[0]} was read as an option with its value.",
                fix=f"give {swallowed[0].source} its value, then {swallowed[0].text}",
            )
        raise UsageMistake(
            f"TARGET is missing: a script.py, -m module, or a recipe ({', '.join(sorted(recipes())) or 'none'}).",
            fix="phalanx run train.py",
        )
    return resolve(
        typed, module="module" in given, no_python="no_python" in given and "run_path" not in given
    )


def build_spec(
    target: Target, args: Sequence[str], given: Values, *, command_line: Sequence[str] = ()
) -> tuple[RunSpec, Placement]:
    """Check every value and put the job together; nothing is started or written.

    Raises:
        UsageMistake: A value is out of its range, or the values do not fit together.
    """
    meet = meeting(given)
    placement = place(given, take="dry_run" not in given)
    grace_s = checked.seconds(given, "grace_s", zero=True)
    if grace_s is None:
        grace_s = checked.seconds(given, "shutdown_timeout", zero=True)
    hang_timeout_s = _check_hang_timeout(given, several_nodes=meet.nnodes_max > 1)
    max_restarts = checked.whole_number(given, "max_restarts", low=0)
    monitor_interval_s = checked.seconds(given, "monitor_interval", zero=False)
    show = checked.choice(given, "show", ("rank0", "all"))
    signals = checked.signal_names(given)
    notes = (*notes_without_effect(given), *meet.notes, *placement.notes)
    folder = log_folder(checked.text(given, "log_dir"), target.display)
    base = RunSpec(target=target, nproc_per_node=placement.nproc_per_node, log_dir=folder)
    spec = replace(
        base,
        args=tuple(args),
        nnodes_min=meet.nnodes_min,
        nnodes_max=meet.nnodes_max,
        node_rank=meet.node_rank,
        rdzv_backend=meet.backend,
        rdzv_endpoint=meet.endpoint,
        rdzv_id=meet.job_id,
        rdzv_conf=meet.conf,
        master_addr=meet.master_addr,
        master_port=meet.master_port,
        local_addr=meet.local_addr,
        standalone=meet.standalone,
        max_restarts=max_restarts or 0,
        monitor_interval_s=monitor_interval_s or base.monitor_interval_s,
        preload="no_preload" not in given,
        show="auto" if show is None else "rank0" if show == "rank0" else "all",
        local_ranks_filter=checked.local_ranks(given, placement.nproc_per_node),
        gpus=placement.gpus,
        role=checked.text(given, "role", "default"),
        run_path="run_path" in given,
        virtual_local_rank="virtual_local_rank" in given or placement.virtual_local_rank,
        grace_s=base.grace_s if grace_s is None else grace_s,
        hang_timeout_s=hang_timeout_s,
        omp_num_threads=placement.omp_num_threads,
        signals_to_handle=base.signals_to_handle if signals is None else signals,
        notes=notes,
        command_line=tuple(command_line),
    )
    return spec, placement


def _check_hang_timeout(given: Values, *, several_nodes: bool) -> float | None:
    if several_nodes and "hang_timeout_s" in given:
        raise UsageMistake(
            f"{given['hang_timeout_s']}: hangs are looked for on one node only, and this job has several.",
            fix="leave --hang-timeout-s out",
        )
    return checked.seconds(given, "hang_timeout_s", zero=False)


def headline(spec: RunSpec, placement: Placement) -> str:
    """The line before the ranks' own output: how many, where, with how many threads, and the log folder."""
    count = spec.nproc_per_node
    ranks = f"{count} rank{'s' * (count > 1)}" + (" on this node" if spec.nnodes_max > 1 else "")
    devices = [f"cuda:{i} is {label}" for i, label in enumerate(placement.devices)]
    return "; ".join([ranks, *devices, placement.threads, f"logs in {spec.log_dir}"]) + "."


def log_folder(asked: str, name: str, now: float | None = None) -> Path:
    """This run's own folder: the one asked for, or ``phalanx-logs/<time>-<name>``.

    A folder that holds another run's logs already gets a folder like that inside: no log is overwritten.
    """
    base = Path(asked) if asked else Path("phalanx-logs")
    if asked and not (base / "run.json").exists() and not any(base.glob("rank-*.log")):
        return base
    return base / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{name}"


def _make_folder(folder: Path, given: Given | None) -> Path:
    """Make the log folder, with a number at its end where a run of the same second has taken the name."""
    for count in itertools.count(2):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=given is not None and Path(given.text) == folder)
            break
        except FileExistsError:
            if not folder.is_dir():
                raise _unwritable(folder, given, "a file has that name") from None
            folder = folder.with_name(f"{folder.name.removesuffix(f'.{count - 1}')}.{count}")
        except OSError as error:
            raise _unwritable(folder, given, str(error.strerror)) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(folder, given, "Permission denied")
    return folder


def _unwritable(folder: Path, given: Given | None, reason: str) -> UsageMistake:
    asked = f"{given}: " if given is not None else ""
    return UsageMistake(
        f"{asked}the log folder {str(folder)!r} cannot be written ({reason}), and no rank would leave a log.",
        fix="--log-dir FOLDER, a folder that you can write to",
    )

"""A launcher's option typed after TARGET: it would go to the script, and the job would run otherwise than asked."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from phalanx.launch import sources
from phalanx.launch.options import BY_KEY, RunOption
from phalanx.launch.spec import Target
from phalanx.launch.targets import RECIPES
from phalanx.tools.usage import UsageMistake

#: Options whose name means the launcher wherever it stands. Not here: --role, --module and others that a
#: script may well have without saying so in a file that we can see.
CLEAR = frozenset(
    {
        "dry-run",
        "gpus",
        "grace-s",
        "hostfile",
        "hosts",
        "local-addr",
        "local-nodes",
        "local-ranks-filter",
        "log-dir",
        "master-addr",
        "master-port",
        "max-restarts",
        "monitor-interval",
        "nnodes",
        "no-preload",
        "no-python",
        "node-rank",
        "nproc-per-node",
        "rdzv-backend",
        "rdzv-conf",
        "rdzv-endpoint",
        "rdzv-id",
        "show",
        "signals-to-handle",
        "ssh-port",
        "standalone",
        "start-method",
        "virtual-local-rank",
    }
)


def check_misplaced(target: Target, typed: str, args: Sequence[str], before: Sequence[str] = ()) -> None:
    """Refuse a launcher's option among the arguments of a script that does not know it.

    A script knows an option when its own code, or that of a module of the same project that it imports,
    has an option of that name. ``phalanx run -- train.py --gpus 2`` passes everything on: do not call this then.

    Args:
        target: What runs.
        typed: TARGET as the user typed it.
        args: What follows it.
        before: What the user typed between ``run`` and TARGET, for the message.

    Raises:
        UsageMistake: With the command line in the right order.
    """
    if target.kind == "command":
        return
    found = [(index, option) for index, word in enumerate(args) if (option := _option(word)) is not None]
    if not found:
        return
    files = _files(target)
    foreign = [
        (index, option)
        for index, option in found
        if not any(sources.knows_option(f, option.name) for f in files)
    ]
    if not files or not foreign:
        return
    names = ", ".join(dict.fromkeys(f"--{option.name}" for _, option in foreign))
    moved, kept = _reorder(args, dict(foreign))
    ours = shlex.join(["phalanx", "run", *before, *moved, typed, *kept])
    theirs = shlex.join(["phalanx", "run", *before, "--", typed, *args])
    raise UsageMistake(
        f"{names} after {typed} would go to {typed}, which has no such option, and not to phalanx run.",
        fix=f"{ours}\n     or, to pass it on all the same: {theirs}",
    )


def _option(word: str) -> RunOption | None:
    name = word.partition("=")[0]
    if not name.startswith("--"):
        return None
    name = name[2:].replace("_", "-")
    return BY_KEY[name.replace("-", "_")] if name in CLEAR else None


def _files(target: Target) -> list[Path]:
    if target.kind == "script":
        path = Path(target.name)
        return sources.project_files(path, folder=path.parent, root=None)
    module = sources.find_module(target.name, Path.cwd())
    if module is None or module.program is None:
        return []
    root = RECIPES if target.name.startswith(f"{RECIPES}.") else target.name.split(".")[0]
    return sources.project_files(module.program, folder=Path.cwd(), root=root)


def _reorder(args: Sequence[str], foreign: dict[int, RunOption]) -> tuple[list[str], list[str]]:
    """The launcher's options with their values, and the rest."""
    moved, kept = [], []
    index = 0
    while index < len(args):
        option = foreign.get(index)
        if option is None:
            kept.append(args[index])
        else:
            word = args[index].partition("=")
            moved.append(f"--{option.name}{word[1]}{word[2]}")
            if option.metavar is not None and not word[1] and index + 1 < len(args):
                index += 1
                moved.append(args[index])
        index += 1
    return moved, kept

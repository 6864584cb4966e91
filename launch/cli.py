"""The `phalanx` command and its subcommands; nothing here imports torch."""

from __future__ import annotations

import click

from phalanx import __version__
from phalanx.launch.bisect_command import bisect_command
from phalanx.launch.completion_command import completion_command
from phalanx.launch.recipes_command import recipes_command
from phalanx.launch.run_command import run_command

#: `--log_dir` is `--log-dir`, for every command and option.
CONTEXT_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "max_content_width": 110,
}


@click.group(context_settings=CONTEXT_SETTINGS)
@click.version_option(__version__, prog_name="phalanx", message="%(prog)s %(version)s")
def phalanx() -> None:
    """Train with PyTorch on many GPUs and many nodes, and be told what is wrong when that fails."""


phalanx.add_command(run_command, "run")
phalanx.add_command(bisect_command, "bisect")
phalanx.add_command(recipes_command, "recipes")
phalanx.add_command(completion_command, "completion")

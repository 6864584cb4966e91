"""`phalanx completion bash|zsh|fish`: what makes the Tab key know the command's words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from phalanx.tools.usage import UsageMistake, nearest

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_PHALANX_COMPLETE"


def completion_script(shell: str, root: click.Command) -> str:
    """The script for one shell, for instance for ``eval "$(phalanx completion bash)"``.

    Raises:
        UsageMistake: There is none for this shell.
    """
    found = get_completion_class(shell) if shell in SHELLS else None
    if found is None:
        near = nearest(shell, SHELLS, count=1) or [SHELLS[0]]
        raise UsageMistake(
            f"There is no completion for {shell!r}, only for {', '.join(SHELLS)}.",
            fix=f"phalanx completion {near[0]}",
        )
    # The version check of click's bash class starts a bash; the template itself needs none.
    complete = found(root, {}, "phalanx", VARIABLE)
    return complete.source_template % complete.source_vars()


@click.command()
@click.argument("shell", metavar="bash|zsh|fish")
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash:  echo 'eval "$(phalanx completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(phalanx completion zsh)"' >> ~/.zshrc
    fish:  phalanx completion fish > ~/.config/fish/completions/phalanx.fish
    """
    click.echo(completion_script(shell, ctx.find_root().command))

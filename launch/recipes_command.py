"""`phalanx recipes`: the training jobs that come with phalanx, and copies of them to change."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.launch.targets import recipes
from phalanx.tools.usage import UsageMistake, nearest


@click.group(
    invoke_without_command=True, short_help="List the training jobs that come with phalanx, or copy one."
)
@click.pass_context
def recipes_command(ctx: click.Context) -> None:
    """List the training jobs that come with phalanx; each is started by `phalanx run NAME`."""
    if ctx.invoked_subcommand is not None:
        return
    known = recipes()
    width = max((len(name) for name in known), default=0)
    for name in sorted(known):
        click.echo(f"{name:{width}}  {known[name].summary}")


@recipes_command.command("copy")
@click.argument("name")
@click.argument("file")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def copy_command(name: str, file: str, force: bool) -> None:
    """Write the recipe NAME to FILE, a script of your own to change: `phalanx run FILE`."""
    known = recipes()
    if name not in known:
        near = nearest(name, known, count=1) or sorted(known)[:1]
        raise UsageMistake(
            f"There is no recipe {name!r}, only {', '.join(sorted(known)) or 'none'}.",
            fix=f"phalanx recipes copy {' '.join(near)} {file}",
        )
    path = Path(file)
    if path.is_dir():
        path = path / f"{name}.py"
    try:
        with path.open("wb" if force else "xb") as out:
            out.write(known[name].path.read_bytes())
    except FileExistsError:
        raise UsageMistake(
            f"{str(path)!r} exists already; it would be lost.", fix="another name, or --force"
        ) from None
    except OSError as error:
        raise UsageMistake(
            f"{str(path)!r} cannot be written: {error.strerror}.", fix="another folder"
        ) from None
    click.echo(f"{path}: a copy of the recipe {name}. Start it with: phalanx run {path}")

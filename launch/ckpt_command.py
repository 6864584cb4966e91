"""`phalanx ckpt`: look into checkpoints, mend their keys, compare, convert and verify them."""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from phalanx.tools.usage import UsageMistake

_JSON = click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="PHALANX_CKPT_JSON",
    help="Print one JSON object and nothing else.",
)
_FORCE = click.option(
    "--force",
    is_flag=True,
    envvar="PHALANX_CKPT_FORCE",
    help="Replace the output if it exists, be it the source.",
)
_ENTRY = click.option(
    "--entry",
    envvar="PHALANX_CKPT_ENTRY",
    metavar="NAME",
    help="Where in the file the weights are, such as state_dict; found by itself as a rule.",
)


@click.group(short_help="Look into checkpoints; mend, compare, convert and verify them.")
def ckpt_command() -> None:
    """Look into checkpoints; mend their keys, compare, convert and verify them. Pickled code is never run.

    \b
    phalanx ckpt inspect model.pt
    phalanx ckpt fix model.pt --like other.pt
    phalanx ckpt diff before.pt after.safetensors
    phalanx ckpt convert model.pt model.safetensors
    phalanx ckpt verify checkpoints/step-500

    FILE is a .pt, .pth, .bin, .ckpt or .safetensors file, or a folder: torch.distributed.checkpoint, DeepSpeed,
    accelerate, Hugging Face, Lightning or phalanx.

    Exit code: 0 fine, 1 the checkpoint is bad (or two differ), 2 usage, 3 phalanx itself could not finish.
    """


def _bad_is_one(command: Callable[..., int]) -> Callable[..., int]:
    """A bad checkpoint is told in one message, or as JSON where that was asked for, with exit code 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> int:
        from phalanx.dist.key_rewrites import StateDictError
        from phalanx.tools.ckpt.errors import BadCheckpoint

        try:
            return command(*args, **options)
        except (BadCheckpoint, StateDictError) as error:
            if options.get("as_json"):
                click.echo(json.dumps({"schema": 1, "error": str(error)}))
            else:
                click.echo(f"phalanx ckpt: {error}", err=True)
            return 1

    return wrapped


def _print(value: dict[str, Any] | Any, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(value, default=str))
        return
    click.echo("\n".join(value))


@ckpt_command.command("inspect")
@click.option(
    "--stats",
    is_flag=True,
    envvar="PHALANX_CKPT_STATS",
    help="Read all values: NaN, Inf, least, greatest, mean.",
)
@click.option(
    "--key",
    "pattern",
    envvar="PHALANX_CKPT_KEY",
    metavar="PATTERN",
    help="Only keys like this, such as '*.bias'.",
)
@_JSON
@click.argument("file")
@_bad_is_one
def inspect_command(file: str, stats: bool, pattern: str | None, as_json: bool) -> int:
    """List the tensors in FILE: keys, shapes, types, bytes, shared storages; and what else it holds."""
    import dataclasses

    from phalanx.tools.ckpt import reports
    from phalanx.tools.ckpt.inspecting import inspect_json, statistics_of
    from phalanx.tools.ckpt.opening import open_checkpoint

    contents = open_checkpoint(file, values=stats)
    chosen = contents
    if pattern is not None:
        some = [entry for entry in contents.entries if fnmatch.fnmatchcase(entry.key, pattern)]
        if not some:
            raise UsageMistake(
                f"--key {pattern}: none of the {len(contents.entries)} keys is like that.", fix="--key '*'"
            )
        chosen = dataclasses.replace(contents, entries=some)
    found = statistics_of(chosen) if stats else None
    _print(
        inspect_json(chosen, found) if as_json else reports.inspect_text(contents, chosen.entries, found),
        as_json,
    )
    return 1 if contents.problems else 0


@ckpt_command.command("fix")
@click.option(
    "--like", required=True, envvar="PHALANX_CKPT_LIKE", metavar="FILE|KEYS", help="The keys to have: another checkpoint, a list of keys in a file, or KEY,KEY,.."
)  # fmt: skip
@click.option(
    "-o",
    "--output",
    envvar="PHALANX_CKPT_OUTPUT",
    metavar="FILE",
    help="The file to write.  [default: NAME.fixed.pt]",
)
@_ENTRY
@click.option(
    "--rule", "rules", multiple=True, envvar="PHALANX_CKPT_RULE", metavar="PATTERN=NEW", help="Rename keys: a regular expression and what to put there; may be repeated."
)  # fmt: skip
@click.option(
    "--partial",
    is_flag=True,
    envvar="PHALANX_CKPT_PARTIAL",
    help="Write what fits, though keys are missing or unexpected.",
)
@click.option(
    "--keep-other",
    is_flag=True,
    envvar="PHALANX_CKPT_KEEP_OTHER",
    help="Keep the rest of the file: optimizer, epoch, ...",
)
@_FORCE
@_JSON
@click.argument("file")
@click.argument("output_file", required=False, metavar="[OUTPUT]")
@_bad_is_one
def fix_command(
    file: str,
    like: str,
    output: str | None,
    entry: str | None,
    rules: tuple[str, ...],
    partial: bool,
    keep_other: bool,
    force: bool,
    as_json: bool,
    output_file: str | None,
) -> int:
    """Write FILE's weights with the keys that LIKE has: wrappers and prefixes are taken off or put on."""
    from phalanx.tools.ckpt import reports
    from phalanx.tools.ckpt.fixing import default_output, fix
    from phalanx.tools.ckpt.like import read_like
    from phalanx.tools.ckpt.opening import open_checkpoint

    if output is not None and output_file is not None:
        raise UsageMistake(
            f"OUTPUT is given twice, {output!r} and {output_file!r}.", fix=f"--output {output}"
        )
    pairs = [_rule(rule) for rule in rules]
    contents = open_checkpoint(file, values=True)
    target = Path(output or output_file or default_output(Path(file)))
    fixed = fix(
        contents, read_like(like), target, entry=entry, rules=pairs, partial=partial, keep_other=keep_other, force=force
    )  # fmt: skip
    _print(reports.fix_json(fixed) if as_json else reports.fix_text(fixed), as_json)
    return 0


def _rule(text: str) -> tuple[str, str]:
    import re

    pattern, equals, new = text.rpartition("=")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageMistake(
            f"--rule {text}: {pattern!r} is no regular expression: {error}.", fix=r"--rule '^net\.=model.'"
        ) from None
    if not equals or not pattern:
        raise UsageMistake(
            f"--rule {text}: a pattern, an equals sign, and what to put there.", fix=r"--rule '^net\.=model.'"
        )
    return pattern, new


@ckpt_command.command("diff")
@click.option(
    "--weights",
    is_flag=True,
    envvar="PHALANX_CKPT_WEIGHTS",
    help="Compare the model's weights alone, through wrappers and prefixes.",
)
@click.option(
    "--no-values", is_flag=True, envvar="PHALANX_CKPT_NO_VALUES", help="Compare keys, shapes and types only."
)
@click.option(
    "--atol",
    default="0",
    envvar="PHALANX_CKPT_ATOL",
    metavar="X",
    help="Largest difference that counts as the same.",
)
@click.option(
    "--rtol", default="0", envvar="PHALANX_CKPT_RTOL", metavar="X", help="The same, relative to A's values."
)
@click.option("--all", "show_all", is_flag=True, envvar="PHALANX_CKPT_ALL", help="List every difference.")
@_JSON
@click.argument("a")
@click.argument("b")
@_bad_is_one
def diff_command(
    a: str, b: str, weights: bool, no_values: bool, atol: str, rtol: str, show_all: bool, as_json: bool
) -> int:
    """Compare two checkpoints, of whatever formats: keys, shapes, types, values. Exit code 1 when they differ."""
    from phalanx.tools.ckpt import reports
    from phalanx.tools.ckpt.differing import diff, fixable
    from phalanx.tools.ckpt.opening import open_checkpoint

    limits = {"atol": _tolerance("--atol", atol), "rtol": _tolerance("--rtol", rtol)}
    first, second = (open_checkpoint(file, values=not no_values) for file in (a, b))
    compared = diff(first, second, values=not no_values, weights_only=weights, **limits)
    if as_json:
        _print(reports.diff_json(compared), True)
    else:
        hint = fixable(first, second) if compared.only_first and compared.only_second else ""
        _print(reports.diff_text(compared, hint, show_all), False)
    return 0 if compared.same else 1


def _tolerance(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageMistake(f"{name} {text}: a difference is 0 or more.", fix=f"{name} 1e-6")
    return value


@ckpt_command.command("convert")
@click.option(
    "--to", type=click.Choice(["pt", "safetensors", "phalanx"]), envvar="PHALANX_CKPT_TO", help="The format, where OUTPUT's name does not tell."
)  # fmt: skip
@_ENTRY
@_FORCE
@_JSON
@click.argument("file")
@click.argument("output")
@_bad_is_one
def convert_command(
    file: str, output: str, to: str | None, entry: str | None, force: bool, as_json: bool
) -> int:
    """Write FILE's weights to OUTPUT: a .pt or .safetensors file, or a checkpoint folder step-<N> of phalanx."""
    from phalanx.tools.ckpt import reports
    from phalanx.tools.ckpt.converting import convert, kind_of
    from phalanx.tools.ckpt.opening import open_checkpoint

    kind = kind_of(output, to)
    converted = convert(open_checkpoint(file, values=True), Path(output), kind, entry=entry, force=force)
    _print(reports.convert_json(converted) if as_json else reports.convert_text(converted), as_json)
    return 0


@ckpt_command.command("verify")
@_JSON
@click.argument("file")
@_bad_is_one
def verify_command(file: str, as_json: bool) -> int:
    """Read all of FILE and say whether it is whole: hashes, checksums, sizes, places, as far as its format has them."""
    from phalanx.tools.ckpt import reports
    from phalanx.tools.ckpt.verifying import verify

    verified = verify(Path(file))
    _print(reports.verify_json(file, verified) if as_json else reports.verify_text(file, verified), as_json)
    return 1 if verified.problems else 0

"""Where the `phalanx` command starts and ends: exit codes, and messages in one form."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import click

from phalanx.launch.cli import phalanx
from phalanx.tools.usage import CannotFinish, UsageMistake, nearest

EXIT_USAGE = 2
EXIT_INTERNAL = 3
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141


def main(words: Sequence[str] | None = None) -> None:
    """The console command ``phalanx``; does not return, except in a rank whose script has ended.

    Exit codes: 0 fine, 1 the thing looked at is bad, 2 usage, 3 phalanx itself could not finish, 130
    interrupted; `phalanx run` has 75 (saved on a signal) besides.
    """
    outcome = command(sys.argv[1:] if words is None else words)
    if isinstance(outcome, int):
        sys.exit(outcome)
    # A forked rank: its script runs from here, with no frame and no handler of the command line around it.
    outcome()


def command(words: Sequence[str]) -> int | Callable[[], None]:
    """Run one command line; an exit code, or what this process shall go on with."""
    stdout = sys.stdout
    try:
        # Without standalone mode click returns what a command returned, or the code of an early exit.
        outcome = phalanx.main(list(words), prog_name="phalanx", standalone_mode=False)
        if callable(outcome):
            return outcome  # type: ignore[no-any-return]
        if sys.stdout is not None:  # None when it was closed at the start, as by `>&-`
            sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except UsageMistake as error:
        return _say(words, str(error), EXIT_USAGE)
    except CannotFinish as error:
        return _say(words, str(error), EXIT_INTERNAL)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return EXIT_USAGE
    except click.ClickException as error:
        return _say(words, _in_our_words(error, words), EXIT_USAGE)
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _nobody_reads()
    except SystemExit:
        if sys.stdout is stdout:
            raise
        return _nobody_reads()  # click's own answer to a closed pipe: it wraps the stream and exits with 1
    except Exception as error:
        if os.environ.get("PHALANX_DEBUG", "0") not in ("", "0"):
            sys.excepthook(type(error), error, error.__traceback__)
        text = " ".join(str(error).split()) or "no message"
        hint = "PHALANX_DEBUG=1 shows where; please report it"
        return _say(words, f"internal error, {type(error).__name__}: {text} ({hint})", EXIT_INTERNAL)


def _nobody_reads() -> int:
    """As in `phalanx recipes | head -1`; the flush at exit must not fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # type: ignore[union-attr]
    return EXIT_PIPE_CLOSED


def _say(words: Sequence[str], message: str, code: int) -> int:
    print(f"{_name(words)}: {message}", file=sys.stderr)
    return code


def _name(words: Sequence[str]) -> str:
    """The command as the user knows it: ``phalanx run`` for ``run --gpus 9 train.py``."""
    return f"phalanx {words[0]}" if words and words[0] in phalanx.commands else "phalanx"


def _in_our_words(error: click.ClickException, words: Sequence[str]) -> str:
    """click's complaint, with the nearest name and what to type."""
    from phalanx.launch.options import BY_KEY  # for a mistake alone: every command would pay for it

    context = getattr(error, "ctx", None)
    here = context.command_path if context is not None else _name(words)
    if isinstance(error, click.NoSuchOption):
        return _no_such_option(error.option_name, context, here)
    typed = next((word for word in words if not word.startswith("-")), "")
    if here == "phalanx" and typed and typed not in phalanx.commands:
        return _no_such_command(typed)
    if isinstance(error, click.BadParameter) and error.param is not None and error.param.name in BY_KEY:
        for variable in BY_KEY[
            error.param.name
        ].variables:  # a flag has a bad value only from the environment
            if os.environ.get(variable):
                return (
                    f"{variable}={os.environ[variable]}: neither yes nor no.\nFix: {variable}=1, or unset it"
                )
    return f"{error.format_message().rstrip('.')}.\nFix: {here} --help shows what it takes"


def _no_such_option(option: str, context: click.Context | None, here: str) -> str:
    from phalanx.launch.options import BY_KEY

    if here == "phalanx" and option.lstrip("-").replace("-", "_") in BY_KEY:
        return f"{option} is an option of `phalanx run`.\nFix: phalanx run {option} .."
    names = [name for param in context.command.get_params(context) for name in param.opts] if context else []
    near = nearest(option, [name for name in names if name.startswith("--")])
    fix = f"did you mean {' or '.join(near)}?" if near else f"{here} --help lists the options"
    return f"There is no option {option}.\nFix: {fix}"


def _no_such_command(typed: str) -> str:
    from phalanx.launch.targets import recipes

    near = [f"phalanx {name}" for name in nearest(typed, phalanx.commands)]
    if os.path.isfile(typed) or typed in recipes():
        near.insert(0, f"phalanx run {typed}")
    listed = ", ".join(sorted(phalanx.commands))
    return f"There is no command {typed!r}, only {listed}.\nFix: {' or '.join(near) or 'phalanx --help'}"

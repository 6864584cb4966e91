"""`phalanx bisect`: a script's first step on 1 and on N ranks, and the first tensor that differs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import click

from phalanx.launch.targets import resolve
from phalanx.tools.usage import CannotFinish, UsageMistake

SHOWN_LINES = 20  # of the output of a script that failed

_HELP = """Run TARGET's first training step on 1 and on N ranks, and name the first tensor that differs, with a likely reason.

\b
phalanx bisect train.py
phalanx bisect --world-sizes 1,2,4 --steps 3 train.py --lr 0.1
phalanx bisect --no-dropout mnist

Compared are weights, samples, the outputs of every module, gradients, and weights and buffers after the step. The script
is run unchanged, and ended after those steps. Options stand before TARGET; what follows TARGET goes to it.

Exit code: 0 the same, 1 something differs, 2 usage, 3 the script failed or took no step.
"""


@click.command(
    "bisect",
    help=_HELP,
    short_help="Find where a step on N ranks first differs from one on 1.",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option(
    "--world-sizes",
    default="1,2",
    show_default=True,
    envvar="PHALANX_BISECT_WORLD_SIZES",
    metavar="N,N[,N..]",
    help="Numbers of ranks; the first is what the others are compared with.",
)
@click.option(
    "--steps",
    default="1",
    show_default=True,
    envvar="PHALANX_BISECT_STEPS_COUNT",
    metavar="N",
    help="Optimizer steps to compare.",
)
@click.option(
    "--tolerance",
    envvar="PHALANX_BISECT_TOLERANCE",
    metavar="X",
    help="Largest relative difference that counts as the same.  [default: 1e-4 for fp32, 1e-9 for fp64]",
)
@click.option("--no-dropout", is_flag=True, help="Switch dropout off, to see what else differs.")
@click.option(
    "--gpus",
    envvar="PHALANX_BISECT_GPUS",
    metavar="WHICH",
    help="As for `phalanx run`: auto, none, 0,1, ...",
)
@click.option(
    "--output-dir",
    envvar="PHALANX_BISECT_OUTPUT_DIR",
    metavar="FOLDER",
    help="Keep records and logs there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as in `python -m`.")
@click.argument("target", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def bisect_command(
    world_sizes: str,
    steps: str,
    tolerance: str | None,
    no_dropout: bool,
    gpus: str | None,
    output_dir: str | None,
    as_json: bool,
    module: bool,
    target: str | None,
    args: tuple[str, ...],
) -> int:
    """What `_HELP` says."""
    if target is None:
        raise UsageMistake(
            "TARGET is missing: a script.py, -m module, or a recipe.", fix="phalanx bisect train.py"
        )
    resolve(target, module=module)
    sizes = _world_sizes(world_sizes)
    count = _whole(steps)
    limit = _tolerance(tolerance)
    if find_spec("torch") is None:
        raise CannotFinish(
            f"torch is not installed for {sys.executable}, so no rank can start.",
            fix=f"{sys.executable} -m pip install torch, or start phalanx with the Python that has it",
        )
    from phalanx.dist.bisect import NothingRecorded, bisect_divergence

    with tempfile.TemporaryDirectory(prefix="phalanx-bisect-") as temporary:
        folder = Path(output_dir or temporary).absolute()
        start = _Starter(folder, gpus, (["-m"] if module else []) + [target, *args])
        try:
            found = bisect_divergence(
                start, sizes, steps=count, tolerance=limit, dropout=not no_dropout, folder=folder
            )
        except NothingRecorded as error:
            problem, _, fix = str(error).partition("\nFix: ")
            raise CannotFinish(f"{problem}{start.last_lines()}", fix=fix) from None
        except OSError as error:
            raise UsageMistake(
                f"{str(folder)!r} cannot be written: {error.strerror}.",
                fix="--output-dir FOLDER, a folder that you can write to",
            ) from None
    if as_json:
        click.echo(
            json.dumps(_plain({"schema": 1, "same": found.divergence is None, **dataclasses.asdict(found)}))
        )
    else:
        click.echo(str(found))
    return 0 if found.divergence is None else 1


class _Starter:
    """Starts ranks by ``phalanx run``, and keeps what they print."""

    def __init__(self, folder: Path, gpus: str | None, words: list[str]) -> None:
        self._folder, self._words = folder, words
        self._options = [] if gpus is None else ["--gpus", gpus]
        self._output: Path | None = None

    def __call__(self, world_size: int, variables: Mapping[str, str]) -> int:
        name = Path(variables["PHALANX_BISECT_FOLDER"]).name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._output = self._folder / f"{name}.txt"
        logs = self._folder / f"{name}-logs"
        command = [
            sys.executable,
            "-m",
            "phalanx",
            "run",
            "--nproc-per-node",
            str(world_size),
            *self._options,
        ]
        command += ["--log-dir", str(logs), *self._words]
        with self._output.open("wb") as output:
            done = subprocess.run(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        return done.returncode

    def last_lines(self) -> str:
        """The end of the last run's output, on lines of its own."""
        if self._output is None or not self._output.is_file():
            return ""
        lines = self._output.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        return "".join(f"\n  {line}" for line in lines)


def _world_sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    sizes = tuple(int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 6)
    if len(sizes) < len(parts) or len(sizes) < 2 or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise UsageMistake(
            f"--world-sizes {text}: two or more different numbers of ranks, 1 or more each.",
            fix="--world-sizes 1,2",
        )
    return sizes


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < 1:
        raise UsageMistake(f"--steps {text}: a number of steps is 1 or more.", fix="--steps 1")
    return int(text)


def _tolerance(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value >= 0 and math.isfinite(value)):
        raise UsageMistake(f"--tolerance {text}: a relative difference is 0 or more.", fix="--tolerance 1e-4")
    return value


def _plain(value: object) -> object:
    """For JSON, which has no infinity: null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value

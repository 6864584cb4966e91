"""``python -m phalanx.tools.bench``: one rank of a benchmark, under `phalanx run`, torchrun, srun or alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from phalanx.tools.bench.options import bench_options
from phalanx.tools.bench.settings import check_kind, checked_settings
from phalanx.tools.usage import CannotFinish, UsageMistake

DEFAULT_BATCHES = 100
DEFAULT_WORKERS = "0,1,2,4"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("kind")
@click.argument("target", required=False)
@bench_options
@click.option(
    "--result", hidden=True, help="Leave the report in this file, for the command that started the ranks."
)
def _bench(kind: str, target: str | None, as_json: bool, result: str | None, **given: Any) -> int:
    """KIND is all-reduce, all-gather, reduce-scatter, broadcast, all-to-all, send-recv, latency, or loader TARGET."""
    try:
        report, speaks = _measured(check_kind(kind), target, given, quiet=as_json)
    except (UsageMistake, CannotFinish) as error:
        if result is not None:
            _leave(result, {"error": str(error), "usage": isinstance(error, UsageMistake)})
            return 3  # the launcher ends the other ranks, which may wait for this one
        if isinstance(error, UsageMistake):
            raise click.UsageError(str(error)) from None
        raise
    if result is not None:
        if speaks:
            _leave(result, report)
        return 0
    if as_json and speaks:
        click.echo(json.dumps(report))
    return 0 if report["correct"] else 1


def _measured(
    kind: str, target: str | None, given: dict[str, Any], *, quiet: bool
) -> tuple[dict[str, Any], bool]:
    """The report, and whether it is this process that speaks of it: rank 0."""
    show = _nothing if quiet else _show
    if kind == "loader":
        from phalanx.tools.bench.loader import measure_loader
        from phalanx.tools.bench.report import loader_lines

        report = measure_loader(*checked_loader(target, given))
        for line in loader_lines(report):
            show(line)
        return report, True
    if target is not None:
        raise UsageMistake(f"{target!r}: {kind} takes no target.", fix=f"phalanx bench {kind}")
    settings = checked_settings(kind, given)
    from phalanx.tools.bench.ranks import leave, run_rank

    return run_rank(settings, show), leave()


def checked_loader(target: str | None, given: dict[str, Any]) -> tuple[str, list[int], int, int]:
    """Target, worker counts, batches and warm-up of a loader's benchmark.

    Raises:
        UsageMistake: A value is out of its range, or the target is missing.
    """
    if target is None:
        raise UsageMistake("loader: which one?", fix="phalanx bench loader train.py:make_loader")
    text = given.get("workers") or DEFAULT_WORKERS
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        raise UsageMistake(f"--workers {text}: numbers of worker processes, 0 to 999.", fix="--workers 0,2,4")
    settings = checked_settings(
        "loader", {**given, "iterations": given.get("iterations") or str(DEFAULT_BATCHES)}
    )
    return target, [int(part) for part in dict.fromkeys(parts)], settings.iterations, settings.warmup


def _leave(result: str, content: dict[str, Any]) -> None:
    """The report for whoever started the ranks; of errors the first one that any rank leaves."""
    from phalanx.tools.bench.report import write_result

    if "error" not in content or not Path(result).exists():
        write_result(Path(result), content)


def _show(line: str) -> None:
    print(line, flush=True)


def _nothing(line: str) -> None:
    """With --json only the object is printed."""


def main() -> None:
    """The program of one rank; exit codes as those of `phalanx bench`."""
    try:
        outcome = _bench.main(prog_name="python -m phalanx.tools.bench", standalone_mode=False)
    except click.ClickException as error:
        # Click's own way out, by which a launcher knows that the words were wrong, not the ranks.
        error.show()
        sys.exit(error.exit_code)
    except CannotFinish as error:
        print(f"phalanx bench: {error}", file=sys.stderr)
        sys.exit(3)
    code = outcome if isinstance(outcome, int) else 0
    if "phalanx.tools.bench.ranks" in sys.modules:
        # Gloo's threads let go of a call's tensors a moment after it has returned, and abort the process when Python
        # is being taken down by then. Nothing is left to do.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

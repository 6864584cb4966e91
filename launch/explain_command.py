"""`phalanx explain`: the cause of a failed run, out of its logs."""

from __future__ import annotations

import sys

import click

_EXIT_CODES = {"explained": 0, "no-failure": 0, "unknown": 1}


@click.command(short_help="Name the cause of a failed run, from its logs.")
@click.argument("logs", nargs=-1, metavar="[LOG...]")
@click.option("--json", "as_json", is_flag=True, envvar="PHALANX_EXPLAIN_JSON", help="Print one JSON object.")
def explain_command(logs: tuple[str, ...], as_json: bool) -> int:
    """Name the cause of a failed run: which rank failed first, why, and what to type.

    LOG is a file (also .gz), a folder of logs, or - for standard input. Without one the newest run under
    phalanx-logs is read. Exit code: 0 explained, or there is no failure; 1 the cause is unknown.
    """
    from phalanx.tools.explain import explain_sources, find_sources, render

    stdin = None if sys.stdin is None else sys.stdin.buffer
    explanation = explain_sources(find_sources(logs, stdin=stdin))
    if as_json:
        import json

        click.echo(json.dumps(explanation.to_json()))
    else:
        click.echo(render(explanation))
    return _EXIT_CODES[explanation.outcome]

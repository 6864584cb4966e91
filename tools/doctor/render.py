"""A report as text for a terminal, and as Markdown that gives away no names."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

from phalanx.tools.doctor.findings import Finding, Report
from phalanx.tools.doctor.masking import Masks
from phalanx.tools.doctor.summary import facts_summary

_COLOURS = {"fail": "31", "warn": "33", "ok": "32", "skip": "2"}
_WORDS = {"fail": "FAIL", "warn": "WARN", "ok": "ok", "skip": "skip"}


def render_text(
    report: Report,
    *,
    colour: bool = False,
    width: int = 100,
    verbose: bool = False,
    found: Iterable[str] = (),
    lacked: Iterable[str] = (),
) -> str:
    """What `phalanx doctor` prints: what was looked at, the root cause, what else, and what to type.

    Args:
        verbose: List what is fine too, one line each.
        found: Names of the facts that a pasted report gave.
        lacked: Names of those it did not.
    """
    width = max(width, 30)

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if colour else text

    lines = [_wrap(line, width, "") for line in facts_summary(report.facts)]
    lines += _report_lines(found, lacked, width)
    bad = [finding for finding in report.findings if finding.status in ("fail", "warn")]
    fine = [finding for finding in report.findings if finding.status not in ("fail", "warn")]
    for position, finding in enumerate(bad):
        lines += ["", *_finding_lines(finding, width, paint, leading=position == 0 and len(bad) > 1)]
    if fine and verbose:
        lines += [
            "",
            *(
                _wrap(
                    f"{paint(_WORDS[finding.status], _COLOURS[finding.status])}  {finding.title}",
                    width,
                    "    ",
                )
                for finding in fine
            ),
        ]
    lines += ["", _verdict(report, len(bad), len(fine))]
    return "\n".join(lines).strip("\n") + "\n"


def _report_lines(found: Iterable[str], lacked: Iterable[str], width: int) -> list[str]:
    names = (("Found in the report: ", tuple(found)), ("Not in the report: ", tuple(lacked)))
    return [_wrap(label + ", ".join(values), width, "  ") for label, values in names if values]


def _finding_lines(
    finding: Finding, width: int, paint: Callable[[str, str], str], *, leading: bool
) -> list[str]:
    head = f"{_WORDS[finding.status]}  {finding.title} [{finding.id}]"
    wrapped = _wrap(head, width, "      ")
    code = _COLOURS[finding.status]
    word = _WORDS[finding.status]
    lines = [wrapped.replace(word, paint(word, f"1;{code}"), 1)]
    if leading and finding.status == "fail":
        lines.append(_wrap("      start here: what follows may come of it", width, "      "))
    lines += [_wrap(f"      {line}", width, "        ") for line in finding.evidence]
    # A command stays on one line: broken, it could not be copied.
    lines += [f"      {'Fix: ' if number == 0 else '     '}{line}" for number, line in enumerate(finding.fix)]
    return lines


def _verdict(report: Report, bad: int, fine: int) -> str:
    checks = f"{fine} check{'s' * (fine != 1)} fine"
    if report.verdict == "ok":
        return (
            f"Nothing wrong found ({checks})."
            if fine
            else "Nothing wrong found: no check had the facts it needs."
        )
    fails = sum(finding.status == "fail" for finding in report.findings)
    parts = [f"{fails} failure{'s' * (fails != 1)}"] if fails else []
    warnings = bad - fails
    parts += [f"{warnings} warning{'s' * (warnings != 1)}"] if warnings else []
    return f"{', '.join(parts)}, {checks}."


def _wrap(line: str, width: int, indent: str) -> str:
    return (
        textwrap.fill(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )
        if line.strip()
        else line
    )


def render_markdown(report: Report, *, found: Iterable[str] = (), lacked: Iterable[str] = ()) -> str:
    """For an issue: the same, with users, paths, hosts, serial numbers and addresses masked."""
    masks = Masks(report.facts)
    lines = [f"### phalanx doctor: {report.verdict}", ""]
    lines += [f"- {line}" for line in facts_summary(report.facts)]
    lines += [
        f"- {label}{', '.join(names)}"
        for label, names in (("found: ", tuple(found)), ("not in the report: ", tuple(lacked)))
        if names
    ]
    for finding in report.findings:
        if finding.status not in ("fail", "warn"):
            continue
        lines += ["", f"**{_WORDS[finding.status]}** {_escaped(finding.title)} (`{finding.id}`)", ""]
        lines += [f"- {_escaped(line)}" for line in finding.evidence]
        if finding.fix:
            lines += ["", "```sh", *finding.fix, "```"]
    fine = [finding.title for finding in report.findings if finding.status == "ok"]
    if fine:
        lines += [
            "",
            "<details><summary>fine</summary>",
            "",
            *(f"- {_escaped(title)}" for title in fine),
            "",
            "</details>",
        ]
    return masks.apply("\n".join(lines)) + "\n"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("```", "'''")

"""Every check, as data, and how a report is made of what they find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.findings import Finding, Report, in_order

Check = Callable[[Facts], "Finding | Iterable[Finding] | None"]

CHECKS: Mapping[str, Check] = {}


def diagnose(facts: Facts, *, skip: Collection[str] = (), extra: Iterable[Finding] = ()) -> Report:
    """Run every check over ``facts``.

    Args:
        skip: Ids of findings that are left out.
        extra: Findings that need more than facts, such as the self-test's.
    """
    findings = [*extra]
    for check in CHECKS.values():
        found = check(facts)
        findings.extend([found] if isinstance(found, Finding) else found or ())
    return Report(facts, in_order(finding for finding in findings if finding.id not in skip))

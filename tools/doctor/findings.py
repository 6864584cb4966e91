"""What the checks found: findings, and the report that puts the cause first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.facts_json import to_json

Status = Literal["ok", "warn", "fail", "skip"]
SCHEMA = 1
_ORDER = {"fail": 0, "warn": 1, "ok": 2, "skip": 3}


@dataclass(frozen=True)
class Finding:
    """One answer of one check.

    Args:
        id: Kebab case; the same id is used wherever this cause is named.
        status: ``fail`` breaks a job, ``warn`` may slow or break it, ``skip`` could not be judged.
        title: One line for a reader who knows nothing of the check.
        evidence: What was read, one fact a line.
        fix: Commands to type, or steps, the first one preferred.
        weight: How directly the evidence proves it, 0 to 100; orders findings of one status.
    """

    id: str
    status: Status
    title: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    weight: int = 50

    def to_json(self) -> dict[str, Any]:
        """The JSON contract of one finding."""
        return {
            "id": self.id,
            "status": self.status,
            "title": self.title,
            "evidence": list(self.evidence),
            "fix": list(self.fix),
        }


@dataclass(frozen=True)
class Report:
    """Findings about one machine, most important first."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Literal["ok", "warn", "fail"]:
        """The worst status among the findings."""
        statuses = {finding.status for finding in self.findings}
        return "fail" if "fail" in statuses else "warn" if "warn" in statuses else "ok"

    @property
    def root_cause(self) -> Finding | None:
        """The finding to read first: a failure, else a warning, else None."""
        first = self.findings[0] if self.findings else None
        return first if first is not None and first.status in ("fail", "warn") else None

    def to_json(self) -> dict[str, Any]:
        """The JSON contract of `phalanx doctor --json`."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "facts": to_json(self.facts),
            "findings": [finding.to_json() for finding in self.findings],
        }


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Failures first, and within a status the most directly proven first; else as they came."""
    return tuple(sorted(findings, key=lambda finding: (_ORDER[finding.status], -finding.weight)))

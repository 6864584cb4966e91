"""A node in a cluster's prolog: what of a report may drain it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from phalanx.tools.doctor.checks import diagnose
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.findings import Finding, Report, in_order

_DRIVER_PROBES = ("NVML", "CUDA driver")


def judge_node(facts: Facts, *, skip: Collection[str] = ()) -> Report:
    """As `diagnose`, except that a probe of ours that breaks is a note: no node is drained for it.

    A driver that does not answer in time is a warning: it may be sick, or slow to start for want of the
    persistence daemon. Who wants such nodes drained says ``--fail-on warn``.
    """
    report = diagnose(facts, skip=skip)
    findings = [_as_note(finding) if finding.id == "probe-failed" else finding for finding in report.findings]
    return Report(facts, in_order([*silent_driver(facts, skip=skip), *findings]))


def _as_note(finding: Finding) -> Finding:
    return dataclasses.replace(finding, status="skip")


def silent_driver(facts: Facts, *, skip: Collection[str] = ()) -> Iterable[Finding]:
    """A driver in which our questions hang."""
    hanging = [probe for probe in facts.probes if probe.name in _DRIVER_PROBES and "in time" in probe.error]
    if hanging and "driver-does-not-answer" not in skip:
        yield Finding(
            "driver-does-not-answer",
            "warn",
            "the NVIDIA driver does not answer",
            evidence=tuple(f"{probe.name}: {probe.error}" for probe in hanging),
            fix=(
                "nvidia-smi   # hangs as well: look for Xid in dmesg, then reset the GPU or reboot the node",
                "systemctl enable --now nvidia-persistenced   # without it the driver starts anew each time",
            ),
            weight=58,
        )

"""What several hosts' answers mean: only what differs, and what fails."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.tools.doctor.checks import diagnose
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.facts_json import to_json
from phalanx.tools.doctor.findings import Finding, Report, in_order
from phalanx.tools.doctor.hosts import HostView, pairs

CLOCK_SKEW_S = 1.0  # logs of two hosts, and files on a shared disk, are compared by time
_BREAKING = ("torch", "NCCL", "phalanx", "backend")  # ranks of two versions do not understand each other

Value = Callable[[Facts], Any]


@dataclass(frozen=True)
class HostsReport:
    """Findings about several hosts, most important first, and what each host answered."""

    hosts: tuple[HostView, ...]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Literal["ok", "warn", "fail"]:
        """The worst status among the findings."""
        return self.as_one.verdict

    @property
    def as_one(self) -> Report:
        """The findings as if they were one machine's, for the texts that are made of it."""
        return Report(Facts(), self.findings)

    @property
    def summary(self) -> str:
        """Who was asked, in a line."""
        silent = sum(bool(view.problem) for view in self.hosts)
        return f"{len(self.hosts)} hosts asked, {len(self.hosts) - silent} answered"

    def masked(self, text: str) -> str:
        """The text without the hosts' names."""
        names = {view.name: f"<host {number}>" for number, view in enumerate(self.hosts, start=1)}
        for view in self.hosts:
            own = view.facts.network.host_name if view.facts is not None and view.facts.network else None
            names.setdefault(own or view.name, names[view.name])
        for name in sorted(names, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", names[name], text)
        return text

    def to_json(self) -> dict[str, Any]:
        """As for one machine, and ``hosts``: each one's facts, or why there are none."""
        hosts = {
            view.name: {"problem": view.problem} if view.facts is None else {"facts": to_json(view.facts)}
            for view in self.hosts
        }
        return {**self.as_one.to_json(), "hosts": hosts}


def _packages(facts: Facts) -> str | None:
    names = ("accelerate", "deepspeed", "numpy", "torchvision", "transformers")
    found = {package.name: package.version for package in facts.packages or ()}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found) or None


def _gpus(facts: Facts) -> str | None:
    if facts.gpus is None:
        return "none" if facts.driver is not None and facts.driver.error else None
    names = [gpu.name or "unknown" for gpu in facts.gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _mtu(facts: Facts) -> str | None:
    """MTUs that are in use; each host may name its interfaces in its own way."""
    if facts.network is None or facts.network.interfaces is None:
        return None
    mtus = {
        entry.mtu for entry in facts.network.interfaces if entry.up and entry.addresses and entry.name != "lo"
    }
    return ", ".join(str(mtu) for mtu in sorted(mtu for mtu in mtus if mtu is not None)) or None


def _infiniband(facts: Facts) -> str | None:
    if facts.network is None or facts.network.infiniband is None:
        return None
    return ", ".join(f"{port.device} {port.state} {port.rate}" for port in facts.network.infiniband) or "none"


def _variables(facts: Facts) -> str | None:
    wanted = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES", "MASTER_", "OMP_NUM_THREADS")
    chosen = {name: value for name, value in (facts.env or {}).items() if name.startswith(wanted)}
    return " ".join(f"{name}={value}" for name, value in sorted(chosen.items())) or "none"


def _gib(size: int | None) -> str | None:
    return None if size is None else "unlimited" if size < 0 else f"{size / (1 << 30):.3g} GiB"


#: By name, what should be alike on every host of a job.
ALIKE: Mapping[str, Value] = {
    "torch": lambda facts: facts.torch and (facts.torch.version or "not usable"),
    "NCCL": lambda facts: facts.torch and (facts.torch.nccl_loaded or facts.torch.nccl),
    "Python": lambda facts: facts.python and facts.python.version,
    "packages": _packages,
    "driver": lambda facts: facts.driver and facts.driver.version,
    "GPUs": _gpus,
    "container": lambda facts: facts.container and (facts.container.kind or "none"),
    "operating system": lambda facts: facts.platform and facts.platform.os,
    "CPUs": lambda facts: facts.platform and facts.platform.cpu_count,
    "memory": lambda facts: facts.memory and _gib(facts.memory.total_bytes),
    "/dev/shm": lambda facts: facts.limits and _gib(facts.limits.shm_total_bytes),
    "locked memory": lambda facts: facts.limits and _gib(facts.limits.memlock_bytes),
    "open files": lambda facts: facts.limits and facts.limits.nofile,
    "MTU": _mtu,
    "InfiniBand": _infiniband,
    "variables": _variables,
}


def judge(views: Sequence[HostView], *, port: int, skip: Collection[str] = ()) -> tuple[Finding, ...]:
    """All findings about these hosts, most important first."""
    answering = [view for view in views if not view.problem]
    found = [
        *_silent(views),
        *_unreachable(answering, port),
        *_names(answering),
        *_clocks(answering),
        *_differences(answering),
        *_each(answering, skip),
    ]
    if not found and answering:
        found.append(Finding("hosts-alike", "ok", f"{len(answering)} hosts are alike and reach each other"))
    return in_order(finding for finding in found if finding.id not in skip)


def _silent(views: Sequence[HostView]) -> list[Finding]:
    silent = [view for view in views if view.problem]
    if not silent:
        return []
    fix = ("ssh HOST true   # must work without a password or a question, also the other way round",)
    lines = tuple(f"{view.name}: {view.problem}" for view in silent)
    if any("No module named" in view.problem or "No such file" in view.problem for view in silent):
        fix = (
            "install phalanx there, at the same path: the interpreter of this command is started on each host",
        )
    names = ", ".join(view.name for view in silent)
    return [
        Finding("host-does-not-answer", "fail", f"{names}: no answer", evidence=lines, fix=fix, weight=95)
    ]


def _unreachable(views: Sequence[HostView], port: int) -> list[Finding]:
    failed, by_address = [], []
    for one, other, outcome in pairs(views):
        if "error" in outcome:
            failed.append(f"{one.name} -> {other.name} port {port}: {outcome['error']}")
        elif outcome.get("by") != "name":
            error = outcome.get("name_error")
            by_address.append(f"{one.name} -> {other.name}: {error}; its address {outcome['by']} answers")
    found = []
    if failed:
        found.append(
            Finding(
                "rendezvous-port-unreachable",
                "fail",
                f"{len(failed)} of {len(list(pairs(views)))} ways between these hosts are closed on port {port}",
                evidence=tuple(failed[:20]),
                fix=(
                    "open TCP between the job's hosts: NCCL and gloo use any port above 1024, not the rendezvous' alone",
                    "check routes: ip route get ADDRESS, on both",
                ),
                weight=90,
            )
        )
    if by_address:
        found.append(
            Finding(
                "host-name-not-usable",
                "warn",
                "some hosts are reached by address, but not by name",
                evidence=tuple(by_address[:20]),
                fix=("put the hosts into DNS or /etc/hosts on each host, or use an address for MASTER_ADDR",),
                weight=70,
            )
        )
    return found


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _names(views: Sequence[HostView]) -> list[Finding]:
    """A name that means one address here and another there. Each host may call itself by loopback, see below."""
    loopback, different = [], []
    for target in views:
        meanings: dict[str, tuple[str, ...]] = {}
        for view in views:
            addresses = tuple(sorted(view.names.get(target.name, {}).get("addresses") or ()))
            if not addresses or view.machine == target.machine:
                continue
            if any(map(_is_loopback, addresses)):
                loopback.append(f"{target.name} is {', '.join(addresses)} on {view.name}")
            else:
                meanings[view.name] = addresses
        if len(set(meanings.values())) > 1:
            different += [f"{target.name} is {', '.join(what)} on {name}" for name, what in meanings.items()]
    found = []
    if loopback:
        found.append(
            Finding(
                "hostname-resolves-to-loopback",
                "fail",
                "a host's name means loopback on another host",
                evidence=tuple(loopback[:20]),
                fix=("remove those lines from /etc/hosts there",),
                weight=88,
            )
        )
    if different:
        found.append(
            Finding(
                "host-name-differs",
                "warn",
                "a name means different addresses on different hosts",
                evidence=tuple(different[:20]),
                fix=("give every host the same /etc/hosts or DNS, or use an address for MASTER_ADDR",),
                weight=80,
            )
        )
    return found


def _clocks(views: Sequence[HostView]) -> list[Finding]:
    known = {view.name: view.clock_s for view in views if view.clock_s is not None}
    if len(known) < 2:
        return []
    low = min(known.items(), key=lambda item: item[1][0])
    high = max(known.items(), key=lambda item: item[1][0])
    apart = high[1][0] - low[1][0]
    if apart - high[1][1] - low[1][1] < CLOCK_SKEW_S:
        return []
    title = f"the clocks of {high[0]} and {low[0]} are {apart:.1f} s apart"
    lines = tuple(f"{name}: {ahead - low[1][0]:+.2f} s" for name, (ahead, _) in known.items())
    fix = ("timedatectl set-ntp true   # or chronyc makestep, on the host that is off",)
    return [Finding("clock-skew", "warn", title, evidence=lines, fix=fix, weight=40)]


def _differences(views: Sequence[HostView]) -> list[Finding]:
    lines, breaking = [], False
    for name, value in [*ALIKE.items(), ("phalanx", None)]:
        by_host = {
            view.name: view.version if value is None else value(view.facts)
            for view in views
            if view.facts is not None
        }
        groups: dict[str, list[str]] = {}
        for host, seen in by_host.items():
            if seen is not None:
                groups.setdefault(str(seen), []).append(host)
        if len(groups) > 1:
            breaking |= name in _BREAKING
            shown = sorted(groups.items(), key=lambda item: -len(item[1]))
            lines.append(f"{name}: " + "; ".join(f"{what} on {_some(hosts)}" for what, hosts in shown))
    if not lines:
        return []
    names = ", ".join(line.partition(":")[0] for line in lines)
    return [
        Finding(
            "hosts-differ",
            "fail" if breaking else "warn",
            f"the hosts differ: {names}",
            evidence=tuple(lines),
            fix=(
                "give every host of a job the same environment: one image, or one shared folder of packages",
            ),
            weight=60,
        )
    ]


def _some(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _each(views: Sequence[HostView], skip: Collection[str]) -> list[Finding]:
    """Each host's own failures and warnings, once for all hosts that share one."""
    shared: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for view in views:
        if view.facts is None:
            continue
        for finding in diagnose(view.facts, skip=skip).findings:
            if finding.status in ("fail", "warn"):
                shared.setdefault((finding.id, finding.status), []).append((view.name, finding))
    found = []
    for (identity, _), entries in shared.items():
        first = entries[0][1]
        lines = [f"{name}: {line}" for name, finding in entries for line in finding.evidence[:3]]
        where = "every host" if len(entries) == len(views) else _some([name for name, _ in entries])
        found.append(
            Finding(
                identity,
                first.status,
                f"{where}: {first.title}",
                evidence=tuple(lines[:20]),
                fix=first.fix,
                weight=first.weight,
            )
        )
    return found

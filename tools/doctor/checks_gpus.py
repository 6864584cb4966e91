"""The GPUs themselves: healthy, unshared, fast, and able to reach each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from phalanx.tools.doctor.facts import Facts, GpuFacts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.judging import fail, fine, proven, suspected, symptom_weight, warn
from phalanx.tools.doctor.reading import cuda_works, env, gpu_label, nvidia_gpus, says
from phalanx.tools.facts.tables import gpu_by_name, xid

_XID = re.compile(
    r"Xid \(PCI:([0-9a-fA-F:.]{4,20})\)?: (\d{1,4})|\bXids?(?: errors?)?[: ]{1,3}(\d{1,4}(?:(?:,| and|, and| or|/)? ?\d{1,4}){0,6})\b",
    re.I,
)
_APPLICATION = {8, 13, 31, 32, 43, 45, 68, 69}  # a program's own faults: nothing is wrong with the machine
_QUIET = {38, 44, 56, 63, 66, 92, 121, 137, 154, 171}
_TROUBLE = r"fail|error|only (?:one|1|the first)|\bddp\b|nccl|hang|distributed|device ordinal|cannot|does not|doesn.t|not possible"
_LOST = {54, 79, 119, 120, 143, 158}
_BAD_THROTTLE = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")


def check_lost(facts: Facts) -> Finding | None:
    """A GPU that NVML lists and cannot reach is gone until the machine is restarted."""
    fix = (
        "sudo nvidia-smi --gpu-reset -i <index>, else power-cycle the node (a reboot may not do)",
        "look at power cables and riser; if it comes back: RMA",
    )
    broken = [gpu for gpu in facts.gpus or () if gpu.problem]
    codes = [line for code, line in _xids(facts) if code in _LOST]
    if broken or codes:
        evidence = (*(f"{gpu_label(gpu)}: {gpu.problem}" for gpu in broken[:4]), *codes[:3])
        return proven(facts, "gpu-lost", "a GPU no longer answers", evidence, fix, 93)
    return suspected(facts, "gpu-lost", "a GPU no longer answers", fix)


def check_ecc(facts: Facts) -> Iterator[Finding]:
    """Uncorrectable memory errors and what row remapping could not mend."""
    cause, title = "gpu-ecc-error", "a GPU has uncorrectable memory errors"
    fix = (
        "drain the node, then: sudo nvidia-smi --gpu-reset -i <index> (or reboot), which applies pending row remaps",
        "nvidia-smi -q -d ECC,ROW_REMAPPER; dcgmi diag -r 3; if it comes back or remapping failed: RMA",
    )
    evidence: list[str] = []
    pending: list[str] = []
    for gpu in facts.gpus or ():
        if gpu.ecc_uncorrectable:
            evidence.append(
                f"{gpu_label(gpu)}: {gpu.ecc_uncorrectable} uncorrectable errors since the driver was loaded"
            )
        if gpu.remap_failed:
            evidence.append(f"{gpu_label(gpu)}: row remapping failed")
        if gpu.remap_pending or gpu.retired_pages_pending:
            pending.append(f"{gpu_label(gpu)}: a row remap or page retirement waits for a reset")
    evidence += [line for code, line in _xids(facts) if "ecc" in _causes(code) and code not in _QUIET]
    if evidence:
        yield proven(facts, cause, title, (*evidence[:4], *pending[:2]), fix, 92)
    elif pending:
        yield warn(cause, "a GPU has remapped memory that a reset must bring into use", pending[:4], fix, 62)
    else:
        found = suspected(facts, cause, title, fix)
        if found:
            yield found
    info = suspected(
        facts,
        "gpu-inforom-corrupted",
        "a GPU's infoROM is damaged",
        ("harmless for compute in most cases; nvidia-smi -q names the GPU; tell the vendor",),
        cap=59,
    )
    if info:
        yield info


def _causes(code: int) -> tuple[str, ...]:
    row = xid(code)
    return tuple(row["likely_cause"][:1]) if row else ()


def _xids(facts: Facts) -> list[tuple[int, str]]:
    """Codes in the kernel log or among the messages, first in time first."""
    found: list[tuple[int, str]] = []
    for line in (*(facts.kernel_log or ()), *(line for line in facts.messages if "xid" in line.lower())):
        match = _XID.search(line)
        for code in _codes(match) if match else ():
            row = xid(code)
            entry = (code, f"Xid {code}{': ' + row['title'] if row else ''}   {' '.join(line.split())[:160]}")
            if entry not in found:
                found.append(entry)
    return found


def _codes(match: re.Match[str]) -> list[int]:
    """The codes a line names: "Xid (PCI:0000:3b:00): 48" has one, "Xid 63 and 94" two."""
    return [int(match[2])] if match[2] else [int(number) for number in re.findall(r"\d{1,4}", match[3])]


def check_xids(facts: Facts) -> Iterator[Finding]:
    """Other events the driver logged."""
    for code, line in _xids(facts)[:8]:
        row = xid(code)
        if row is None or code in _QUIET or code in _LOST or "ecc" in _causes(code):
            continue
        if code in _APPLICATION:
            yield warn(
                "xid-application",
                f"the driver logged a program's fault (Xid {code})",
                (line,),
                (row["action"],),
                24,
            )
        elif "nvlink" in _causes(code):
            yield fail(
                "gpu-nvlink-error",
                f"an NVLink failed (Xid {code})",
                (line,),
                (row["action"], "nvidia-smi nvlink -e; nvidia-smi topo -m"),
                82,
            )
        else:
            yield warn(
                "gpu-xid-error", f"the driver logged a GPU fault (Xid {code})", (line,), (row["action"],), 55
            )


def check_exclusive(facts: Facts) -> Finding | None:
    """In exclusive mode a second process on a GPU, or a rank that touches GPU 0 first, is refused."""
    cause = "exclusive-compute-mode"
    fix = (
        "torch.cuda.set_device(local_rank) before anything touches CUDA (init_world() of phalanx does), or one visible GPU per process",
        "sudo nvidia-smi -c DEFAULT",
    )
    closed = [gpu for gpu in facts.gpus or () if gpu.compute_mode == "prohibited"]
    if closed:
        return fail(
            cause,
            "a GPU is in prohibited compute mode",
            [gpu_label(gpu) for gpu in closed[:4]],
            ("sudo nvidia-smi -c DEFAULT",),
            86,
        )
    gpus = [gpu for gpu in facts.gpus or () if gpu.compute_mode == "exclusive"]
    title = "the GPUs are in exclusive-process mode: one process each"
    if gpus:
        evidence = [f"{gpu_label(gpu)}: exclusive process mode" for gpu in gpus[:4]]
        told = symptom_weight(facts, cause) >= 70 or any(gpu.process_count for gpu in gpus)
        return (
            proven(facts, cause, title, evidence, fix, 87) if told else warn(cause, title, evidence, fix, 64)
        )
    settled = bool(facts.gpus) and all(gpu.compute_mode == "default" for gpu in facts.gpus or ())
    return suspected(facts, cause, title, fix, refuted=settled)


def check_mig(facts: Facts) -> Finding | None:
    """One process sees one MIG slice, and NCCL has no way between slices."""
    cause = "mig-single-device"
    fix = (
        "run one process per slice: export CUDA_VISIBLE_DEVICES=<one MIG UUID of nvidia-smi -L>",
        "for several ranks take whole GPUs: sudo nvidia-smi -mig 0",
    )
    slices = [uuid for gpu in facts.gpus or () for uuid in gpu.mig_uuids or ()]
    slices += [
        gpu.name or ""
        for gpu in facts.gpus or ()
        if re.search(r"\bMIG\b|MIG-|\dg\.\d{1,3}gb", gpu.name or "")
    ]
    slices += [
        entry for entry in env(facts).get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.startswith("MIG-")
    ]
    enabled = [gpu for gpu in facts.gpus or () if gpu.mig_enabled]
    ranks = (facts.job and facts.job.local_world_size) or 0
    title = "MIG slices cannot work together: one process sees one, and there are no collectives between them"
    if len(dict.fromkeys(slices)) > 1 or len(slices) > 1 or (slices and ranks > 1):
        evidence = (f"{len(slices)} slices", *slices[:3])
        content = cuda_works(facts) is True and ranks < 2 and not says(facts, _TROUBLE)
        return (
            warn(cause, title, evidence, fix, 64)
            if content
            else proven(facts, cause, title, evidence, fix, 88)
        )
    if enabled and facts.live and not slices:
        return warn(
            "mig-without-instances",
            "MIG is on and no slice is made: CUDA sees no device",
            [gpu_label(gpu) for gpu in enabled[:4]],
            ("sudo nvidia-smi mig -cgi 0 -C, or sudo nvidia-smi -mig 0",),
            65,
        )
    off = bool(facts.gpus) and all(gpu.mig_enabled is False for gpu in facts.gpus or ())
    return suspected(facts, cause, title, fix, refuted=off)


def check_large_bar(facts: Facts) -> Finding | None:
    """A GPU whose memory window does not fit into the address space is not initialised."""
    fix = (
        "in the firmware turn on Above 4G Decoding and Resizable BAR (and turn CSM off), then boot again",
        "or boot with pci=realloc",
    )
    return suspected(
        facts,
        "bios-large-bar-off",
        "the firmware gives the GPU no room: above-4G decoding or resizable BAR is off",
        fix,
        refuted=cuda_works(facts) is True,
    )


def check_throttling(facts: Facts) -> Finding | None:
    """A GPU that brakes itself makes every rank wait."""
    slow = [
        (gpu, reason)
        for gpu in facts.gpus or ()
        for reason in gpu.throttle_reasons or ()
        if reason.startswith(_BAD_THROTTLE)
    ]
    if not slow:
        return None
    evidence = [
        f"{gpu_label(gpu)}: {reason}{f', {gpu.temperature_c} C' if gpu.temperature_c else ''}"
        for gpu, reason in slow[:6]
    ]
    return warn(
        "gpu-throttled",
        "a GPU is braking itself",
        evidence,
        ("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; clean fans, check cooling and power cables",),
        54,
    )


def check_pcie(facts: Facts) -> Finding | None:
    """A narrow link stays narrow; a slow generation is normal at rest."""
    slow = []
    for gpu in nvidia_gpus(facts):
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            slow.append(f"{gpu_label(gpu)}: x{gpu.pcie_width} of x{gpu.pcie_width_max}")
        busy = (gpu.utilization_percent or 0) > 50
        if busy and gpu.pcie_gen and gpu.pcie_gen_max and gpu.pcie_gen < gpu.pcie_gen_max:
            slow.append(f"{gpu_label(gpu)}: generation {gpu.pcie_gen} of {gpu.pcie_gen_max} under load")
    if not slow:
        return None
    return warn(
        "pcie-link-degraded",
        "a GPU's PCIe link is below what it can do",
        slow[:6],
        ("sudo lspci -vv | grep -E 'LnkCap|LnkSta'; reseat the card, try another slot or riser",),
        50,
    )


def check_models(facts: Facts) -> Finding | None:
    """Ranks wait for the slowest GPU, and run out of memory on the smallest."""
    names = Counter(gpu.name for gpu in nvidia_gpus(facts) if gpu.name)
    if len(names) < 2:
        return None
    evidence = [f"{count} x {name}" for name, count in names.most_common()]
    return warn(
        "mixed-gpus",
        "the GPUs are of different models",
        evidence,
        ("export CUDA_VISIBLE_DEVICES=<those of one model> CUDA_DEVICE_ORDER=PCI_BUS_ID",),
        28,
    )


def check_persistence(facts: Facts) -> Finding | None:
    """Without it the driver is unloaded when idle, and every job waits for it."""
    servers = [
        gpu
        for gpu in nvidia_gpus(facts)
        if gpu.persistence is False and (gpu_by_name(gpu.name or "") or {}).get("class") == "datacenter"
    ]
    if not servers or not facts.live:
        return None
    return warn(
        "gpu-persistence-off",
        "persistence mode is off",
        [gpu_label(gpu) for gpu in servers[:2]],
        ("sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1",),
        18,
    )


def check_peer_to_peer(facts: Facts) -> Iterator[Finding]:
    """ACS and a translating IOMMU send what GPUs tell each other through the root complex, where it stalls."""
    cause, title = "p2p-blocked-by-acs-iommu", "ACS or a translating IOMMU stands between the GPUs"
    fix = (
        "boot with iommu=pt (Intel: intel_iommu=off, AMD: amd_iommu=off), or turn ACS off in the firmware",
        "for bridge in $(lspci | awk '/PCI bridge|PLX/{print $1}'); do sudo setpci -s $bridge ECAP_ACS+0x6.w=0000; done",
        "until then: export NCCL_P2P_DISABLE=1",
    )
    topology = facts.topology
    several = len(nvidia_gpus(facts)) > 1
    evidence = []
    if topology and topology.acs_enabled:
        evidence.append("ACS redirects peer traffic on a bridge above a GPU")
    if topology and topology.iommu == "translating":
        evidence.append("the IOMMU translates")
    command_line = (facts.platform and facts.platform.kernel_cmdline) or ""
    if re.search(r"(?:intel|amd)_iommu=on", command_line) and "iommu=pt" not in command_line.replace(
        "_iommu=", ""
    ):
        evidence.append(f"kernel command line: {command_line[:160]}")
    if topology and topology.p2p_works is False:
        yield proven(facts, cause, title, ("a copy between two GPUs failed or hung", *evidence), fix, 86)
        return
    virtual = bool(facts.platform and facts.platform.virtual_machine)
    if several and evidence and not virtual:
        linked = topology and topology.links and all(link.kind.startswith("NV") for link in topology.links)
        yield (
            proven(facts, cause, title, evidence, fix, 80)
            if symptom_weight(facts, cause) >= 74
            else warn(cause, title, evidence, fix, 20 if linked else 46)
        )
        return
    one = (
        facts.gpus is not None
        and len(facts.gpus) == 1
        and not says(facts, r"multi|two|both|several|\d gpus|nccl")
    )
    found = suspected(facts, cause, title, fix, refuted=one)
    if found:
        yield found


def check_topology(facts: Facts) -> Iterator[Finding]:
    """Which ways there are between the GPUs; NVLinks that are down; NUMA."""
    links = (facts.topology and facts.topology.links) or ()
    down = [gpu for gpu in facts.gpus or () if gpu.nvlinks_active is not None and gpu.nvlinks_inactive]
    if down and any(gpu.nvlinks_active for gpu in facts.gpus or ()):
        evidence = [
            f"{gpu_label(gpu)}: {gpu.nvlinks_inactive} NVLinks down, {gpu.nvlinks_active} up"
            for gpu in down[:4]
        ]
        yield warn(
            "gpu-nvlink-error",
            "some NVLinks are down",
            evidence,
            ("nvidia-smi nvlink -s; reseat the bridge, or report the node",),
            52,
        )
    if links:
        kinds = Counter(link.kind for link in links)
        yield fine(
            "gpu-topology",
            "ways between the GPUs: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common()),
            *_slowest(links_of_numa(facts)),
        )


def links_of_numa(facts: Facts) -> tuple[GpuFacts, ...]:
    """GPUs whose NUMA node is known."""
    return tuple(gpu for gpu in facts.gpus or () if gpu.numa_node is not None)


def _slowest(gpus: Iterable[GpuFacts]) -> list[str]:
    nodes: dict[int, list[int]] = {}
    for gpu in gpus:
        nodes.setdefault(gpu.numa_node or 0, []).append(gpu.index or 0)
    return [
        f"NUMA node {node}: GPUs {', '.join(map(str, indices))}" for node, indices in sorted(nodes.items())
    ]

"""Every check, as data, and how a report is made of what they find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from phalanx.tools.doctor import (
    checks_arch,
    checks_companions,
    checks_container,
    checks_driver,
    checks_gpus,
    checks_libraries,
    checks_limits,
    checks_network,
    checks_torch,
    checks_variables,
)
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.findings import Finding, Report, in_order
from phalanx.tools.doctor.judging import warn

Check = Callable[[Facts], "Finding | Iterable[Finding] | None"]

# Where two findings weigh the same, the one that comes first here is named first.
CHECKS: Mapping[str, Check] = {
    "torch-import": checks_torch.check_import,
    "library-mismatch": checks_driver.check_library_mismatch,
    "kernel-module": checks_driver.check_kernel_module,
    "open-module": checks_driver.check_open_module,
    "fabric-manager": checks_driver.check_fabric_manager,
    "forward-compat": checks_driver.check_forward_compat,
    "driver-too-old": checks_driver.check_driver_too_old,
    "wsl": checks_driver.check_wsl,
    "unknown-error": checks_driver.check_unknown_error,
    "container-toolkit": checks_container.check_toolkit,
    "container-lost-gpus": checks_container.check_lost_gpus,
    "container-without-gpus": checks_container.check_without_gpus,
    "jetson": checks_arch.check_jetson,
    "architectures": checks_arch.check_architectures,
    "rocm-architectures": checks_arch.check_rocm_architectures,
    "ptx": checks_arch.check_ptx,
    "cpu-only": checks_torch.check_cpu_only,
    "torchvision-cpu": checks_companions.check_torchvision_cpu,
    "torchvision-cuda": checks_companions.check_torchvision_cuda,
    "torchvision": checks_companions.check_torchvision,
    "torchaudio": checks_companions.check_torchaudio,
    "extensions": checks_companions.check_extensions,
    "library-fit": checks_companions.check_library_fit,
    "duplicates": checks_torch.check_duplicates,
    "numpy": checks_torch.check_numpy,
    "mkl": checks_torch.check_mkl,
    "libstdcxx": checks_libraries.check_libstdcxx,
    "cudnn": checks_libraries.check_cudnn,
    "cuda-shadowed": checks_libraries.check_cuda_shadowed,
    "nccl": checks_libraries.check_nccl,
    "libuv": checks_libraries.check_libuv,
    "nccl-built": checks_libraries.check_nccl_built,
    "cuda-libraries": checks_torch.check_cuda_libraries,
    "cudnn-files": checks_torch.check_cudnn_files,
    "nvcc": checks_libraries.check_nvcc,
    "compilers": checks_libraries.check_compilers,
    "gpu-lost": checks_gpus.check_lost,
    "ecc": checks_gpus.check_ecc,
    "xids": checks_gpus.check_xids,
    "mig": checks_gpus.check_mig,
    "exclusive": checks_gpus.check_exclusive,
    "large-bar": checks_gpus.check_large_bar,
    "peer-to-peer": checks_gpus.check_peer_to_peer,
    "throttling": checks_gpus.check_throttling,
    "pcie": checks_gpus.check_pcie,
    "models": checks_gpus.check_models,
    "persistence": checks_gpus.check_persistence,
    "topology": checks_gpus.check_topology,
    "shm": checks_limits.check_shm,
    "memlock": checks_limits.check_memlock,
    "descriptors": checks_limits.check_descriptors,
    "processes": checks_limits.check_processes,
    "memory": checks_limits.check_memory,
    "cpus": checks_limits.check_cpus,
    "disks": checks_limits.check_disks,
    "host-name": checks_network.check_host_name,
    "loopback": checks_network.check_loopback,
    "interfaces": checks_network.check_interfaces,
    "infiniband": checks_network.check_infiniband,
    "mtu": checks_network.check_mtu,
    "rendezvous": checks_network.check_rendezvous,
    "visible-devices": checks_variables.check_visible,
    "ranks-fit": checks_variables.check_ranks_fit,
    "spelling": checks_variables.check_spelling,
    "renamed": checks_variables.check_renamed,
    "contradictions": checks_variables.check_contradictions,
    "slurm": checks_variables.check_slurm,
    "cuda-unavailable": checks_torch.check_cuda_unavailable,
}

# What a cause brings with it: not worth a line of its own beside it.
CONSEQUENCES: Mapping[str, Collection[str]] = {
    "kernel-module-not-loaded": (
        "driver-too-old",
        "container-without-gpus",
        "cpu-only-torch",
        "fabricmanager-not-running",
    ),
    "driver-library-mismatch": (
        "kernel-module-not-loaded",
        "container-without-gpus",
        "driver-too-old",
        "fabricmanager-not-running",
    ),
    "cuda-visible-devices-invalid": ("fabricmanager-not-running",),
    "gpu-lost": ("fabricmanager-not-running",),
    "gpu-ecc-error": ("fabricmanager-not-running",),
    "exclusive-compute-mode": ("fabricmanager-not-running",),
    "mig-single-device": ("fabricmanager-not-running",),
    "forward-compat-on-geforce": ("driver-too-old", "fabricmanager-not-running"),
    "driver-too-old": ("fabricmanager-not-running", "container-without-gpus", "kernel-module-not-loaded"),
    "wsl-libcuda-not-on-path": (
        "kernel-module-not-loaded",
        "container-without-gpus",
        "cuda-libs-not-installed",
    ),
    "container-toolkit-missing": ("container-without-gpus", "kernel-module-not-loaded"),
    "container-lost-gpu-cgroup": (
        "container-without-gpus",
        "kernel-module-not-loaded",
        "driver-library-mismatch",
    ),
    "container-without-gpus": ("kernel-module-not-loaded",),
    "gpu-driver-open-module-needed": ("bios-large-bar-off", "kernel-module-not-loaded"),
    "bios-large-bar-off": ("kernel-module-not-loaded",),
    "jetson-wrong-wheel": ("cpu-only-torch", "arch-not-in-build", "gpu-too-old-for-build", "driver-too-old"),
    "rocm-arch-not-in-build": ("arch-not-in-build", "cpu-only-torch"),
    "torchvision-cpu-build": ("torch-torchvision-mismatch", "torch-torchvision-cuda-mismatch"),
    "mkl-symbol-removed": ("extension-abi-mismatch", "duplicate-torch-install"),
    "nccl-library-mismatch": ("extension-abi-mismatch", "duplicate-torch-install"),
    "ld-library-path-shadows-cuda": ("extension-abi-mismatch", "duplicate-torch-install"),
    "ld-library-path-shadows-cudnn": ("cudnn-library-not-found",),
    "libuv-missing-windows": ("nccl-not-in-build",),
}
_VAGUE = ("cuda-unavailable", "torch-import-broken", "torch-import-crashes")  # named where nothing better is


def diagnose(facts: Facts, *, skip: Collection[str] = (), extra: Iterable[Finding] = ()) -> Report:
    """Run every check over ``facts``: findings, the root cause first.

    Args:
        skip: Ids of findings that are left out.
        extra: Findings that need more than facts, such as the self-test's.
    """
    findings = list(extra)
    for check in CHECKS.values():
        found = check(facts)
        findings.extend([found] if isinstance(found, Finding) else found or ())
    findings.extend(
        warn("probe-failed", f"{probe.name} could not be looked at", (probe.error,), (), 15)
        for probe in facts.probes
    )
    kept = _without_consequences(_one_each(finding for finding in findings if finding.id not in skip))
    return Report(facts, in_order(kept))


def _one_each(findings: Iterable[Finding]) -> list[Finding]:
    """The strongest finding of each id, and of those alike every one with its own title."""
    kept: dict[tuple[str, str], Finding] = {}
    bad = set()
    for finding in in_order(findings):
        kept.setdefault((finding.id, finding.title), finding)
        if finding.status in ("fail", "warn"):
            bad.add(finding.id)
    return [
        finding for finding in kept.values() if finding.status in ("fail", "warn") or finding.id not in bad
    ]


def _without_consequences(findings: list[Finding]) -> list[Finding]:
    """Leave out what a finding above explains; what is proven better than its supposed cause stays."""
    ordered = in_order(findings)
    dropped: set[str] = set()
    explained: set[str] = set()
    for finding in ordered:
        if finding.id in explained:
            dropped.add(finding.id)
        elif finding.status in ("fail", "warn") and finding.weight >= 60:
            explained.update(CONSEQUENCES.get(finding.id, ()))
    named = [
        finding for finding in ordered if finding.status == "fail" and finding.id not in (*_VAGUE, *dropped)
    ]
    if named or any(
        finding.weight >= 60 and finding.status == "warn" and finding.id not in _VAGUE for finding in ordered
    ):
        dropped.update(_VAGUE)
    return [
        finding for finding in ordered if finding.id not in dropped or finding.status not in ("fail", "warn")
    ]

"""Each check over tables of facts: what it finds, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.tools.doctor.checks import CHECKS, CONSEQUENCES, diagnose
from phalanx.tools.doctor.facts import (
    CompanionFacts,
    CompilerFacts,
    ContainerFacts,
    DiskFacts,
    DriverFacts,
    Facts,
    GpuFacts,
    InfinibandFacts,
    InterfaceFacts,
    JobFacts,
    LibraryFacts,
    LimitFacts,
    LinkFacts,
    MemoryFacts,
    NetworkFacts,
    PackageFacts,
    PlatformFacts,
    ProbeFacts,
    PythonFacts,
    TopologyFacts,
    TorchFacts,
)
from phalanx.tools.doctor.ids import KNOWN_IDS

GIB = 1 << 30
_A100 = GpuFacts(index=0, name="NVIDIA A100-SXM4-80GB", capability="8.0", memory_total_bytes=80 * GIB)
_PAIR = (_A100, replace(_A100, index=1))
_TORCH = TorchFacts(installed=True, version="2.6.0+cu124", cuda="12.4", cuda_available=True)
_DRIVER = DriverFacts(version="535.183.06", cuda="12.2", module_loaded=True)
_GOOD = Facts(
    torch=_TORCH,
    torchvision=CompanionFacts(version="0.21.0+cu124", cuda="12.4"),
    driver=_DRIVER,
    gpus=_PAIR,
    platform=PlatformFacts(system="linux", machine="x86_64", libc="2.35", cpu_count=64),
    limits=LimitFacts(shm_total_bytes=32 * GIB, shm_used_bytes=0, memlock_bytes=-1, nofile=65536, nproc=-1),
    memory=MemoryFacts(total_bytes=512 * GIB),
    network=NetworkFacts(host_name="box", host_addresses=("10.0.0.7",), loopback_works=True),
    env={},
    live=True,
)
_ETH = InterfaceFacts(name="eth0", up=True, mtu=1500)
_LO = InterfaceFacts(name="lo", up=True, mtu=65536)
_NET = NetworkFacts(host_name="box", host_addresses=("10.0.0.7",), interfaces=(_LO, _ETH))
_TWO_NODES = JobFacts(nnodes=2, local_world_size=2)
_DEAD = replace(_TORCH, cuda_available=False)

# What is wrong, with which status, and the facts that show it.
FINDINGS: tuple[tuple[str, str, Facts], ...] = (
    ("torch-not-installed", "fail", replace(_GOOD, torch=TorchFacts(installed=False))),
    ("torch-import-hangs", "fail", replace(_GOOD, torch=TorchFacts(installed=True, timed_out=True))),
    ("torch-import-crashes", "fail", replace(_GOOD, torch=TorchFacts(installed=True, signal="SIGSEGV"))),
    ("torch-import-broken", "fail", replace(_GOOD, torch=TorchFacts(installed=True, error="SyntaxError: invalid"))),
    ("cpu-only-torch", "fail", replace(_GOOD, torch=replace(_DEAD, version="2.6.0+cpu", cuda=""))),
    ("driver-too-old", "fail", replace(_GOOD, torch=_DEAD, driver=replace(_DRIVER, version="470.82.01", cuda="11.4"))),
    ("driver-library-mismatch", "fail", replace(_GOOD, torch=_DEAD, driver=replace(_DRIVER, user_version="550.54.15"))),
    ("driver-library-mismatch", "fail", replace(_GOOD, torch=_DEAD, driver=replace(_DRIVER, cuda_init_error=803))),
    ("fabricmanager-not-running", "fail", replace(_GOOD, torch=_DEAD, driver=replace(_DRIVER, cuda_init_error=802))),
    ("fabricmanager-not-running", "fail", replace(_GOOD, torch=_DEAD, driver=replace(_DRIVER, nvswitch=True, fabric_manager="inactive"))),
    ("fabricmanager-not-running", "fail", replace(_GOOD, torch=_DEAD, gpus=(replace(_A100, fabric_state="In Progress"),))),
    ("kernel-module-not-loaded", "fail", Facts(torch=_DEAD, driver=DriverFacts(module_loaded=False, hardware=("10de:2204",), nouveau_loaded=True), live=True)),
    ("container-without-gpus", "fail", Facts(torch=_DEAD, container=ContainerFacts(kind="docker", visible_devices="all", gpu_devices=False), live=True)),
    ("forward-compat-on-geforce", "fail", Facts(torch=_DEAD, driver=DriverFacts(version="525.60.13", compat_libcuda="/usr/local/cuda/compat/libcuda.so.1", cuda_init_error=804), gpus=(GpuFacts(name="NVIDIA GeForce RTX 3090"),))),
    ("arch-not-in-build", "fail", replace(_GOOD, gpus=(GpuFacts(index=0, name="NVIDIA GeForce RTX 5090"),))),
    ("arch-not-in-build", "warn", replace(_GOOD, gpus=(_A100, GpuFacts(index=1, name="NVIDIA GeForce RTX 5090", capability="12.0")))),
    ("gpu-too-old-for-build", "warn", replace(_GOOD, gpus=(_A100, GpuFacts(index=1, name="GeForce GT 710", capability="3.5")))),
    ("rocm-arch-not-in-build", "fail", Facts(torch=TorchFacts(version="2.6.0+rocm6.2", cuda="", hip="6.2", arch_list=("gfx90a", "gfx942")), gpus=(GpuFacts(gfx="gfx1151"),))),
    ("jetson-wrong-wheel", "fail", Facts(torch=TorchFacts(version="2.4.0", cuda="", cuda_available=False), platform=PlatformFacts(jetson=True))),
    ("torch-torchvision-mismatch", "fail", replace(_GOOD, torchvision=CompanionFacts(version="0.20.1+cu124", cuda="12.4"))),
    ("torch-torchvision-cuda-mismatch", "fail", replace(_GOOD, torchvision=CompanionFacts(version="0.21.0+cu118", cuda="11.8"))),
    ("torchvision-cpu-build", "fail", replace(_GOOD, torchvision=CompanionFacts(version="0.21.0+cpu", cuda=""))),
    ("torch-torchaudio-mismatch", "fail", replace(_GOOD, torchaudio=CompanionFacts(version="2.4.0"))),
    ("duplicate-torch-install", "warn", replace(_GOOD, packages=(PackageFacts(name="torch", version="2.6.0", location="/a"), PackageFacts(name="torch", version="2.5.1", location="/b")))),
    ("numpy2-abi", "fail", replace(_GOOD, torch=replace(_TORCH, version="2.1.0+cu121", cuda="12.1"), torchvision=None, packages=(PackageFacts(name="numpy", version="2.1.0"),))),
    ("ld-library-path-shadows-cudnn", "fail", replace(_GOOD, torch=replace(_TORCH, cudnn="90100", cudnn_loaded="8.9.7"), env={"LD_LIBRARY_PATH": "/opt/cudnn8/lib"})),
    ("ld-library-path-shadows-cuda", "fail", replace(_GOOD, torch=replace(_DEAD, error="ImportError: libcublas"), env={"LD_LIBRARY_PATH": "/usr/local/cuda-11.8/lib64"}, libraries=(LibraryFacts(name="libcublas.so.12", path="/usr/local/cuda-11.8/lib64/libcublas.so.12"),))),
    ("nccl-library-mismatch", "fail", replace(_GOOD, torch=replace(_TORCH, nccl="2.21.5", nccl_loaded="2.18.3"))),
    ("nccl-not-in-build", "fail", replace(_GOOD, platform=PlatformFacts(system="windows"), torch=replace(_TORCH, nccl_built=False))),
    ("nvcc-torch-cuda-mismatch", "warn", replace(_GOOD, compilers=CompilerFacts(nvcc="11.8.89"))),
    ("gcc-too-new-for-nvcc", "warn", replace(_GOOD, compilers=CompilerFacts(nvcc="12.1.105", gcc="14.2.0"))),
    ("compiler-missing", "warn", replace(_GOOD, compilers=CompilerFacts(gcc="", clang=""))),
    ("cuda-home-missing", "warn", replace(_GOOD, compilers=CompilerFacts(nvcc=""), packages=(PackageFacts(name="deepspeed", version="0.16.0"),))),
    ("deepspeed-too-old-for-torch", "warn", replace(_GOOD, packages=(PackageFacts(name="deepspeed", version="0.12.6"),))),
    ("transformers-needs-newer-torch", "warn", replace(_GOOD, torch=replace(_TORCH, version="2.0.1+cu118", cuda="11.8"), torchvision=None, packages=(PackageFacts(name="transformers", version="4.52.0"),))),
    ("gpu-lost", "fail", replace(_GOOD, gpus=(_A100, GpuFacts(index=1, problem="NVML cannot reach it (GPU is lost)")))),
    ("gpu-lost", "fail", replace(_GOOD, kernel_log=("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",))),
    ("gpu-ecc-error", "fail", replace(_GOOD, gpus=(replace(_A100, ecc_uncorrectable=2),))),
    ("gpu-ecc-error", "fail", replace(_GOOD, gpus=(replace(_A100, remap_failed=True),))),
    ("gpu-ecc-error", "warn", replace(_GOOD, gpus=(replace(_A100, remap_pending=True),))),
    ("gpu-ecc-error", "fail", replace(_GOOD, kernel_log=("NVRM: Xid (PCI:0000:3b:00): 94, Contained: SM (0x1)",))),
    ("gpu-nvlink-error", "fail", replace(_GOOD, kernel_log=("NVRM: Xid (PCI:0000:3b:00): 74, NVLink: fatal error detected on link 2",))),
    ("gpu-nvlink-error", "warn", replace(_GOOD, gpus=(replace(_A100, nvlinks_active=10, nvlinks_inactive=2),))),
    ("xid-application", "warn", replace(_GOOD, kernel_log=("NVRM: Xid (PCI:0000:3b:00): 31, pid=12, MMU Fault",))),
    ("exclusive-compute-mode", "warn", replace(_GOOD, gpus=(replace(_A100, compute_mode="exclusive"),))),
    ("exclusive-compute-mode", "fail", replace(_GOOD, gpus=(replace(_A100, compute_mode="exclusive", process_count=1),))),
    ("exclusive-compute-mode", "fail", replace(_GOOD, gpus=(replace(_A100, compute_mode="prohibited"),))),
    ("mig-single-device", "warn", replace(_GOOD, gpus=(replace(_A100, mig_enabled=True, mig_uuids=("MIG-a", "MIG-b")),))),
    ("mig-single-device", "fail", replace(_GOOD, gpus=(replace(_A100, mig_enabled=True, mig_uuids=("MIG-a", "MIG-b")),), job=JobFacts(local_world_size=2))),
    ("mig-without-instances", "warn", replace(_GOOD, gpus=(replace(_A100, mig_enabled=True, mig_uuids=()),))),
    ("gpu-throttled", "warn", replace(_GOOD, gpus=(replace(_A100, throttle_reasons=("hw_thermal_slowdown",)),))),
    ("pcie-link-degraded", "warn", replace(_GOOD, gpus=(replace(_A100, pcie_width=8, pcie_width_max=16),))),
    ("pcie-link-degraded", "warn", replace(_GOOD, gpus=(replace(_A100, pcie_gen=1, pcie_gen_max=4, utilization_percent=99),))),
    ("mixed-gpus", "warn", replace(_GOOD, gpus=(_A100, GpuFacts(index=1, name="NVIDIA A40", capability="8.6")))),
    ("gpu-persistence-off", "warn", replace(_GOOD, gpus=(replace(_A100, persistence=False),))),
    ("p2p-blocked-by-acs-iommu", "fail", replace(_GOOD, topology=TopologyFacts(p2p_works=False))),
    ("p2p-blocked-by-acs-iommu", "warn", replace(_GOOD, topology=TopologyFacts(acs_enabled=True, iommu="translating"))),
    ("shm-too-small", "fail", replace(_GOOD, limits=LimitFacts(shm_total_bytes=64 << 20))),
    ("shm-too-small", "warn", replace(_GOOD, limits=LimitFacts(shm_total_bytes=16 * GIB, shm_used_bytes=15 * GIB))),
    ("memlock-limit-too-low", "fail", replace(_GOOD, limits=LimitFacts(memlock_bytes=64 << 10), network=replace(_NET, infiniband=(InfinibandFacts(device="mlx5_0", state="ACTIVE"),)))),
    ("memlock-limit-too-low", "warn", replace(_GOOD, limits=LimitFacts(memlock_bytes=8 << 20), job=_TWO_NODES)),
    ("too-many-open-files", "fail", replace(_GOOD, limits=LimitFacts(nofile=256))),
    ("process-limit-too-low", "warn", replace(_GOOD, limits=LimitFacts(cgroup_pids=100), job=JobFacts(local_world_size=2, loader_workers=4))),
    ("host-memory-low", "warn", replace(_GOOD, limits=LimitFacts(cgroup_memory_bytes=8 * GIB), job=JobFacts(local_world_size=2, loader_workers=8))),
    ("host-memory-low", "fail", replace(_GOOD, limits=LimitFacts(cgroup_memory_bytes=GIB // 2), job=JobFacts(local_world_size=2))),
    ("cpu-limit-too-low", "warn", replace(_GOOD, limits=LimitFacts(cgroup_cpus=1.0))),
    ("disk-full", "fail", replace(_GOOD, disks=(DiskFacts(path="/scratch", purpose="output folder", total_bytes=100 * GIB, free_bytes=0),))),
    ("disk-full", "fail", replace(_GOOD, disks=(DiskFacts(path="/scratch", free_bytes=90 * GIB, inodes_total=10**6, inodes_free=3),))),
    ("disk-not-writable", "fail", replace(_GOOD, disks=(DiskFacts(path="/data", purpose="output folder", read_only=True),))),
    ("temporary-files-on-network", "warn", replace(_GOOD, disks=(DiskFacts(path="/nfs/tmp", purpose="temporary files", filesystem="nfs4"),))),
    ("hostname-resolves-to-loopback", "fail", replace(_GOOD, network=replace(_NET, host_addresses=("127.0.1.1",)), job=_TWO_NODES)),
    ("hostname-unresolvable", "warn", replace(_GOOD, network=NetworkFacts(host_name="box", host_error="Name or service not known"))),
    ("loopback-broken", "fail", replace(_GOOD, network=NetworkFacts(loopback_works=False))),
    ("nccl-socket-ifname-wrong", "fail", replace(_GOOD, network=_NET, env={"NCCL_SOCKET_IFNAME": "ib0"})),
    ("nccl-socket-ifname-wrong", "fail", replace(_GOOD, network=_NET, env={"NCCL_SOCKET_IFNAME": "=eth"})),
    ("gloo-socket-ifname-wrong", "fail", replace(_GOOD, network=_NET, env={"GLOO_SOCKET_IFNAME": "nothing"})),
    ("gloo-socket-ifname-wrong", "fail", replace(_GOOD, network=_NET, env={"GLOO_SOCKET_IFNAME": "^docker0"})),
    ("gloo-socket-ifname-wrong", "fail", replace(_GOOD, network=_NET, env={"GLOO_SOCKET_IFNAME": "lo"}, job=_TWO_NODES)),
    ("infiniband-port-down", "warn", replace(_GOOD, network=replace(_NET, infiniband=(InfinibandFacts(device="mlx5_0", state="ACTIVE"), InfinibandFacts(device="mlx5_1", state="DOWN"))))),
    ("small-mtu", "warn", replace(_GOOD, network=replace(_NET, interfaces=(replace(_ETH, mtu=1000),)), job=_TWO_NODES)),
    ("port-in-use", "fail", replace(_GOOD, network=replace(_NET, port=29511, port_free=False))),
    ("master-addr-unresolvable", "fail", replace(_GOOD, network=replace(_NET, master_error="not known"), env={"MASTER_ADDR": "nodeX"})),
    ("master-addr-is-loopback", "fail", replace(_GOOD, network=_NET, env={"MASTER_ADDR": "localhost"}, job=_TWO_NODES)),
    ("cuda-visible-devices-invalid", "fail", replace(_GOOD, torch=_DEAD, env={"CUDA_VISIBLE_DEVICES": "7"})),
    ("cuda-visible-devices-invalid", "fail", replace(_GOOD, torch=_DEAD, env={"CUDA_VISIBLE_DEVICES": "0,0"})),
    ("cuda-visible-devices-invalid", "warn", replace(_GOOD, env={"CUDA_VISIBLE_DEVICES": "0,9,1"})),
    ("fewer-gpus-than-requested", "fail", replace(_GOOD, job=JobFacts(local_world_size=4))),
    ("fewer-gpus-than-requested", "fail", replace(_GOOD, env={"SLURM_GPUS_ON_NODE": "4"})),
    ("variable-misspelt", "warn", replace(_GOOD, env={"NCCL_SOCKET_INFAME": "eth0"})),
    ("variable-misspelt", "warn", replace(_GOOD, env={"CUDA_VISIBLE_DEVICE": "1"})),
    ("variable-deprecated", "warn", replace(_GOOD, env={"NCCL_ASYNC_ERROR_HANDLING": "1"})),
    ("variable-debug-only", "warn", replace(_GOOD, env={"NCCL_P2P_DISABLE": "1"})),
    ("variables-contradict", "warn", replace(_GOOD, env={"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"})),
    ("variables-contradict", "fail", replace(_GOOD, env={"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})),
    ("launcher-env-missing", "warn", replace(_GOOD, env={"RANK": "0"})),
    ("cuda-unavailable", "warn", replace(_GOOD, torch=_DEAD, gpus=(GpuFacts(index=0, name="NVIDIA A40", capability="8.6"),))),
    ("probe-failed", "warn", replace(_GOOD, probes=(ProbeFacts(name="torch", error="timed out"),))),
)  # fmt: skip


def _named(report_facts: Facts) -> dict[str, str]:
    return {
        finding.id: finding.status
        for finding in diagnose(report_facts).findings
        if finding.status in ("fail", "warn")
    }


@pytest.mark.parametrize(("cause", "status", "facts"), FINDINGS)
def test_a_fault_is_named_first(cause: str, status: str, facts: Facts) -> None:
    report = diagnose(facts)
    assert report.root_cause is not None, cause
    assert (report.root_cause.id, report.root_cause.status) == (cause, status), _named(facts)
    assert report.verdict == status
    assert cause in KNOWN_IDS


@pytest.mark.parametrize(
    "facts",
    [
        _GOOD,
        Facts(),
        Facts(live=True),
        replace(_GOOD, torch=replace(_TORCH, version="2.9.1+cu130", cuda="13.0"), torchvision=CompanionFacts(version="0.24.1+cu130", cuda="13.0"), gpus=(GpuFacts(name="NVIDIA GB10", capability="12.1"),), driver=replace(_DRIVER, version="580.95.05", cuda="13.0")),
        replace(_GOOD, torch=replace(_TORCH, version="2.8.0a0+34c6371d24.nv25.08", cuda="13.0"), torchvision=None, driver=replace(_DRIVER, version="565.57.01", cuda="12.7")),
        replace(_GOOD, gpus=(replace(_A100, pcie_gen=1, pcie_gen_max=4, pcie_width=16, pcie_width_max=16, utilization_percent=0),)),
        replace(_GOOD, gpus=(replace(_A100, mig_enabled=True, mig_uuids=("MIG-a",)),)),
        replace(_GOOD, network=replace(_NET, host_addresses=("127.0.1.1",)), job=JobFacts(nnodes=1)),
        replace(_GOOD, network=_NET, env={"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"}),
        replace(_GOOD, network=_NET, env={"NCCL_SOCKET_IFNAME": "^docker,lo"}),
        replace(_GOOD, env={"CUDA_VISIBLE_DEVICES": "1,0"}),
        replace(_GOOD, env={"NCCL_SOMETHING_ONLY_A_PLUGIN_READS": "1"}),
        replace(_GOOD, topology=TopologyFacts(links=(LinkFacts(first=0, second=1, kind="NV12"),))),
        replace(_GOOD, limits=LimitFacts(shm_total_bytes=64 * GIB, memlock_bytes=64 << 10, nofile=1024)),
        replace(_GOOD, compilers=CompilerFacts(nvcc="12.6.85", gcc="11.4.0", ninja="1.11")),
        replace(_GOOD, kernel_log=("NVRM: Xid (PCI:0000:3b:00): 63, Row remapper: row remapping recorded", "AMD-Vi: AMD IOMMUv2 loaded and initialized")),
        replace(_GOOD, disks=(DiskFacts(path="/snap/core/1", total_bytes=10**8, free_bytes=0), DiskFacts(path="/", purpose="working folder", total_bytes=100 * GIB, free_bytes=60 * GIB))),
        Facts(torch=TorchFacts(installed=True, version="2.6.0+cpu", cuda="", cuda_available=False), driver=DriverFacts(hardware=()), gpus=(), live=True, env={"CUDA_VISIBLE_DEVICES": ""}),
    ],
)  # fmt: skip
def test_a_good_machine_is_left_alone(facts: Facts) -> None:
    assert _named(facts) == {}


def test_a_consequence_goes_with_its_cause() -> None:
    facts = replace(
        _GOOD, torch=_DEAD, driver=replace(_DRIVER, user_version="550.54.15", cuda_init_error=803)
    )
    assert list(_named(facts)) == ["driver-library-mismatch"]
    known = set(KNOWN_IDS)
    assert set(CONSEQUENCES) <= known
    assert {name for names in CONSEQUENCES.values() for name in names} <= known


def test_skipped_ids_are_left_out() -> None:
    facts = replace(_GOOD, limits=LimitFacts(shm_total_bytes=64 << 20))
    assert diagnose(facts, skip={"shm-too-small"}).verdict == "ok"


def test_fixes_are_typed_for_the_installer_in_use() -> None:
    broken = replace(_GOOD, torchvision=CompanionFacts(version="0.20.1+cu124", cuda="12.4"))
    assert diagnose(broken).findings[0].fix == (
        "python -m pip install --force-reinstall torch==2.6.0 torchvision==0.21.0 --index-url https://download.pytorch.org/whl/cu124",
    )
    uv = replace(broken, python=PythonFacts(installer="uv"))
    assert (
        diagnose(uv)
        .findings[0]
        .fix[0]
        .startswith("uv pip install --reinstall torch==2.6.0 torchvision==0.21.0")
    )


def test_an_old_driver_gets_a_torch_that_it_runs() -> None:
    facts = replace(_GOOD, torch=_DEAD, driver=replace(_DRIVER, version="470.82.01", cuda="11.4"))
    fix = diagnose(facts).findings[0].fix
    assert any("cu118" in line and "torch==2.7.1" in line for line in fix), fix


def test_checks_are_data_and_each_is_pure() -> None:
    for name, check in CHECKS.items():
        first, second = check(_GOOD), check(_GOOD)
        again = [*first] if hasattr(first, "__iter__") else first
        assert again == ([*second] if hasattr(second, "__iter__") else second), name

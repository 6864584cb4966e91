"""What is known about one machine: the only thing that checks look at.

Every field may be None, which means "not known"; an empty tuple means "looked, and there is none". So the
same checks run over a live machine, over a pasted report that was cut short, and over a table in a test::

    Facts(torch=TorchFacts(version="2.6.0+cu126", cuda="12.6"), driver=DriverFacts(version="418.67"))

Sizes are bytes, versions are the text that was read ("535.104.05", "12.1"), capabilities are "8.6".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The torch that `import torch` finds, or failed to import."""

    installed: bool | None = None  # False: looked, and there is none
    version: str | None = None  # "2.6.0+cu126"
    cuda: str | None = None  # torch.version.cuda; "" where the build has none
    hip: str | None = None  # torch.version.hip; "" where the build has none
    git: str | None = None
    cudnn: str | None = None  # the cuDNN it was built with, "9.5.1" or "90501"
    cudnn_loaded: str | None = None  # the cuDNN that is loaded
    nccl: str | None = None  # torch.cuda.nccl.version(), "2.21.5"
    nccl_loaded: str | None = None  # ncclGetVersion() of the mapped libnccl
    arch_list: tuple[str, ...] | None = None  # torch.cuda.get_arch_list(): sm_80, compute_90, gfx942
    cuda_available: bool | None = None
    device_count: int | None = None
    nccl_built: bool | None = None  # torch.distributed.is_nccl_available()
    cxx11_abi: bool | None = None
    numpy_works: bool | None = None  # torch.zeros(1).numpy()
    error: str | None = None  # why the import, or the first CUDA call, failed
    timed_out: bool | None = None  # the probe was still importing when its time was up
    signal: str | None = None  # SIGSEGV ... when the importing process died of it
    file: str | None = None  # torch.__file__
    import_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class CompanionFacts:
    """torchvision or torchaudio."""

    installed: bool | None = None
    version: str | None = None
    cuda: str | None = None  # the CUDA it was built with; "" for a CPU build
    error: str | None = None
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class PythonFacts:
    """The interpreter, and what manages its packages."""

    version: str | None = None
    executable: str | None = None
    prefix: str | None = None
    installer: str | None = None  # "pip", "conda" or "uv": what the fix should be typed for
    user_site: str | None = None  # the user's own site-packages, where it is in use


@dataclass(frozen=True, kw_only=True)
class PlatformFacts:
    """Operating system and machine."""

    system: str | None = None  # "linux", "windows", "darwin"
    os: str | None = None  # "Ubuntu 22.04.3 LTS (x86_64)"
    machine: str | None = None  # "x86_64", "aarch64", "arm64"
    kernel: str | None = None  # "5.15.0-91-generic"
    kernel_cmdline: str | None = None
    libc: str | None = None  # "2.35"
    wsl: bool | None = None
    jetson: bool | None = None
    secure_boot: bool | None = None
    virtual_machine: bool | None = None
    libstdcxx: str | None = None  # newest symbol version the loaded libstdc++ has: "3.4.30"
    cpu_count: int | None = None
    numa_nodes: int | None = None
    uptime_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ContainerFacts:
    """The container this runs in."""

    kind: str | None = None  # "docker", "podman", "singularity", "kubernetes", "enroot", ... "" for none
    image: str | None = None
    cuda: str | None = None  # the CUDA of the image (its CUDA_VERSION variable)
    visible_devices: str | None = None  # NVIDIA_VISIBLE_DEVICES
    gpu_devices: bool | None = None  # whether /dev/nvidia0 (or its like) is there


@dataclass(frozen=True, kw_only=True)
class DriverFacts:
    """The NVIDIA driver, its kernel module and its libraries."""

    version: str | None = None  # what nvidia-smi or NVML prints: the kernel module's where both are known
    user_version: str | None = None  # of libcuda / libnvidia-ml in user space
    cuda: str | None = None  # newest CUDA it supports: "12.2"
    error: str | None = None  # what nvidia-smi or NVML said instead of an answer
    module_loaded: bool | None = None
    module_on_disk: bool | None = None  # whether a module exists for the running kernel
    nouveau_loaded: bool | None = None
    hardware: tuple[str, ...] | None = None  # NVIDIA devices on the PCI bus, from sysfs or lspci
    device_nodes: bool | None = None  # /dev/nvidiactl
    open_module: bool | None = None  # the open kernel modules rather than the proprietary ones
    nvswitch: bool | None = None  # NVSwitches on the bus, so a fabric manager is needed
    fabric_manager: str | None = None  # "active", "inactive", "failed", "absent"
    fabric_manager_version: str | None = None
    compat_libcuda: str | None = None  # path of a forward-compatibility libcuda that is loaded
    rocm: str | None = None  # version of an AMD driver / runtime
    cuda_init_error: int | None = None  # cuInit's own answer: 0, 100, 802, 803, 804, 999


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU."""

    index: int | None = None
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    capability: str | None = None  # "8.6"
    gfx: str | None = None  # AMD target, "gfx942"
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc_enabled: bool | None = None
    ecc_uncorrectable: int | None = None  # since the last reset of the driver
    ecc_uncorrectable_total: int | None = None  # over the board's life
    remapped_rows_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pages_pending: bool | None = None
    throttle_reasons: tuple[str, ...] | None = (
        None  # "hw_thermal_slowdown", "hw_power_brake", "sw_power_cap" ...
    )
    compute_mode: str | None = None  # "default", "exclusive", "prohibited"
    mig_enabled: bool | None = None
    mig_uuids: tuple[str, ...] | None = None
    persistence: bool | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    process_count: int | None = None
    fabric_state: str | None = None  # "Completed", "In Progress", "Not Started", ... with its status
    nvlinks_active: int | None = None
    nvlinks_inactive: int | None = None
    numa_node: int | None = None
    bar1_total_bytes: int | None = None
    problem: str | None = None  # why NVML cannot reach it


@dataclass(frozen=True, kw_only=True)
class LinkFacts:
    """How two GPUs are joined, in nvidia-smi's words."""

    first: int = 0
    second: int = 0
    kind: str = ""  # "NV12", "PIX", "PXB", "PHB", "NODE", "SYS"


@dataclass(frozen=True, kw_only=True)
class TopologyFacts:
    """How the GPUs of this machine reach each other."""

    links: tuple[LinkFacts, ...] | None = None
    p2p_works: bool | None = None  # whether a peer copy or collective was seen to work (or to hang)
    acs_enabled: bool | None = None  # ACS redirection on a bridge above a GPU
    iommu: str | None = None  # "off", "passthrough", "translating"


@dataclass(frozen=True, kw_only=True)
class CompilerFacts:
    """What can compile an extension, a DeepSpeed op or torch.compile's C++ here."""

    nvcc: str | None = None  # "12.1" or "12.1.105"; "" where there is none
    nvcc_path: str | None = None
    cuda_home: str | None = None
    toolkits: tuple[str, ...] | None = None  # folders /usr/local/cuda-*
    gcc: str | None = None  # "11.4.0"; "" where there is none
    clang: str | None = None
    ninja: str | None = None
    python_headers: bool | None = None


@dataclass(frozen=True, kw_only=True)
class PackageFacts:
    """One installed distribution; the same name twice means that it is installed twice."""

    name: str = ""
    version: str = ""
    location: str | None = None
    build: str | None = None  # conda's build text: "py3.10_cuda11.8_cudnn8.7.0_0"
    source: str | None = None  # "pip" or "conda"


@dataclass(frozen=True, kw_only=True)
class LibraryFacts:
    """A library that is really mapped into a process that imported torch."""

    name: str = ""  # "libcudnn.so.9"
    path: str = ""
    version: str | None = None


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    """Limits of this process and of its container. -1 is "unlimited"."""

    shm_total_bytes: int | None = None
    shm_used_bytes: int | None = None
    memlock_bytes: int | None = None
    nofile: int | None = None
    nofile_hard: int | None = None
    nproc: int | None = None
    stack_bytes: int | None = None
    cgroup_memory_bytes: int | None = None
    cgroup_memory_used_bytes: int | None = None
    cgroup_cpus: float | None = None
    cgroup_pids: int | None = None
    affinity_cpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Host memory."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    swap_total_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """One place where the run reads or writes."""

    path: str = ""
    purpose: str | None = None  # "working folder", "temporary files", "home", ...
    total_bytes: int | None = None
    free_bytes: int | None = None
    inodes_total: int | None = None
    inodes_free: int | None = None
    filesystem: str | None = None  # "ext4", "nfs4", ...
    read_only: bool | None = None
    writable: bool | None = None


@dataclass(frozen=True, kw_only=True)
class InterfaceFacts:
    """One network interface."""

    name: str = ""
    up: bool | None = None
    mtu: int | None = None
    addresses: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class InfinibandFacts:
    """One port of an InfiniBand or RoCE adapter."""

    device: str = ""
    port: int | None = None
    state: str | None = None  # "ACTIVE", "DOWN", "INIT"
    physical_state: str | None = None
    rate: str | None = None
    link_layer: str | None = None  # "InfiniBand" or "Ethernet"


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """Names, interfaces and ports."""

    host_name: str | None = None
    host_addresses: tuple[str, ...] | None = None  # what this host's own name resolves to
    host_error: str | None = None  # why it does not resolve
    loopback_works: bool | None = None
    interfaces: tuple[InterfaceFacts, ...] | None = None
    infiniband: tuple[InfinibandFacts, ...] | None = None
    master_addresses: tuple[str, ...] | None = None  # what MASTER_ADDR resolves to
    master_error: str | None = None
    port: int | None = None  # the rendezvous port that was tried
    port_free: bool | None = None
    port_owner: str | None = None
    nvidia_peermem: bool | None = None  # GPUDirect RDMA's kernel module


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The job that this machine is asked to run."""

    nnodes: int | None = None
    local_world_size: int | None = None
    loader_workers: int | None = None  # per rank
    backend: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeFacts:
    """A probe that could not answer: so that what is missing is said, rather than taken for fine."""

    name: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything known about one machine."""

    torch: TorchFacts | None = None
    torchvision: CompanionFacts | None = None
    torchaudio: CompanionFacts | None = None
    python: PythonFacts | None = None
    platform: PlatformFacts | None = None
    container: ContainerFacts | None = None
    driver: DriverFacts | None = None
    gpus: tuple[GpuFacts, ...] | None = None
    topology: TopologyFacts | None = None
    compilers: CompilerFacts | None = None
    packages: tuple[PackageFacts, ...] | None = None
    libraries: tuple[LibraryFacts, ...] | None = None
    env: Mapping[str, str] | None = None
    limits: LimitFacts | None = None
    memory: MemoryFacts | None = None
    disks: tuple[DiskFacts, ...] | None = None
    network: NetworkFacts | None = None
    kernel_log: tuple[str, ...] | None = None  # lines that matter, newest last
    job: JobFacts | None = None
    messages: tuple[str, ...] = ()  # error lines and prose of a pasted report
    probes: tuple[ProbeFacts, ...] = ()
    live: bool = field(default=False)  # gathered on this machine, rather than read from a report

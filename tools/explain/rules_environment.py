"""Rules: what is wrong with the machine, its GPUs and driver, as far as it shows in a log."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule

_DOCTOR = "phalanx doctor"

RULES = (
    Rule(
        id="arch-not-in-build",
        when=(
            "is not compatible with the current pytorch",
            "no kernel image",
            "cuda capabilities",
            "nokernelimage",
            "no_binary_for_gpu",
            "nobinaryforgpu",
            "unsupported gpu architecture",
            "is not defined for option",
        ),
        patterns=(
            r"(?P<gpu>[\w .()/-]{3,60}?) with CUDA capability sm_(?P<sm>\d+) is not compatible with the current PyTorch installation",
            r"current PyTorch install supports CUDA capabilities (?P<archs>[\w ]{4,200})",
            r"no kernel image is available for execution on the device|cudaErrorNoKernelImageForDevice|CUDA_ERROR_NO_BINARY_FOR_GPU",
        ),
        cause=(
            "{gpu} (sm_{sm}) is newer than any architecture in this torch build",
            "this build has no code for the GPU's architecture",
        ),
        fix=(
            "install a torch built for a newer CUDA (Blackwell, sm_100 and sm_120: cu128 or newer): pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu128",
            "an extension (flash-attn, apex, detectron2): rebuild it with TORCH_CUDA_ARCH_LIST set to the GPU's capability",
        ),
        look=(_DOCTOR,),
        refine="architecture",
        weight=80,
        beats=("cuda-illegal-memory-access", "cublas-oom-in-disguise", "device-side-assert"),
    ),
    Rule(
        id="gpu-too-old-for-build",
        when=(
            "is too old",
            "too old to be supported",
            "minimum cuda capability",
            "no longer supports this gpu",
        ),
        patterns=(
            r"Found GPU\d+ (?P<gpu>[\w .()/-]{3,60}?) which is of (?:cuda|compute) capability (?P<capability>\d+\.\d+)\.?",
            r"no longer supports this GPU because it is too old|[Mm]inimum (?:cuda|and Maximum) (?:cuda )?capability supported by this (?:library|version)",
            r"Found (?P<gpu>[\w .()/-]{3,60}?) which is too old to be supported by the triton GPU compiler",
        ),
        unless=(r"driver",),
        cause=(
            "{gpu} (capability {capability}) is older than what this torch build supports",
            "{gpu} is older than what this build supports",
            "the GPU is older than what this torch build supports",
        ),
        fix=(
            "install the last torch whose builds still hold its architecture (cu126 builds keep Maxwell, Pascal and Volta), or leave that GPU out by CUDA_VISIBLE_DEVICES",
        ),
        look=(_DOCTOR,),
        weight=82,
    ),
    Rule(
        id="rocm-arch-not-in-build",
        when=("invalid device function", "tensilelibrary", "nobinaryforgpu", "gfx", "code object"),
        patterns=(
            r"HIP error: invalid device function|hipErrorNoBinaryForGpu|TensileLibrary[^\n]{0,80}gfx(?P<gfx>\w{3,6})|Unable to find code object for all current devices",
        ),
        cause=(
            "this ROCm build has no code for the AMD GPU (gfx{gfx})",
            "this ROCm build has no code for the AMD GPU",
        ),
        fix=(
            "a torch build that lists the gfx target (torch.cuda.get_arch_list()); close relatives run with HSA_OVERRIDE_GFX_VERSION=10.3.0 or 11.0.0",
        ),
        weight=80,
    ),
    Rule(
        id="driver-too-old",
        when=(
            "driver on your system is too old",
            "driver version is insufficient",
            "unsupported toolchain",
            "insufficient_driver",
            "insufficientdriver",
            "driver is too old",
        ),
        patterns=(
            r"NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
            r"driver version is insufficient for CUDA runtime version|CUDA_ERROR_INSUFFICIENT_DRIVER|cudaErrorInsufficientDriver",
            r"provided PTX was compiled with an unsupported toolchain|CUDA_ERROR_UNSUPPORTED_PTX_VERSION|driver is too old",
        ),
        cause=(
            "the NVIDIA driver (CUDA {found_cuda}) is older than this torch build needs",
            "the NVIDIA driver is older than this build needs",
        ),
        fix=(
            "update the driver, or install a torch built for an older CUDA: phalanx doctor prints the command for this driver",
        ),
        look=("nvidia-smi shows the driver and the newest CUDA that it runs",),
        refine="driver",
        weight=84,
        beats=("container-without-gpus", "cpu-only-torch", "arch-not-in-build"),
    ),
    Rule(
        id="forward-compat-on-geforce",
        when=("forward compatibility was attempted",),
        patterns=(r"forward compatibility was attempted on non[- ]supported HW",),
        cause=("a newer CUDA's compat libcuda is loaded on a card that may not use it (error 804)",),
        fix=(
            "take /usr/local/cuda/compat out of LD_LIBRARY_PATH, or update the host's driver, or use an image with an older CUDA",
        ),
        weight=86,
        beats=("container-without-gpus", "driver-too-old"),
    ),
    Rule(
        id="driver-library-mismatch",
        when=("version mismatch", "display driver / cuda driver"),
        patterns=(
            r"[Dd]river/library version mismatch|unsupported display driver / cuda driver combination|NVRM: API mismatch",
        ),
        cause=("the NVIDIA kernel module and the user-space libraries are of different versions",),
        fix=(
            "reboot after the driver's upgrade (or rmmod and modprobe nvidia); in a container remove driver packages of its own",
        ),
        weight=86,
        beats=("container-without-gpus",),
    ),
    Rule(
        id="kernel-module-not-loaded",
        when=("couldn't communicate with the nvidia driver", "driver not loaded", "modprobe"),
        patterns=(
            r"NVIDIA-SMI has failed because it couldn'?t communicate with the NVIDIA driver|nvml error: driver not loaded|modprobe: (?:FATAL|ERROR)[^\n]{0,60}nvidia|NVIDIA kernel module (?:is )?not loaded",
        ),
        cause=("the NVIDIA kernel module is not loaded",),
        fix=(
            "sudo modprobe nvidia; then dkms status and mokutil --sb-state: after a kernel upgrade or under Secure Boot the module is missing or refused",
        ),
        weight=84,
        beats=("container-without-gpus",),
    ),
    Rule(
        id="exclusive-compute-mode",
        when=("busy or unavailable", "devicesunavailable"),
        patterns=(
            r"all CUDA-capable devices are busy or unavailable|CUDA-capable device\(s\) is/are busy or unavailable|cudaErrorDevicesUnavailable",
        ),
        cause=("another process has the GPU, which is in exclusive-process mode",),
        fix=(
            "nvidia-smi -c DEFAULT (root), or use a GPU that nobody holds: phalanx run --gpus auto",
            "if the mode is Default: reset the GPU; phalanx gpus shows who holds it",
        ),
        weight=80,
    ),
    Rule(
        id="cpu-only-torch",
        when=(
            "not compiled with cuda",
            "cuda enabled",
            "not linked with support for cuda",
            "pytorch was compiled without",
        ),
        patterns=(
            r"Torch not compiled with CUDA enabled|not linked with support for cuda|PyTorch (?:was|is) compiled without CUDA|torch was installed without CUDA",
        ),
        cause=("this torch is a CPU build",),
        fix=(
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126 (phalanx doctor prints the line for this driver)",
        ),
        look=("conda: a CPU build of pytorch chosen by the solver (conda list pytorch)",),
        refine="cpu_torch",
        weight=82,
    ),
    Rule(
        id="container-without-gpus",
        when=(
            "no cuda gpus are available",
            "no nvidia driver",
            "no cuda-capable device",
            "nvidia driver was not detected",
            "no_device",
        ),
        patterns=(
            r"No CUDA GPUs are available|Found no NVIDIA driver on your system|no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE|The NVIDIA Driver was not detected|cudaErrorNoDevice",
        ),
        cause=("no GPU is visible to this process",),
        fix=(
            "containers: docker run --gpus all, in Kubernetes resources.limits nvidia.com/gpu; Slurm: --gpus-per-node",
            "else phalanx doctor: driver, CUDA_VISIBLE_DEVICES, device files",
        ),
        refine="no_gpu",
        weight=62,
    ),
    Rule(
        id="container-toolkit-missing",
        when=(
            "could not select device driver",
            "nvidia-container",
            "unknown or invalid runtime name",
            "unresolvable cdi",
        ),
        patterns=(
            r"could not select device driver [^\n]{0,30}with capabilities: \[\[gpu|nvidia-container-(?:cli|runtime)[^\n]{0,60}(?:not found|no such file)|[Uu]nknown (?:or invalid )?runtime(?: name)?:? nvidia|unresolvable CDI devices",
        ),
        cause=("the host has no NVIDIA container toolkit",),
        fix=(
            "install nvidia-container-toolkit on the host, nvidia-ctk runtime configure --runtime=docker, systemctl restart docker",
        ),
        weight=85,
    ),
    Rule(
        id="container-lost-gpu-cgroup",
        when=("unknown error",),
        patterns=(r"Failed to initialize NVML: Unknown Error|nvml[^\n]{0,30}Unknown Error",),
        cause=(
            "the running container lost its GPUs: its device cgroup was set again (systemctl daemon-reload)",
        ),
        fix=(
            "restart the container; to keep it: native.cgroupdriver=cgroupfs in Docker, or --device /dev/nvidia0 .. named one by one",
        ),
        weight=84,
        beats=("container-without-gpus", "cuda-unknown-error"),
    ),
    Rule(
        id="cuda-unknown-error",
        when=("cuda unknown error",),
        patterns=(r"CUDA unknown error - this may be due to an incorrectly set up environment",),
        cause=("CUDA does not start, and does not say why",),
        fix=(
            "after suspend: sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm; in containers: /dev/nvidia-uvm must be there; else reboot",
            "CUDA_VISIBLE_DEVICES changed after the program's start has the same effect",
        ),
        kind="symptom",
        weight=60,
    ),
    Rule(
        id="cuda-visible-devices-set-too-late",
        when=("cuda_visible_devices",),
        patterns=(
            r"CUDA_VISIBLE_DEVICES[^\n]{0,60}(?:set|changed) (?:too late|after)|changing env variable CUDA_VISIBLE_DEVICES after program start",
        ),
        kind="warning",
        cause=("CUDA_VISIBLE_DEVICES was changed after CUDA had read it",),
        fix=(
            "set it before the first import of torch, best outside: CUDA_VISIBLE_DEVICES=1 python train.py",
        ),
        weight=50,
    ),
    Rule(
        id="bios-large-bar-off",
        when=("device is invalid", "nvrm: bar", "can't assign mem"),
        patterns=(
            r"BAR\d is 0M @ 0x0|This PCI I/O region assigned to your NVIDIA device is invalid|BAR \d[^\n]{0,40}can't assign mem",
        ),
        cause=("the BIOS gave the GPU no address range (above-4G decoding or resizable BAR is off)",),
        fix=("switch on above-4G decoding (and resizable BAR) in the BIOS",),
        weight=84,
    ),
    Rule(
        id="p2p-blocked-by-acs-iommu",
        when=("dmar:", "io_page_fault", "amd-vi"),
        patterns=(r"DMAR:[^\n]{0,60}(?:fault|DRHD)[^\n]{0,80}|IO_PAGE_FAULT|AMD-Vi: Event logged",),
        cause=("the IOMMU refuses what one GPU sends to another (peer-to-peer)",),
        fix=(
            "iommu=pt on the kernel's command line, ACS off for the PCIe bridges; until then NCCL_P2P_DISABLE=1",
        ),
        weight=76,
        beats=("nccl-timeout-unknown",),
    ),
    Rule(
        id="mig-single-device",
        when=("mig mode", "mig device", "mig instance", " mig "),
        patterns=(
            r"MIG[^\n]{0,80}(?:not supported|unsupported|only one|single)[^\n]{0,60}|NCCL[^\n]{0,60}MIG (?:mode|device|instance)",
        ),
        unless=(r"migrat",),
        cause=(
            "ranks run on MIG slices: a process sees one slice, and there are no collectives between them",
        ),
        fix=("one rank per MIG slice for separate jobs, or MIG off: nvidia-smi -mig 0",),
        weight=70,
    ),
    Rule(
        id="jetson-wrong-wheel",
        when=("tegra", "jetson"),
        patterns=(r"(?:Jetson|tegra)[^\n]{0,120}(?:no kernel image|not compiled with CUDA|NvRmMemInit)",),
        cause=("a generic aarch64 wheel on a Jetson instead of the JetPack build",),
        fix=("install NVIDIA's torch wheel for this JetPack release",),
        weight=84,
    ),
)

"""Reports of machines on which nothing is broken, and traps among them: none may bring a failure."""

from __future__ import annotations

from tests.tools.doctor.report_forms import (
    accelerate_env,
    collect_env,
    coloured,
    cut,
    ds_report,
    fenced,
    odd_colons,
    old_collect_env,
    quoted,
    smi,
    windows,
)

_A100 = ("NVIDIA A100-SXM4-80GB",) * 8
_MAC = {"os": "macOS 14.4.1 (arm64)", "platform": "macOS-14.4.1-arm64-arm-64bit"}
_WINDOWS = {"os": "Microsoft Windows 11 Pro", "platform": "Windows-11-10.0.22631-SP0"}
_WSL = {"platform": "Linux-5.15.153.1-microsoft-standard-WSL2-x86_64-with-glibc2.35"}

REPORTS: tuple[str, ...] = (
    # Minor-version compatibility: any driver of the same major number will do.
    collect_env("2.5.1+cu124", "12.4", True, gpus=_A100, driver="535.183.06"),
    collect_env("2.5.1+cu124", "12.4", True, gpus=_A100, driver="525.60.13"),
    collect_env("1.13.1+cu117", "11.7", True, gpus=("Tesla V100-SXM2-16GB",) * 4, driver="450.80.02"),
    collect_env("2.9.1+cu130", "13.0", True, gpus=("NVIDIA H100 80GB HBM3",) * 8, driver="580.65.06"),
    collect_env("2.14.1+cu132", "13.2", True, gpus=("NVIDIA H200",) * 8, driver="580.126.20"),
    smi("535.104.05", "12.2", "NVIDIA A40", "NVIDIA A40", memory=46068)
    + "\n>>> torch.__version__\n'2.6.0+cu124'\n>>> torch.cuda.is_available()\nTrue\n",
    # Forward compatibility on data-centre GPUs, vendor builds.
    collect_env(
        "2.9.0a0+50eac811a6.nv25.09", "13.0", True, gpus=("NVIDIA A100-SXM4-40GB",) * 4, driver="550.54.15"
    ),
    collect_env(
        "2.8.0a0+5228986c39.nv25.06",
        "12.9",
        True,
        gpus=("NVIDIA H100 80GB HBM3",) * 8,
        driver="535.161.08",
        packages=("torchvision==0.22.0a0+95f10a4e",),
    ),
    collect_env("2.1.0a0+32f93b1", "12.2", True, gpus=("NVIDIA GeForce RTX 3090",), driver="535.54.03"),
    # Families of architectures.
    collect_env("2.8.0+cu128", "12.8", True, gpus=("NVIDIA GeForce RTX 4090",) * 2, driver="570.124.06"),
    collect_env(
        "2.9.1+cu130",
        "13.0",
        True,
        os="Ubuntu 24.04.2 LTS (aarch64)",
        platform="Linux-6.11.0-1016-nvidia-aarch64-with-glibc2.39",
        gpus=("NVIDIA GB10",),
        driver="580.95.05",
    ),
    collect_env("2.9.1+cu128", "12.8", True, gpus=("NVIDIA B300 SXM6 AC",) * 8, driver="580.82.07"),
    collect_env("1.12.1+cu102", "10.2", True, gpus=("Tesla T4",), driver="450.119.04"),
    collect_env("2.6.0+cu126", "12.6", True, gpus=("NVIDIA GeForce GTX 1080 Ti",), driver="560.35.03"),
    collect_env("2.0.1+cu118", "11.8", True, gpus=("NVIDIA GeForce RTX 4080",), driver="525.116.04"),
    collect_env(
        "2.7.1+cu128",
        "12.8",
        True,
        gpus=("NVIDIA GeForce RTX 5090",),
        driver="570.133.07",
        packages=("torchvision==0.22.1", "numpy==2.2.6"),
    ),
    # No GPU, and none wanted.
    collect_env("2.6.0+cpu", "None", False),
    collect_env("2.8.0", "None", False, **_MAC),
    collect_env("2.3.0", "None", False, **_MAC, packages=("numpy==1.26.4", "torchvision==0.18.0")),
    windows(collect_env("2.4.1+cpu", "None", False, **_WINDOWS)),
    collect_env("2.4.0+cu121", "12.1", False)
    + "\nThis laptop has no GPU, the question is about torch.compile on the CPU.",
    collect_env(
        "2.2.2",
        "None",
        False,
        os="Ubuntu 22.04.4 LTS (aarch64)",
        platform="Linux-6.1.0-aarch64-with-glibc2.36",
    ),
    accelerate_env("2.7.0+cpu", False),
    "- `transformers` version: 4.44.0\n- Platform: macOS-14.5-arm64-arm-64bit\n- Python version: 3.11.9\n- PyTorch version (GPU?): 2.4.0 (False)\n- Using GPU in script?: no\n",
    # Windows, WSL, Jetson, ROCm that work.
    windows(
        collect_env(
            "2.5.1+cu121", "12.1", True, **_WINDOWS, gpus=("NVIDIA GeForce RTX 3060",), driver="560.94"
        )
    ),
    collect_env("2.4.1+cu121", "12.1", True, **_WSL, gpus=("NVIDIA GeForce RTX 3080",), driver="551.86"),
    "NVIDIA-SMI 545.23.05              Driver Version: 545.84       CUDA Version: 12.3\nWSL2, torch 2.2.0+cu121\n>>> torch.cuda.is_available()\nTrue\n",
    collect_env(
        "2.3.0a0+ebedce2.nv24.02",
        "12.2",
        True,
        os="Ubuntu 22.04.4 LTS (aarch64)",
        platform="Linux-5.15.136-tegra-aarch64-with-glibc2.35",
        gpus=("Orin (nvgpu)",),
        driver="540.3.0",
    ),
    collect_env(
        "2.5.1+rocm6.2",
        "N/A",
        True,
        rocm="6.2.41133-dd7f95766",
        gpus=("AMD Instinct MI300X (gfx942:sramecc+:xnack-)",) * 8,
    ),
    collect_env("2.4.0+rocm6.1", "N/A", True, rocm="6.1.40091", gpus=("AMD Radeon RX 7900 XTX (gfx1100)",)),
    # Nightlies and source builds.
    collect_env(
        "2.10.0.dev20251001+cu130",
        "13.0",
        True,
        gpus=("NVIDIA GeForce RTX 5080",),
        driver="580.82.09",
        packages=("torchvision==0.25.0.dev20251001+cu130",),
    ),
    collect_env("2.6.0a0+gitf84e533", "12.4", True, gpus=_A100, driver="550.54.15", nvcc="12.4.131"),
    collect_env("1.14.0a0+410ce96", "11.8", True, gpus=("NVIDIA A100-PCIE-40GB",), driver="520.61.05"),
    # Old forms.
    old_collect_env(
        "1.0.0", "9.0.176", "Yes", gpus=("Tesla P100-PCIE-16GB",) * 2, driver="384.145", nvcc="9.0.176"
    ),
    old_collect_env("1.1.0", "10.0.130", "Yes", gpus=("GeForce RTX 2080 Ti",) * 4, driver="410.78"),
    odd_colons(old_collect_env("1.5.1", "10.2", "Yes", gpus=("TITAN V",), driver="440.64.00")),
    quoted(
        old_collect_env(
            "1.6.0",
            "10.2",
            "Yes",
            gpus=("Quadro P6000",),
            driver="440.100",
            extra=("[pip3] numpy==1.19.1", "[pip3] torch==1.6.0", "[pip3] torchvision==0.7.0"),
        )
    ),
    # Cut short, quoted, coloured; a fault that is no fault of the machine.
    cut(collect_env("2.4.0+cu121", "12.1", True, gpus=("NVIDIA L4",), driver="535.129.03"), 5),
    cut(collect_env("2.4.0+cu121", "12.1", True), 9),
    coloured(
        collect_env(
            "2.3.1+cu121",
            "12.1",
            True,
            gpus=("NVIDIA A10",) * 4,
            driver="535.104.12",
            packages=("torchvision==0.18.1+cu121", "numpy==1.26.4"),
        )
    ),
    fenced(
        collect_env("2.2.1+cu121", "12.1", True, gpus=_A100, driver="535.54.03", nvcc="12.2.128"),
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. Your module has parameters that were not used in producing loss.",
    ),
    fenced(
        collect_env("2.1.2+cu118", "11.8", True, gpus=("NVIDIA GeForce RTX 3090",) * 2, driver="525.147.05"),
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.69 GiB",
    ),
    fenced(
        collect_env("2.5.0+cu124", "12.4", True, gpus=_A100, driver="550.90.07"),
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out. One rank reads more data than the others.",
    ),
    fenced(
        collect_env(
            "2.0.0+cu117",
            "11.7",
            True,
            gpus=("Tesla T4",),
            driver="525.85.12",
            packages=("torchvision==0.15.1", "numpy==1.24.2"),
        ),
        "torch.compile gives a graph break; FSDP is slower than DDP by 20 %.",
    ),
    ds_report("2.3.1+cu121", "12.1", "12.1")
    + smi("535.161.08", "12.2", "NVIDIA A100-SXM...", "NVIDIA A100-SXM...", mig="Disabled", memory=81920),
    smi("550.54.15", "12.4", *(("NVIDIA H100 80GB HBM3",) * 8), mig="Disabled", memory=81559)
    + "\ntorch 2.4.0+cu121 works, the question is which batch size to take.",
    accelerate_env("2.4.0+cu121", True, "NVIDIA H100 80GB HBM3"),
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x512 and 256x10)\n\n"
    + collect_env(
        "2.3.0+cu121", "12.1", True, gpus=("NVIDIA GeForce RTX 4070",), driver="546.33", **_WINDOWS
    ),
    "core file size              (blocks, -c) 0\nmax locked memory           (kbytes, -l) unlimited\nopen files                          (-n) 1048576\nmax user processes                  (-u) unlimited\nFilesystem      Size  Used Avail Use% Mounted on\n/dev/sda1       1.8T  900G  810G  53% /\ntmpfs           252G     0  252G   0% /dev/shm\n",
    "export NCCL_DEBUG=INFO\nexport NCCL_SOCKET_IFNAME=eth0\nexport CUDA_VISIBLE_DEVICES=0,1,2,3\nexport OMP_NUM_THREADS=8\n"
    + collect_env("2.4.0+cu121", "12.1", True, gpus=("NVIDIA A100-SXM4-40GB",) * 4, driver="535.104.12"),
    "",
    "How do I install this?",
    "{}",
)

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
    # Words of a cause where the machine is well.
    "DDP hangs when one rank skips a batch. NCCL_P2P_DISABLE=1 did not help.\nbox:123:123 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/direct pointer\nbox:123:123 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct\n",
    "docker run --gpus all --ipc=host --ulimit memlock=-1 nvcr.io/nvidia/pytorch:24.05-py3\nThe loss differs between two runs.",
    "docker run --gpus all --shm-size=16g my/image python train.py --workers 8\nValueError: num_samples should be a positive integer value, but got num_samples=0",
    "PyTorch compiling details: PyTorch built with:\n  - GCC 9.3\n  - Build settings: CXX_FLAGS= -D_GLIBCXX_USE_CXX11_ABI=0 -fvisibility-inlines-hidden, USE_NCCL=ON\nKeyError: 'mask_head'",
    "    MIG Mode\n        Current                           : Disabled\n        Pending                           : Disabled\n    Compute Mode                          : Default\n    ECC Errors\n        Volatile\n            SRAM Uncorrectable            : 0\n            DRAM Uncorrectable            : 0\n    Remapped Rows\n        Correctable Error                 : 0\n        Uncorrectable Error               : 0\n        Pending                           : No\n        Remapping Failure Occurred        : No\n    Fabric\n        State                             : Completed\n",
    'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n  File "/home/me/.local/lib/python3.8/site-packages/torch/nn/modules/module.py", line 1501, in _call_impl\nRuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[8, 1, 224, 224] to have 3 channels',
    "To reproduce: pip install --user torch torchvision, then run the script. Another PyTorch issue describes the same slow dataloader, and other pytorch users see it too.",
    "frame #3: <unknown function> + 0xd6df4 (0x7f9c in /opt/conda/lib/python3.10/site-packages/torch/lib/../../../.././libstdc++.so.6)\nframe #4: clone + 0x43 (0x7f9d in /lib/x86_64-linux-gnu/libc.so.6)\n[Rank 1] Watchdog caught collective operation timeout",
    "FlashAttention only supports the Ampere compute capability or newer; flash_attn makes torch.compile insert graph breaks.",
    "All NCCL collectives of two NCCL communicators overlap with other NCCL operations in my profile.",
    "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\nimport torch\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 15.77 GiB",
    "NOTE: Redirects are currently not supported in Windows or MacOs.\nWindows 11, the web UI starts and makes images.\n",
    "- `Accelerate` version: 0.33.0\n- Platform: Windows-10-10.0.22631-SP0\n- PyTorch version (GPU?): 2.4.0+cu121 (True)\n- `Accelerate` default config:\n\t- distributed_type: NO\n\t- mixed_precision: fp16\n",
    "My driver supports CUDA 12.4, can I install torch for cu121? Should I update the driver?",
    "A detection model: nms takes 20 ms with torchvision, is there a faster way?",
    "dmesg: DMAR: IOMMU enabled\n[    1.2] nvidia: module verification failed: signature and/or required key missing - tainting kernel\n[    1.3] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
    "I use the CPU version of torch on purpose, this machine has no GPU. In docker torch.cuda.is_available() is False, as it should be.",
    "On a Jetson Orin with NVIDIA's wheel torch-2.1.0a0+41361538.nv23.06 the model runs; an error in my export script is left.",
    "UCX RMA operations over InfiniBand are slow; no uncorrectable ECC errors, Xid log is empty.",
    "NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation\nNCCL INFO NET/IB : No device found.\nNCCL INFO Failed to open libibverbs.so[.1]\nNCCL INFO NET/Socket : Using [0]eth0:10.0.0.3<0>\nNCCL INFO cudaDriverVersion 12020\nNCCL INFO Init COMPLETE",
    "LD_LIBRARY_PATH=/usr/lib/wsl/lib\nTypeError: forward() got an unexpected keyword argument 'mask'\nWSL2, everything runs on the GPU",
    "pip install --no-deps mypackage\ntorch 2.4.0+cu121 works, mypackage raises KeyError.",
    "export CUDA_VISIBLE_DEVICES=1,2\nAfter 100 steps the loss is nan. CUDA_VISIBLE_DEVICES is set in the launch script.",
    "OutOfMemoryError on rank 3, the other ranks wait. nvidia-smi shows the GPU memory is full. Windows defender is off.",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or num_stages may help.",
    "RuntimeError: CUDA error: device-side assert triggered\nAssertion `t >= 0 && t < n_classes` failed.\n2x A100, driver 535.104.05, torch 2.1.0+cu121",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED\nexitcode : -9 (pid: 1234)\nSignal 9 (SIGKILL) received by PID 1234",
    "[W socket.cpp:436] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use). MASTER_ADDR=127.0.0.1 nproc_per_node=2",
    'Missing key(s) in state_dict: "module.conv1.weight". The checkpoint comes from DistributedDataParallel.',
)

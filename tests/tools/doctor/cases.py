"""Machines from public reports, as loose facts and what their owner said; the cause is the one that was confirmed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """Facts under loose names, a sentence, and the cause ("" for a healthy machine)."""

    cause: str
    said: str
    facts: Mapping[str, Any]


Form = Callable[[Case], str]
Disguise = Callable[[str], str]


def as_json(case: Case) -> str:
    """The facts as a JSON object."""
    return json.dumps({**case.facts, "symptom": case.said})


def as_text(case: Case) -> str:
    """The facts as lines under the sentence."""
    lines = [case.said, ""]
    for name, value in case.facts.items():
        if isinstance(value, Mapping):
            lines += [f"{variable}={text}" for variable, text in value.items()]
        else:
            lines.append(f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return "\n".join(lines)


FAULTY = (
    Case(
        "driver-too-old",
        "collect_env lists both GPUs but CUDA is unavailable.",
        {
            "torch_version": "1.6.0",
            "torch_cuda": "10.2",
            "cuda_available": False,
            "driver_version": "418.67",
            "driver_cuda": "10.1",
            "gpu_names": ["Tesla V100-PCIE-16GB", "Tesla V100-PCIE-16GB"],
            "compute_capability": "7.0",
            "python": "3.7",
            "os": "Red Hat Enterprise Linux Server 7.6 (Maipo)",
        },
    ),
    Case(
        "driver-too-old",
        "`pip3 install torch` gives a torch that cannot see any of four P100s. Note the odd formatting (full-width colons, missing colon after 'PyTorch version').",
        {
            "torch_version": "1.5.0",
            "torch_cuda": "10.2",
            "cuda_available": False,
            "driver_version": "410.104",
            "driver_cuda": "10.0",
            "gpu_names": [
                "Tesla P100-PCIE-16GB",
                "Tesla P100-PCIE-16GB",
                "Tesla P100-PCIE-16GB",
                "Tesla P100-PCIE-16GB",
            ],
            "compute_capability": "6.0",
            "torchvision_version": "0.6.0",
            "python": "3.6",
            "os": "Ubuntu 18.04.3 LTS",
            "nvcc": "10.0.130",
        },
    ),
    Case(
        "driver-too-old",
        "collect_env itself prints the driver warning before the report.",
        {
            "torch_version": "1.12.1+cu102",
            "torch_cuda": "10.2",
            "cuda_available": False,
            "driver_cuda": "9.1",
            "python": "3.8",
        },
    ),
    Case(
        "driver-too-old",
        "Fine-tuning inside the project's container fails to initialise CUDA.",
        {
            "torch_cuda": "12.1",
            "cuda_available": False,
            "driver_cuda": "11.0",
            "python": "3.10",
            "platform": "vendor container with CUDA 12.1",
        },
    ),
    Case(
        "arch-not-in-build",
        "A pinned container image (torch 2.0.1 / CUDA 11.8) does not run on an RTX 5090.",
        {
            "torch_version": "2.0.1",
            "torch_cuda": "11.8",
            "gpu_names": ["NVIDIA GeForce RTX 5090"],
            "compute_capability": "12.0",
            "torch_arch_list": ["sm_37", "sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
        },
    ),
    Case(
        "arch-not-in-build",
        "Training on a 3090 does not start.",
        {
            "gpu_names": ["NVIDIA GeForce RTX 3090"],
            "compute_capability": "8.6",
            "torch_arch_list": ["sm_37", "sm_50", "sm_60", "sm_61", "sm_70", "sm_75", "compute_37"],
        },
    ),
    Case(
        "arch-not-in-build",
        "collect_env prints the arch warning above the report; 'Is CUDA available' is True all the same.",
        {
            "torch_version": "2.6.0+cu126",
            "torch_cuda": "12.6",
            "cuda_available": True,
            "driver_version": "570.124.04",
            "gpu_names": ["NVIDIA GeForce RTX 5090 D"],
            "compute_capability": "12.0",
            "torch_arch_list": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
            "python": "3.12.9",
            "os": "Ubuntu 24.10 (x86_64)",
            "glibc": "2.40",
        },
    ),
    Case(
        "arch-not-in-build",
        "DDP on an RTX 5090 looks like an NCCL problem.",
        {
            "gpu_names": ["NVIDIA GeForce RTX 5090"],
            "compute_capability": "12.0",
            "nccl": "2.14.3+cuda11.8",
            "driver_cuda": "12.8",
            "python": "3.8",
            "env": {"NCCL_P2P_LEVEL": "LOC"},
        },
    ),
    Case(
        "gpu-too-old-for-build",
        "Worked on 0.3.0, fails after the patch release 0.3.1.",
        {
            "torch_version": "0.3.1",
            "gpu_names": ["GeForce GTX 960M"],
            "compute_capability": "5.0",
            "os": "Windows",
        },
    ),
    Case(
        "gpu-too-old-for-build",
        "On a box mixing a K80 with older Kepler cards, work on the older cards fails after moving to 1.3.",
        {
            "torch_version": "1.3.1",
            "gpu_names": ["Tesla K80", "Tesla K40c", "Tesla K40c", "GeForce 710"],
            "compute_capability": "3.7 / 3.5 / 3.5 / 3.5",
            "cuda_available": True,
        },
    ),
    Case(
        "forward-compat-on-geforce",
        "torch inside the image cannot initialise CUDA on a GeForce card.",
        {
            "gpu_names": ["GeForce RTX 3090"],
            "compute_capability": "8.6",
            "driver_version": "525",
            "cuda_in_container": "12.1",
            "platform": "docker",
        },
    ),
    Case(
        "driver-library-mismatch",
        "Any CUDA call fails with error 803.",
        {"gpu_names": ["GeForce GTX 1080 Ti"], "compute_capability": "6.1", "os": "Pop!_OS 22.04 LTS"},
    ),
    Case(
        "driver-library-mismatch",
        "nvidia-smi works on the host, fails inside the user container.",
        {"driver_version": "515.48.07 (host)", "driver_cuda": "11.7", "os": "Ubuntu 20.04.2 LTS container"},
    ),
    Case(
        "fabricmanager-not-running",
        "nvidia-smi lists the H200 but CUDA never initialises.",
        {"gpu_names": ["NVIDIA H200"], "compute_capability": "9.0", "platform": "hosted single-GPU H200 job"},
    ),
    Case(
        "cuda-visible-devices-invalid",
        "Launch script selects GPUs that do not exist on the user's machine.",
        {
            "env": {"CUDA_VISIBLE_DEVICES": "value set by the launch script, not an existing id"},
            "python": "3.8",
        },
    ),
    Case(
        "ld-library-path-shadows-cuda",
        "import torch fails; ldd shows the wheel's cuSPARSE resolving nvJitLink from the system toolkit.",
        {"env": {"LD_LIBRARY_PATH": "/usr/local/cuda-12.1/lib64:"}, "python": "3.12", "torch_cuda": "12.x"},
    ),
    Case(
        "ld-library-path-shadows-cudnn",
        "torch.backends.cudnn.version() raises.",
        {
            "torch_version": "1.12.0+cu113",
            "torch_cuda": "11.3",
            "python": "3.8",
            "cudnn_compiled": "8.3.2",
            "cudnn_found": "8.0.3",
            "env": {
                "LD_LIBRARY_PATH": "/public/apps/cudnn/v8.0.3.33-cuda.11.0/cuda/lib64:/public/apps/cuda/11.0/lib64:/usr/local/cuda/lib64:/usr/local/cuda/lib64::/public/slurm/20.11.8/lib:/public/slurm/20.11.8/lib"
            },
        },
    ),
    Case(
        "nccl-library-mismatch",
        "Environment created from the project's requirements cannot import torch.",
        {"system_cuda": "12.2", "note": "requirements list mixes nvidia-*-cu11 and nvidia-*-cu12 packages"},
    ),
    Case(
        "torch-torchvision-cuda-mismatch",
        "torchvision built from source is refused at import.",
        {
            "torch_version": "1.10.0",
            "torch_cuda": "11.3",
            "torchvision_version": "0.11.0 (built from source)",
            "torchvision_cuda": "11.7",
            "nvcc": "11.7",
            "python": "3.8",
            "os": "Ubuntu 20.04",
        },
    ),
    Case(
        "torch-torchvision-cuda-mismatch",
        "nms operator missing.",
        {"torch_version": "1.4.0+cu92", "torch_cuda": "9.2", "torchvision_version": "0.5.0", "python": "3.6"},
    ),
    Case(
        "cpu-only-torch",
        "Nightly installed with pytorch-cuda=11.8 has no CUDA; the stable install on the same machine has.",
        {
            "torch_version": "2.1.0.dev20230905",
            "torch_cuda": None,
            "cuda_available": False,
            "nvcc": "11.8.89",
            "python": "3.9.18 conda-forge",
            "os": "Ubuntu 22.04.3 LTS (x86_64)",
            "glibc": "2.35",
        },
    ),
    Case(
        "cpu-only-torch",
        "Worked before, after an update CUDA is gone.",
        {"torch_version": "2.0.1+cpu", "torch_cuda": None, "os": "Windows"},
    ),
    Case(
        "cpu-only-torch",
        "CUDA unavailable with a fitting driver.",
        {
            "torch_version": "1.3.1",
            "torch_cuda": None,
            "cuda_available": False,
            "driver_version": "430.64",
            "gpu_names": ["GeForce RTX 2080 Ti"],
            "compute_capability": "7.5",
            "torchvision_version": "0.4.2",
            "python": "3.7",
            "os": "Ubuntu 18.04.4 LTS",
            "nvcc": "10.1.105",
        },
    ),
    Case(
        "cpu-only-torch",
        "Source build does not see the GPU.",
        {
            "torch_version": "2.0.0a0+git7f2b5ea",
            "torch_cuda": None,
            "cuda_available": False,
            "driver_version": "525.60.11",
            "gpu_names": ["NVIDIA GeForce RTX 4080"],
            "compute_capability": "8.9",
            "python": "3.10.8",
            "os": "Ubuntu 22.04.1 LTS (x86_64)",
            "note": "pip list also holds torch 1.13.1; conda holds cudatoolkit 11.3.1 and magma-cuda116",
        },
    ),
    Case(
        "p2p-blocked-by-acs-iommu",
        "ncclAllReduce deadlocks between two PCIe GPUs; NCCL_P2P_DISABLE=1 makes it work.",
        {
            "gpu_names": ["RTX 5880 Ada", "RTX 5880 Ada"],
            "topology": "PHB, no NVLink",
            "platform": "AMD Starship/Matisse root complex, ACS on (ACSCtl 0x001d)",
            "env": {"NCCL_P2P_DISABLE": "1 (workaround)"},
        },
    ),
    Case(
        "p2p-blocked-by-acs-iommu",
        "AllReduce hangs unless NCCL_P2P_DISABLE=1.",
        {
            "gpu_names": [
                "GeForce GTX 1080 Ti",
                "GeForce GTX 1080 Ti",
                "GeForce GTX 1080 Ti",
                "GeForce GTX 1080 Ti",
            ],
            "compute_capability": "6.1",
            "kernel_cmdline_fix": "intel_iommu=off",
        },
    ),
    Case(
        "memlock-limit-too-low",
        "InfiniBand transport fails to register memory although perftest works.",
        {"ulimit_memlock_kb": "8192", "interconnect": "InfiniBand"},
    ),
    Case(
        "shm-too-small",
        "NCCL 2.7 fails in a container where 2.6 worked.",
        {
            "gpu_names": ["GeForce RTX 2080", "GeForce RTX 2080", "GeForce RTX 2080", "GeForce RTX 2080"],
            "compute_capability": "7.5",
            "nccl": "2.7.3",
            "shm_size": "64M (docker default)",
            "platform": "docker nvidia/cuda:10.1-devel-ubuntu18.04",
        },
    ),
    Case(
        "shm-too-small",
        "DataLoader with several workers dead-locks instead of raising (two zombie workers).",
        {"shm_size": "1.0G, 87% used", "platform": "docker --shm-size=1024m"},
    ),
    Case(
        "numpy2-abi",
        "x.numpy() says NumPy is not available although it is installed.",
        {"torch_version": "2.2.2+cpu", "numpy": "2.0.0", "python": "3.10"},
    ),
    Case(
        "rocm-arch-not-in-build",
        "ROCm nightly fails on the first kernel with 'invalid device function'.",
        {
            "torch_version": "2.10.0.dev20250929+rocm7.0",
            "rocm": "7.0",
            "gpu_arch": "gfx1151",
            "torchvision_version": "0.25.0.dev20250930+rocm7.0",
            "numpy": "2.2.6",
            "extra": ["nvidia-cuda-runtime-cu13==0.0.0a0", "onnxruntime-gpu==1.23.0"],
        },
    ),
    Case(
        "duplicate-torch-install",
        "pip install --user of a newer torch next to a central one breaks import.",
        {
            "torch_version": "1.5.1+cu101 (central) and a newer one in ~/.local",
            "torchvision_version": "0.6.1+cu101",
            "python": "3.7.4",
            "platform": "HPC modules: cuda/10.1.243 cudnn/7.6.4 nccl/2.4.8-1",
        },
    ),
    Case("nccl-not-in-build", "DDP training on Windows.", {"os": "Windows"}),
    Case(
        "nccl-not-in-build",
        "Project starts DDP on Windows.",
        {
            "torch_version": "2.7.0+cu126",
            "torch_cuda": "12.6",
            "cuda_available": True,
            "driver_version": "560.94",
            "gpu_names": ["NVIDIA GeForce GTX 1070"],
            "compute_capability": "6.1",
            "python": "3.10.17",
            "os": "Microsoft Windows 10 Home",
            "nvcc": "12.3.107",
        },
    ),
    Case(
        "torchvision-cpu-build",
        "nms works on CPU tensors only.",
        {"os": "Windows", "torchvision_build": "CPU"},
    ),
    Case(
        "nvcc-torch-cuda-mismatch",
        "Building a CUDA extension is refused; the user never installed CUDA 10.1 knowingly.",
        {
            "torch_version": "1.10.2",
            "torch_cuda": "11.3",
            "cuda_available": True,
            "nvcc": "10.1",
            "python": "3.8.0",
            "os": "Ubuntu 20.04.3 LTS (x86_64)",
        },
    ),
    Case(
        "libstdcxx-too-old",
        "Conda environment has a new libstdc++, Python still loads the system one.",
        {
            "install": "conda environment",
            "libstdcxx_in_env": "6.0.34",
            "env_symlink": "libstdc++.so.6 missing",
        },
    ),
    Case(
        "exclusive-compute-mode",
        "DDP fails on a cluster that keeps GPUs in exclusive mode; single GPU works.",
        {
            "torch_version": "1.10.0 py3.7_cuda10.2_cudnn7.6.5_0",
            "torch_cuda": "10.2",
            "env": {"CUDA_VISIBLE_DEVICES": "0,1"},
            "compute_mode": "Exclusive_Process",
            "scheduler": "slurm",
        },
    ),
    Case(
        "mig-single-device",
        "torch fails on a container that got two MIG slices.",
        {
            "torch_version": "2.5.0.dev20240705+cu121",
            "torch_cuda": "12.1",
            "gpu_names": ["NVIDIA-A100-SXM4-80GB-MIG-3g.40gb", "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb"],
        },
    ),
    Case(
        "kernel-module-not-loaded",
        "Driver installed, module does not load after reboot.",
        {"gpu_names": ["RTX 2060 SUPER"], "os": "Fedora 34", "secure_boot": True},
    ),
    Case(
        "kernel-module-not-loaded",
        "Works with one kernel, fails with another.",
        {"os": "Arch-based, custom kernel"},
    ),
    Case(
        "container-toolkit-missing",
        "Container with --gpus does not start.",
        {"platform": "docker --gpus device=0"},
    ),
    Case(
        "extension-abi-mismatch",
        "flash-attn wheel stops importing after a torch upgrade.",
        {"torch_version": "2.7.0+cu128", "torch_cuda": "12.8", "python": "3.10", "flash_attn": "2.7.4.post1"},
    ),
    Case(
        "bios-large-bar-off",
        "Driver loads but finds no device; kernel log shows the adapter failing to initialise.",
        {"gpu_names": ["RTX 5090"], "compute_capability": "12.0"},
    ),
    Case(
        "driver-too-old",
        "The GPU is not used after the upgrade.",
        {
            "torch_version": "1.13.1+cu117",
            "torch_cuda": "11.7",
            "cuda_available": False,
            "driver_version": "440.82",
        },
    ),
    Case(
        "driver-too-old",
        "torch.cuda.is_available() returns False.",
        {"torch_version": "2.1.0+cu121", "driver_version": "470.57.02", "gpu_names": ["A100"]},
    ),
    Case(
        "driver-too-old",
        "pip install of the current release; GPU is not found.",
        {"torch_cuda": "11.8", "driver_cuda": "10.2"},
    ),
    Case(
        "driver-too-old",
        "Container fails on start, asks for a newer driver.",
        {"container_cuda": "12.4", "driver_version": "470.129.06"},
    ),
    Case(
        "driver-too-old",
        "Application falls back to CPU.",
        {
            "os": "Windows 10",
            "torch_version": "2.3.0+cu121",
            "driver_version": "457.30",
            "cuda_available": False,
        },
    ),
    Case(
        "driver-too-old",
        "Default install of 1.2 fails with an assertion about the driver.",
        {
            "torch_version": "1.2.0",
            "driver_version": "396.54",
            "cuda_available": False,
            "gpu_names": ["GTX 1080 Ti"],
        },
    ),
    Case(
        "arch-not-in-build",
        "Any operation on the GPU hangs for minutes or fails.",
        {"torch_version": "1.7.1", "torch_cuda": "10.2", "gpu_names": ["GeForce RTX 3070"]},
    ),
    Case(
        "arch-not-in-build",
        "no kernel image",
        {"torch_version": "2.5.1", "gpu_names": ["NVIDIA GeForce RTX 5070"], "torch_cuda": "12.4"},
    ),
    Case(
        "arch-not-in-build",
        "Image generation UI does not start.",
        {"gpu_names": ["NVIDIA GeForce RTX 5060 Ti"], "torch_version": "2.6.0+cu118"},
    ),
    Case(
        "arch-not-in-build",
        "Training fails with a CUDA error at the first kernel.",
        {"gpu_names": ["NVIDIA H100"], "torch_version": "1.12.1+cu113"},
    ),
    Case(
        "arch-not-in-build",
        "Warning that the card is not supported by the installation.",
        {
            "compute_capability": "12.0",
            "torch_arch_list": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
        },
    ),
    Case(
        "gpu-too-old-for-build",
        "Kernel launch fails on the second card.",
        {"torch_version": "2.8.0+cu129", "gpu_names": ["Tesla V100", "Quadro P400"]},
    ),
    Case(
        "gpu-too-old-for-build",
        "Message that the GPU is too old.",
        {"gpu_names": ["GeForce GT 730"], "torch_version": "1.8.0"},
    ),
    Case(
        "gpu-too-old-for-build",
        "no kernel image is available",
        {"gpu_names": ["Tesla M60"], "torch_version": "2.9.0", "torch_cuda": "12.8"},
    ),
    Case(
        "gpu-too-old-for-build",
        "warns at start that the GPU is unsupported",
        {"gpu_names": ["NVIDIA GeForce GTX 970"], "torch_version": "2.7.1+cu128"},
    ),
    Case(
        "forward-compat-on-geforce",
        "CUDA init error in container.",
        {
            "gpu_names": ["GeForce RTX 2070"],
            "driver_version": "510.47.03",
            "cuda_in_container": "11.8",
            "platform": "docker",
        },
    ),
    Case(
        "driver-library-mismatch",
        "nvidia-smi reports that driver and library versions differ after an automatic update.",
        {"os": "Ubuntu 20.04"},
    ),
    Case("driver-library-mismatch", "CUDA error 803 in the pod.", {"platform": "kubernetes"}),
    Case(
        "driver-library-mismatch",
        "is_available() is False.",
        {"driver_version": "535.86.10", "libcuda_version": "525.105.17"},
    ),
    Case(
        "fabricmanager-not-running",
        "nvidia-smi is fine on the HGX box, torch cannot use the GPUs.",
        {
            "gpu_names": [
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
            ],
            "cuda_available": False,
            "driver_version": "535.54.03",
            "torch_version": "2.0.1+cu118",
        },
    ),
    Case(
        "fabricmanager-not-running",
        "cudaGetDeviceCount returns error 802.",
        {"gpu_names": ["NVIDIA H100 80GB HBM3"]},
    ),
    Case(
        "cuda-visible-devices-invalid",
        "Script copied from a larger server.",
        {"env": {"CUDA_VISIBLE_DEVICES": "2"}, "gpu_names": ["RTX 3090"], "cuda_available": False},
    ),
    Case(
        "cuda-visible-devices-invalid",
        "invalid device ordinal",
        {"env": {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "gpu_names": ["RTX 3090", "RTX 3090"]},
    ),
    Case(
        "ld-library-path-shadows-cuda",
        "Import of torch raises an undefined symbol from cublas.",
        {
            "env": {"LD_LIBRARY_PATH": "/usr/local/cuda-11.0/lib64"},
            "torch_version": "1.13.0",
            "torch_cuda": "11.7",
        },
    ),
    Case(
        "ld-library-path-shadows-cudnn",
        "Convolutions fail with a cuDNN error; the cluster module loads its own cuDNN.",
        {"env": {"LD_LIBRARY_PATH": "/opt/cudnn/lib64"}, "torch_version": "2.1.0"},
    ),
    Case(
        "ld-library-path-shadows-cudnn",
        "Error on first convolution.",
        {"cudnn_compiled": "8.7.0", "cudnn_found": "8.4.1"},
    ),
    Case(
        "nccl-library-mismatch",
        "undefined symbol starting with nccl on import; a system NCCL is installed.",
        {"nccl": "2.10.3", "torch_version": "1.12"},
    ),
    Case(
        "nccl-library-mismatch",
        "import error.",
        {"torch_version": "2.1.0", "nccl_found": "2.8.4", "nccl": "2.18.1"},
    ),
    Case(
        "torch-torchvision-mismatch",
        "nms operator is missing.",
        {"torch_version": "2.0.1", "torchvision_version": "0.14.0"},
    ),
    Case(
        "torch-torchvision-mismatch",
        "Segfault at import of torchvision.",
        {"torch_version": "1.8.0", "torchvision_version": "0.8.2"},
    ),
    Case("torch-torchvision-mismatch", "", {"torch_version": "2.4.0", "torchvision_version": "0.18.1"}),
    Case(
        "torch-torchvision-cuda-mismatch",
        "RuntimeError on import",
        {"torch_version": "1.13.1+cu116", "torchvision_version": "0.14.1+cu117"},
    ),
    Case(
        "cpu-only-torch",
        "conda solved to a CPU package.",
        {"torch_version": "1.10.0", "torch_cuda": None, "gpu_names": ["GTX 1650"]},
    ),
    Case(
        "cpu-only-torch",
        "GPU not used.",
        {"torch_version": "2.2.0+cpu", "driver_version": "536.23", "os": "Windows 11"},
    ),
    Case(
        "cpu-only-torch",
        "conda-forge install",
        {"torch_version": "1.12.0", "torch_cuda": None, "cuda_available": False, "nvcc": "11.6"},
    ),
    Case(
        "p2p-blocked-by-acs-iommu",
        "Multi-GPU training freezes with both cards at 100 % load; disabling P2P in NCCL helps.",
        {"gpu_names": ["RTX 3090", "RTX 3090"]},
    ),
    Case(
        "p2p-blocked-by-acs-iommu",
        "DDP init hangs.",
        {"gpu_names": ["A6000", "A6000", "A6000", "A6000"], "platform": "AMD EPYC, IOMMU enabled"},
    ),
    Case(
        "memlock-limit-too-low",
        "ibv_create_qp fails.",
        {"ulimit_memlock": "64 KB", "interconnect": "InfiniBand"},
    ),
    Case(
        "shm-too-small", "DataLoader workers are killed.", {"platform": "kubernetes pod", "shm_size": "64M"}
    ),
    Case("shm-too-small", "Bus error in DataLoader with num_workers > 0.", {"platform": "docker"}),
    Case("numpy2-abi", "warnings at import.", {"torch_version": "2.1.2", "numpy": "2.0.1"}),
    Case(
        "rocm-arch-not-in-build",
        "Segmentation fault at first tensor.",
        {"torch_version": "2.0.1+rocm5.4.2", "gpu_arch": "gfx1032"},
    ),
    Case(
        "rocm-arch-not-in-build",
        "invalid device function",
        {"gpu_names": ["AMD Radeon RX 6600"], "gpu_arch": "gfx1032", "rocm": "5.6"},
    ),
    Case(
        "duplicate-torch-install",
        "Two versions of torch are on the path, one in the user's home.",
        {"torch_version": "1.8.0"},
    ),
    Case(
        "duplicate-torch-install",
        "undefined symbol at import",
        {"torch_version": "1.4.0 (conda) and 1.5.0 (pip)"},
    ),
    Case("nccl-not-in-build", "Distributed training on a Mac.", {"os": "macOS 12"}),
    Case(
        "nccl-not-in-build",
        "Multi-GPU fine-tuning does not start.",
        {"os": "Windows 11", "torch_version": "2.2.0+cu121", "gpu_names": ["RTX 4090", "RTX 4090"]},
    ),
    Case(
        "torchvision-cpu-build",
        "detection fails",
        {"torch_version": "1.9.0+cu111", "torchvision_version": "0.10.0+cpu"},
    ),
    Case(
        "nvcc-torch-cuda-mismatch",
        "Building apex fails.",
        {"nvcc": "12.1", "torch_cuda": "11.7", "torch_version": "2.0.1"},
    ),
    Case(
        "nvcc-torch-cuda-mismatch",
        "setup.py of the extension complains about CUDA versions.",
        {"system_cuda": "11.2", "torch_version": "1.10.0+cu102"},
    ),
    Case("libstdcxx-too-old", "GLIBCXX_3.4.21 is missing.", {"os": "CentOS 7"}),
    Case(
        "libstdcxx-too-old",
        "import fails, the system's libstdc++ is taken instead of the environment's",
        {"install": "conda"},
    ),
    Case(
        "exclusive-compute-mode",
        "second process cannot start",
        {"compute_mode": "Exclusive_Process", "gpu_names": ["V100", "V100", "V100", "V100"]},
    ),
    Case(
        "exclusive-compute-mode",
        "CUDA-capable devices are busy or unavailable when a second process uses the GPU.",
        {"scheduler": "LSF"},
    ),
    Case(
        "mig-single-device", "only one device visible", {"gpu_names": ["A100 MIG 1g.5gb", "A100 MIG 1g.5gb"]}
    ),
    Case(
        "mig-single-device",
        "DDP over several MIG instances fails.",
        {"gpu_names": ["H100"], "mig": "enabled"},
    ),
    Case(
        "kernel-module-not-loaded",
        "nvidia-smi cannot communicate with the driver after a kernel update.",
        {"gpu_names": ["GTX 1060"], "os": "Debian 12"},
    ),
    Case("kernel-module-not-loaded", "nouveau took the card", {"os": "Ubuntu 22.04"}),
    Case(
        "container-toolkit-missing",
        "could not select device driver with gpu capabilities",
        {"platform": "docker"},
    ),
    Case(
        "container-toolkit-missing",
        "docker does not know the nvidia runtime",
        {"platform": "docker, fresh server"},
    ),
    Case(
        "container-without-gpus",
        "Container started with plain docker run.",
        {"platform": "docker", "torch_version": "2.0.0", "torch_cuda": "11.7", "cuda_available": False},
    ),
    Case(
        "container-without-gpus",
        "The compose file has no GPU reservation; CUDA is not available inside.",
        {"platform": "docker-compose"},
    ),
    Case(
        "container-lost-gpu-cgroup",
        "GPU disappears from the running container after some hours.",
        {"platform": "docker"},
    ),
    Case(
        "container-lost-gpu-cgroup",
        "nvidia-smi in the pod says Unknown Error after the node's systemd was reloaded.",
        {"platform": "kubernetes"},
    ),
    Case(
        "extension-abi-mismatch",
        "undefined symbol in flash_attn_2_cuda.",
        {"torch_version": "2.3.0", "flash_attn": "2.5.8"},
    ),
    Case(
        "extension-abi-mismatch",
        "xformers ops unavailable after the torch upgrade",
        {"torch_version": "2.1.0", "xformers": "0.0.20"},
    ),
    Case(
        "bios-large-bar-off",
        "Card is not usable in a desktop board; kernel complains about BAR.",
        {"gpu_names": ["Tesla P40"]},
    ),
    Case("gpu-ecc-error", "Random crashes, Xid 63 and 94 in dmesg.", {"gpu_names": ["A100"]}),
    Case("gpu-ecc-error", "uncorrectable ECC errors on one GPU", {"gpu_names": ["V100"]}),
    Case(
        "jetson-wrong-wheel",
        "CUDA is False.",
        {"platform": "Jetson Orin Nano, JetPack 6", "torch_version": "2.5.0", "torch_cuda": None},
    ),
    Case(
        "jetson-wrong-wheel",
        "GPU not available with the pip wheel",
        {"os": "L4T 35.4", "torch_version": "2.1.0"},
    ),
    Case(
        "cuda-libs-not-installed",
        "libcudnn.so.8 cannot be found on import in a slim image",
        {"torch_version": "2.2.0"},
    ),
    Case(
        "cuda-libs-not-installed",
        "import torch: libcublas.so.11 missing",
        {"torch_version": "2.0.1", "install": "bazel, nvidia packages not in the lock file"},
    ),
    Case(
        "mkl-symbol-removed",
        "undefined symbol iJIT_NotifyEvent",
        {"torch_version": "1.13.1", "install": "conda"},
    ),
    Case(
        "wsl-libcuda-not-on-path",
        "libcuda is not found by the loader",
        {"os": "Ubuntu in WSL2", "torch_cuda": "11.7", "cuda_available": False},
    ),
    Case("wsl-libcuda-not-on-path", "torch finds no GPU in WSL though Windows does", {"platform": "WSL2"}),
    Case(
        "libuv-missing-windows",
        "torchrun fails in TCPStore, wants libuv",
        {"os": "Windows", "torch_version": "2.4.0"},
    ),
    Case(
        "hostname-resolves-to-loopback",
        "Gloo cannot connect.",
        {"nnodes": 2, "hostname_resolves_to": "127.0.1.1"},
    ),
    Case("hostname-resolves-to-loopback", "Each node's name maps to 127.0.0.1 in /etc/hosts", {"nodes": 2}),
    Case(
        "cuda-visible-devices-set-too-late",
        "Setting CUDA_VISIBLE_DEVICES in the script does not change which GPU is used.",
        {},
    ),
    Case(
        "cuda-visible-devices-set-too-late",
        "os.environ['CUDA_VISIBLE_DEVICES'] has no effect",
        {"torch_version": "1.12"},
    ),
    Case(
        "driver-too-old",
        "No GPU after upgrading torch",
        {
            "gpu_names": ["Tesla T4"],
            "driver_version": "418.67",
            "torch_version": "1.8.0",
            "torch_cuda": "11.1",
            "cuda_available": False,
            "platform": "Colab-like VM",
        },
    ),
    Case(
        "driver-too-old",
        "The library is imported but everything runs on the CPU.",
        {
            "torch_version": "2.0.0",
            "torch_cuda": "11.7",
            "driver_version": "430.50",
            "gpu_names": ["RTX 2080 Ti", "RTX 2080 Ti"],
        },
    ),
    Case(
        "driver-too-old",
        "UserWarning about the age of the driver",
        {"driver_cuda": "11.4", "torch_version": "2.2.0+cu121"},
    ),
    Case(
        "driver-too-old",
        "plain pip install",
        {
            "torch_version": "2.10.0",
            "torch_cuda": "13.0",
            "driver_version": "560.35.03",
            "cuda_available": False,
        },
    ),
    Case(
        "arch-not-in-build",
        "cuBLAS call fails",
        {"torch_version": "1.6.0", "torch_cuda": "10.1", "gpu_names": ["A100-SXM4-40GB"]},
    ),
    Case(
        "arch-not-in-build",
        "The GUI shows an error about the kernel image",
        {
            "torch_version": "2.3.1",
            "torch_cuda": "12.1",
            "gpu_names": ["NVIDIA GeForce RTX 5080 Laptop GPU"],
            "os": "Windows 11",
        },
    ),
    Case(
        "arch-not-in-build",
        "very slow first call and then an error",
        {
            "torch_version": "1.8.1",
            "torch_cuda": "10.2",
            "gpu_names": ["NVIDIA RTX A6000"],
            "cuda_available": True,
        },
    ),
    Case(
        "arch-not-in-build",
        "",
        {"gpu_names": ["NVIDIA GH200 480GB"], "torch_version": "1.13.1", "torch_cuda": "11.7"},
    ),
    Case(
        "gpu-too-old-for-build",
        "old gaming card",
        {"gpu_names": ["GeForce GTX 680"], "torch_version": "1.0.0"},
    ),
    Case(
        "gpu-too-old-for-build",
        "error at first cuda call",
        {"gpu_names": ["Tesla K20c"], "torch_version": "1.4.0", "cuda_available": True},
    ),
    Case(
        "gpu-too-old-for-build",
        "",
        {"gpu_names": ["Quadro M4000"], "torch_version": "2.8.0+cu128", "cuda_available": True},
    ),
    Case(
        "rocm-arch-not-in-build",
        "core dumped",
        {"torch_version": "2.1.0+rocm5.6", "gpu_names": ["AMD Radeon RX 5700 XT"], "gpu_arch": "gfx1010"},
    ),
    Case(
        "forward-compat-on-geforce",
        "CUDA is unavailable in the NGC image",
        {
            "gpu_names": ["TITAN RTX"],
            "driver_version": "470.103.01",
            "container_cuda": "11.7",
            "env": {"LD_LIBRARY_PATH": "/usr/local/cuda/compat/lib:/usr/local/nvidia/lib"},
            "platform": "docker",
        },
    ),
    Case(
        "driver-library-mismatch",
        "After a system update and before rebooting nothing finds the GPU; version mismatch reported by nvidia-smi",
        {"os": "Arch Linux"},
    ),
    Case(
        "driver-library-mismatch",
        "libnvidia-ml of another version than the kernel driver is bound into the container",
        {"platform": "singularity", "driver_version": "460.32.03"},
    ),
    Case(
        "kernel-module-not-loaded",
        "akmods did not build the module for the new kernel",
        {"os": "Fedora 38", "gpu_names": ["RTX 3060"]},
    ),
    Case(
        "kernel-module-not-loaded",
        "nvidia-smi: couldn't communicate with the driver",
        {"os": "Ubuntu 20.04", "gpu_names": ["GTX 1050"]},
    ),
    Case(
        "fabricmanager-not-running",
        "Driver and nvidia-smi fine.",
        {
            "gpu_names": [
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
            ],
            "cuda_available": False,
            "driver_version": "550.54.14",
            "torch_version": "2.3.0",
            "torch_cuda": "12.1",
        },
    ),
    Case("fabricmanager-not-running", "system not yet initialized", {"platform": "8x A100 VM"}),
    Case(
        "cuda-visible-devices-invalid",
        "no device",
        {"env": {"CUDA_VISIBLE_DEVICES": "GPU0"}, "gpu_names": ["RTX 3090"]},
    ),
    Case(
        "cuda-visible-devices-invalid",
        "",
        {"env": {"CUDA_VISIBLE_DEVICES": "-1"}, "gpu_names": ["RTX 3090"], "cuda_available": False},
    ),
    Case(
        "ld-library-path-shadows-cuda",
        "ImportError: libcublasLt version",
        {
            "env": {"LD_LIBRARY_PATH": "/usr/local/cuda-11.6/lib64"},
            "torch_version": "2.0.1",
            "torch_cuda": "11.8",
            "cuda_available": False,
        },
    ),
    Case(
        "ld-library-path-shadows-cudnn",
        "cuDNN of the system is older than the one in the wheel",
        {"env": {"LD_LIBRARY_PATH": "/usr/lib/cudnn"}},
    ),
    Case(
        "nccl-library-mismatch",
        "ImportError",
        {"packages": {"nvidia-nccl-cu11": "2.14.3", "nvidia-nccl-cu12": "2.18.1"}},
    ),
    Case(
        "torch-torchvision-mismatch",
        "ops missing",
        {"torch_version": "2.2.0", "torchvision_version": "0.15.2"},
    ),
    Case(
        "torch-torchvision-mismatch",
        "RuntimeError: operator torchvision::nms does not exist after pip upgraded torch alone",
        {},
    ),
    Case("torch-torchvision-cuda-mismatch", "", {"torch_cuda": "11.6", "torchvision_cuda": "11.3"}),
    Case(
        "cpu-only-torch",
        "pip install torch",
        {
            "torch_version": "2.5.1",
            "torch_cuda": None,
            "cuda_available": False,
            "gpu_names": ["NVIDIA GeForce RTX 4070"],
            "os": "Windows 11",
        },
    ),
    Case(
        "cpu-only-torch",
        "Torch not compiled with CUDA enabled",
        {"torch_version": "1.7.1", "cuda_used_to_build": "None", "driver_version": "460.89"},
    ),
    Case("cuda-libs-not-installed", "ImportError: libcusparse.so.12: cannot open shared object file", {}),
    Case(
        "extension-abi-mismatch",
        "torch_cluster fails to import: undefined symbol _ZN3c10...",
        {"torch_version": "2.6.0+cu124"},
    ),
    Case(
        "extension-abi-mismatch",
        "amp_C cannot be imported after an update",
        {"apex": "0.1", "torch_version": "1.11.0"},
    ),
    Case(
        "duplicate-torch-install",
        "import picks the wrong one",
        {"torch_version": "1.13.0 in conda, 1.12.1 in ~/.local"},
    ),
    Case("numpy2-abi", "RuntimeError: Numpy is not available", {"numpy": "2.1.0", "torch_version": "1.13.1"}),
    Case(
        "mkl-symbol-removed",
        "undefined symbol at import in libtorch_cpu.so",
        {"mkl": "2024.1.0", "torch_version": "2.1.2", "install": "conda"},
    ),
    Case(
        "nccl-not-in-build",
        "launch of DistributedDataParallel example fails",
        {"os": "Windows 10", "torch_version": "1.12.1+cu116"},
    ),
    Case(
        "nvcc-torch-cuda-mismatch",
        "pip install flash-attn from source",
        {"nvcc": "12.3", "torch_version": "2.0.1+cu117"},
    ),
    Case(
        "libuv-missing-windows",
        "TCPStore: built without libuv",
        {"os": "Windows 11", "torch_version": "2.5.0+cu124"},
    ),
    Case("wsl-libcuda-not-on-path", "libcuda.so.1 not found", {"os": "WSL2 Ubuntu 20.04"}),
    Case("container-without-gpus", "NVIDIA driver was not detected message on start", {"platform": "docker"}),
    Case("container-toolkit-missing", "--gpus all gives an error from the daemon", {"platform": "docker"}),
    Case(
        "container-lost-gpu-cgroup",
        "Failed to initialize NVML: Unknown Error after some time",
        {"platform": "docker, cgroup v2"},
    ),
    Case("shm-too-small", "Bus error", {"platform": "docker", "shm_size": "64M"}),
    Case(
        "shm-too-small",
        "NCCL error unhandled system error",
        {"shm_size": "64M", "gpu_names": ["V100", "V100", "V100", "V100", "V100", "V100", "V100", "V100"]},
    ),
    Case("memlock-limit-too-low", "NCCL falls over", {"ulimit_memlock_kb": 64, "interconnect": "RoCE"}),
    Case("hostname-resolves-to-loopback", "", {"nnodes": 4, "host_addresses": ["127.0.1.1"]}),
    Case("exclusive-compute-mode", "", {"compute_mode": "Exclusive_Process"}),
    Case(
        "mig-single-device",
        "torchrun",
        {"gpu_names": ["NVIDIA A100 80GB PCIe MIG 2g.20gb", "NVIDIA A100 80GB PCIe MIG 2g.20gb"]},
    ),
    Case("bios-large-bar-off", "needs Above 4G decoding", {"gpu_names": ["Tesla M40"]}),
    Case("gpu-ecc-error", "CUDA error: uncorrectable ECC error encountered", {"gpu_names": ["A100"]}),
    Case(
        "p2p-blocked-by-acs-iommu",
        "all_reduce never returns",
        {"gpu_names": ["RTX 4090", "RTX 4090"], "platform": "EPYC, ACS enabled"},
    ),
    Case(
        "p2p-blocked-by-acs-iommu",
        "without the variable it is stuck at init",
        {
            "gpu_names": ["RTX 2080 Ti", "RTX 2080 Ti", "RTX 2080 Ti", "RTX 2080 Ti"],
            "env": {"NCCL_P2P_DISABLE": "1"},
        },
    ),
    Case(
        "jetson-wrong-wheel",
        "",
        {"gpu_names": ["Orin"], "torch_version": "2.3.0", "torch_cuda": "12.1", "cuda_available": False},
    ),
    Case(
        "cuda-visible-devices-set-too-late",
        "The script sets CUDA_VISIBLE_DEVICES after torch.cuda.is_available() was called; GPU 0 is used anyway",
        {},
    ),
)

HEALTHY = (
    Case(
        "",
        "Sample output of collect_env on a laptop without an NVIDIA GPU.",
        {
            "torch_version": "2.8.0.dev20250528+cpu",
            "torch_cuda": None,
            "cuda_available": False,
            "gpu_names": [],
            "python": "3.10.17",
            "os": "Microsoft Windows 11 Enterprise",
        },
    ),
    Case(
        "",
        "A distributed unit test fails with 'No backend type associated with device type cpu'.",
        {
            "torch_version": "2.8.0a0+34c6371d24.nv25.08",
            "torch_cuda": "13.0",
            "cuda_available": True,
            "driver_version": "565.57.01",
            "driver_cuda": "12.7",
            "gpu_names": [
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-SXM4-80GB",
            ],
            "compute_capability": "8.0",
            "python": "3.12.3",
            "os": "Ubuntu 24.04.2 LTS (x86_64)",
            "glibc": "2.39",
            "nvcc": "13.0.48",
        },
    ),
    Case(
        "",
        "torch.compile problem on a Mac.",
        {
            "torch_version": "2.0.0",
            "torch_cuda": None,
            "cuda_available": False,
            "python": "3.10.9",
            "os": "macOS 13.2.1 (arm64)",
        },
    ),
    Case(
        "",
        "DDP slower after an update from 1.0 to 1.1.",
        {
            "torch_version": "1.0.0",
            "torch_cuda": "10.0.130",
            "cuda_available": True,
            "gpu_names": [
                "Tesla V100-SXM2-32GB",
                "Tesla V100-SXM2-32GB",
                "Tesla V100-SXM2-32GB",
                "Tesla V100-SXM2-32GB",
                "Tesla V100-SXM2-32GB",
                "Tesla V100-SXM2-32GB",
                "Tesla V100-SXM2-32GB",
                "Tesla V100-SXM2-32GB",
            ],
            "compute_capability": "7.0",
            "python": "3.7",
            "os": "Ubuntu 18.04.1 LTS",
            "nvcc": "10.0.130",
        },
    ),
    Case(
        "",
        "DDP hangs when one rank skips a batch.",
        {
            "torch_version": "2.3.0+cu121",
            "torch_cuda": "12.1",
            "cuda_available": True,
            "driver_version": "535.104.05",
            "gpu_names": ["A100", "A100", "A100", "A100", "A100", "A100", "A100", "A100"],
        },
    ),
    Case(
        "", "MPS op not implemented", {"torch_version": "2.0.1", "torch_cuda": None, "os": "macOS 13 (arm64)"}
    ),
    Case(
        "",
        "FSDP checkpoint cannot be loaded: size mismatch",
        {
            "torch_version": "2.1.0+cu118",
            "cuda_available": True,
            "gpu_names": ["RTX 3090", "RTX 3090"],
            "driver_version": "525.60.11",
            "numpy": "1.24",
        },
    ),
    Case("", "DataLoader is slow", {"torch_version": "2.1.0+cpu", "os": "Ubuntu 22.04", "gpu_names": []}),
    Case(
        "",
        "loss is nan after 100 steps",
        {
            "torch_version": "2.4.0",
            "torch_cuda": "12.4",
            "cuda_available": True,
            "driver_version": "550.54.15",
            "nvcc": "11.8",
            "gpu_names": ["H100"],
        },
    ),
    Case(
        "",
        "DistributedDataParallel is slower than DataParallel",
        {"torch_version": "1.1.0", "torch_cuda": "9.0", "cuda_available": True, "gpu_names": ["Titan V"]},
    ),
    Case(
        "",
        "memory leak in a loop",
        {
            "torch_version": "2.2.0+rocm5.7",
            "rocm": "5.7",
            "cuda_available": True,
            "gpu_names": ["AMD Instinct MI250X"],
            "gpu_arch": "gfx90a",
        },
    ),
    Case(
        "",
        "NCCL all-reduce bandwidth is lower than expected over PCIe",
        {
            "torch_version": "2.6.0+cu124",
            "torch_cuda": "12.4",
            "cuda_available": True,
            "driver_version": "560.35.05",
            "gpu_names": ["NVIDIA L4", "NVIDIA L4", "NVIDIA L4", "NVIDIA L4"],
            "nccl": "2.21.5",
        },
    ),
    Case(
        "",
        "FSDP gives a wrong loss with mixed precision",
        {
            "torch_version": "2.0.1",
            "torch_cuda": "11.7",
            "cuda_available": True,
            "driver_version": "515.65.01",
            "gpu_names": ["NVIDIA A100 80GB PCIe"],
            "os": "Ubuntu 20.04",
            "nvcc": "11.7.99",
        },
    ),
    Case(
        "",
        "torch.jit.trace is slow on the CPU",
        {
            "torch_version": "1.13.1+cpu",
            "torch_cuda": None,
            "cuda_available": False,
            "os": "Ubuntu 22.04 (x86_64)",
        },
    ),
    Case(
        "",
        "Gloo process group hangs on exit",
        {"torch_version": "2.5.0", "torch_cuda": None, "os": "macOS 15.0 (arm64)", "numpy": "2.1.2"},
    ),
    Case(
        "",
        "DDP test fails with an assertion",
        {
            "torch_version": "2.6.0a0+ecf3bae40a.nv25.01",
            "torch_cuda": "12.8",
            "cuda_available": True,
            "driver_version": "535.183.06",
            "driver_cuda": "12.8",
            "gpu_names": [
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
                "NVIDIA H100 80GB HBM3",
            ],
            "torchvision_version": "0.20.0a0",
        },
    ),
    Case(
        "",
        "compile crash in inductor",
        {
            "torch_version": "2.1.0.dev20230701+cu121",
            "torch_cuda": "12.1",
            "cuda_available": True,
            "gpu_names": ["NVIDIA A10G"],
            "driver_version": "525.85.12",
            "torchvision_version": "0.16.0.dev20230701+cu121",
        },
    ),
    Case(
        "",
        "DataParallel uses unequal memory",
        {
            "torch_version": "1.5.0",
            "torch_cuda": "10.1",
            "cuda_available": True,
            "driver_version": "435.21",
            "gpu_names": ["GeForce GTX 1080"],
            "torchvision_version": "0.6.0",
        },
    ),
)

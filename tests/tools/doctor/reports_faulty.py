"""Reports of broken machines, each with the cause that a reader names. Written for these tests in the manner of

public issues: mixed tools, half a traceback, prose.
"""

from __future__ import annotations

from tests.tools.doctor.report_forms import (
    accelerate_env,
    collect_env,
    coloured,
    cut,
    ds_report,
    fenced,
    indented,
    no_colons,
    odd_colons,
    old_collect_env,
    quoted,
    smi,
    windows,
)

_DRIVER_WARNING = """/opt/conda/lib/python3.8/site-packages/torch/cuda/__init__.py:83: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx (Triggered internally at ../c10/cuda/CUDAFunctions.cpp:109.)
  return torch._C._cuda_getDeviceCount() > 0
"""
_V100 = ("Tesla V100-SXM2-32GB",) * 4
_A100 = ("NVIDIA A100-SXM4-80GB",) * 8

REPORTS: tuple[tuple[str, str], ...] = (
    # ------------------------------------------------------------------------------------------ drivers
    ("driver-too-old", old_collect_env("1.4.0", "10.1", "No", gpus=("Tesla K80",) * 2, driver="390.116")),
    (
        "driver-too-old",
        odd_colons(
            old_collect_env("1.5.0", "10.2", "No", gpus=("TITAN Xp",), driver="418.43", nvcc="10.1.105")
        ),
    ),
    (
        "driver-too-old",
        no_colons(cut(old_collect_env("1.6.0", "10.2", "No", gpus=_V100, driver="418.87.01"), 18)),
    ),
    (
        "driver-too-old",
        quoted(collect_env("1.12.1", "11.6", False, gpus=("NVIDIA RTX A5000",), driver="440.33.01")),
    ),
    (
        "driver-too-old",
        windows(
            collect_env(
                "2.1.0+cu121",
                "12.1",
                False,
                os="Microsoft Windows 10 Pro",
                gpus=("NVIDIA GeForce RTX 2070",),
                driver="472.12",
                platform="Windows-10-10.0.19045-SP0",
            )
        ),
    ),
    (
        "driver-too-old",
        fenced(
            collect_env("2.5.1+cu124", "12.4", False, gpus=_A100, driver="470.182.03"),
            "No GPU since we moved to a newer torch.",
        ),
    ),
    (
        "driver-too-old",
        _DRIVER_WARNING.format(9010) + cut(collect_env("1.12.1+cu102", "10.2", False), 12),
    ),
    (
        "driver-too-old",
        "After pip install -U torch on the cluster:\n\n"
        + _DRIVER_WARNING.format(11040)
        + "\n>>> torch.version.cuda\n'12.4'\n",
    ),
    (
        "driver-too-old",
        smi("450.80.02", "11.0", "Tesla T4", memory=15109)
        + "\n>>> torch.__version__\n'2.3.0+cu121'\n>>> torch.cuda.is_available()\nFalse\n",
    ),
    (
        "driver-too-old",
        "docker: Error response from daemon: OCI runtime create failed: nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.1, please update your driver to a newer version, or use an earlier cuda container: unknown.\n\ndocker run --gpus all nvidia/cuda:12.1.0-base-ubuntu22.04 nvidia-smi",
    ),
    (
        "driver-too-old",
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version\nCUDA kernel errors might be asynchronously reported at some other API call.\n\ntorch 2.4.0+cu121, driver 515.65.01",
    ),
    (
        "driver-too-old",
        "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.\n\n"
        + collect_env("2.3.1+cu121", "12.1", True, gpus=("NVIDIA A100-PCIE-40GB",), driver="525.60.13"),
    ),
    (
        "driver-too-old",
        accelerate_env("2.6.0+cu124", False) + "\n" + smi("510.108.03", "11.6", "NVIDIA A40", memory=46068),
    ),
    (
        "driver-too-old",
        collect_env("2.9.0+cu130", "13.0", False, gpus=("NVIDIA H100 80GB HBM3",) * 8, driver="550.127.05"),
    ),
    (
        "driver-too-old",
        indented(
            collect_env("2.9.1+cu130", "13.0", False, gpus=("NVIDIA GeForce RTX 4090",), driver="570.133.07")
        ),
    ),
    (
        "driver-too-old",
        collect_env("2.7.1+cu128", "12.8", False, gpus=("NVIDIA GeForce RTX 5080",), driver="550.144.03"),
    ),
    (
        "forward-compat-on-geforce",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 804: forward compatibility was attempted on non supported HW\n\nInside nvcr.io/nvidia/pytorch:23.10-py3, 2x RTX 3090, driver 525.147.05",
    ),
    (
        "forward-compat-on-geforce",
        collect_env(
            "2.1.0a0+32f93b1", "12.2", False, gpus=("NVIDIA GeForce RTX 3080 Ti",), driver="515.105.01"
        )
        + "\nError 804: forward compatibility was attempted on non supported HW (Triggered internally at ../c10/cuda/CUDAFunctions.cpp:108.)",
    ),
    (
        "forward-compat-on-geforce",
        "My image is FROM nvidia/cuda:12.4.1-runtime-ubuntu22.04 and the card a GeForce RTX 2080 Ti. LD_LIBRARY_PATH contains /usr/local/cuda/compat. Host driver 535.183.01. torch.cuda.is_available() is False in the container, outside it works; libcuda comes from the cuda-compat package.",
    ),
    (
        "driver-library-mismatch",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.107\n",
    ),
    (
        "driver-library-mismatch",
        "After apt upgrade:\n$ nvidia-smi\nFailed to initialize NVML: Driver/library version mismatch\n$ cat /proc/driver/nvidia/version\nNVRM version: NVIDIA UNIX x86_64 Kernel Module  535.154.05\n"
        + collect_env("2.2.0+cu121", "12.1", False),
    ),
    (
        "driver-library-mismatch",
        "UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination (Triggered internally at /opt/pytorch/pytorch/c10/cuda/CUDAFunctions.cpp:109.)\n  return torch._C._cuda_getDeviceCount() > 0\nFalse\n"
        + collect_env("2.4.1+cu121", "12.1", False, gpus=("NVIDIA RTX A6000",), driver="535.183.01"),
    ),
    (
        "driver-library-mismatch",
        "[  312.101] NVRM: API mismatch: the client has the version 470.199.02, but\nNVRM: this kernel module has the version 470.182.03.  Please\nNVRM: make sure that this kernel module and all NVIDIA driver\nNVRM: components have the same version.",
    ),
    (
        "driver-library-mismatch",
        "Unattended-upgrades updated the NVIDIA driver over night without a reboot, since then every job dies at the first .cuda() call and nvidia-smi does not run either.",
    ),
    (
        "kernel-module-not-loaded",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n\n"
        + collect_env("2.0.1+cu118", "11.8", False),
    ),
    (
        "kernel-module-not-loaded",
        "$ sudo modprobe nvidia\nmodprobe: FATAL: Module nvidia not found in directory /lib/modules/6.5.0-28-generic\nThe card is an RTX 3060 and worked until yesterday's kernel.",
    ),
    (
        "kernel-module-not-loaded",
        "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service\n\nDell laptop, Ubuntu 24.04, GTX 1650, UEFI",
    ),
    (
        "kernel-module-not-loaded",
        "After a kernel upgrade to 6.8 `nvidia-smi` has failed because it couldn't communicate with the NVIDIA driver; dkms status shows nothing built for it.",
    ),
    (
        "kernel-module-not-loaded",
        "lspci -k lists for my GTX 1080: Kernel driver in use: nouveau. torch 2.2.1+cu121 says\nRuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
    ),
    (
        "kernel-module-not-loaded",
        "The driver is installed (550) but with Secure Boot enabled in the firmware the module won't load. torch.cuda.is_available() returns False on my RTX 4070.",
    ),
    (
        "fabricmanager-not-running",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized\n\n"
        + smi("535.104.12", "12.2", *(("NVIDIA H100 80G...",) * 8), memory=81559),
    ),
    (
        "fabricmanager-not-running",
        collect_env("2.1.2+cu121", "12.1", False, gpus=_A100, driver="535.54.03")
        + "\nnvidia-fabricmanager.service: Failed with result 'exit-code'. fabric manager NVIDIA GPU driver interface version 535.54.03 don't match with driver version 535.104.05",
    ),
    (
        "fabricmanager-not-running",
        "DGX A100, fresh install. nvidia-smi fine, all eight GPUs listed, but torch gives CUDA error: system not yet initialized (error 802).",
    ),
    (
        "fabricmanager-not-running",
        collect_env("2.5.1+cu124", "12.4", False, gpus=("NVIDIA H200",) * 8, driver="550.90.07"),
    ),
    (
        "fabricmanager-not-running",
        "nvidia-smi -q -i 0 | grep -A2 Fabric\n    Fabric\n        State                             : In Progress\n        Status                            : N/A\nOn an HGX H100 node no process can start CUDA.",
    ),
    (
        "wsl-libcuda-not-on-path",
        collect_env(
            "1.10.0+cu111",
            "11.1",
            False,
            platform="Linux-5.10.102.1-microsoft-standard-WSL2-x86_64-with-glibc2.31",
        )
        + "\nIn WSL torch.cuda.is_available() returns False; ls /usr/lib/wsl/lib shows libcuda.so.1 but ldconfig -p does not.",
    ),
    (
        "wsl-libcuda-not-on-path",
        "OSError: libcuda.so.1: cannot open shared object file: No such file or directory\n\nUbuntu 22.04 in WSL2 on Windows 11. nvidia-smi.exe works in PowerShell.",
    ),
    (
        "wsl-libcuda-not-on-path",
        "RuntimeError: Found no NVIDIA driver on your system.\nuname -r: 5.15.153.1-microsoft-standard-WSL2\nThe GPU works in Windows.",
    ),
    # --------------------------------------------------------------------------------------- containers
    (
        "container-toolkit-missing",
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].\n',
    ),
    (
        "container-toolkit-missing",
        "docker: Error response from daemon: Unknown runtime specified nvidia.\nSee 'docker run --help'.",
    ),
    (
        "container-toolkit-missing",
        "docker compose up fails with: Error response from daemon: unknown or invalid runtime name: nvidia. GPU: RTX 3090, driver 535.129.03, nvidia-smi on the host is fine.",
    ),
    (
        "container-toolkit-missing",
        'exec: "nvidia-container-runtime-hook": executable file not found in $PATH: unknown\nnvidia-container-cli: command not found',
    ),
    (
        "container-lost-gpu-cgroup",
        "Failed to initialize NVML: Unknown Error\n\nin a container that had been running for two days. Restarting it helps.",
    ),
    (
        "container-lost-gpu-cgroup",
        "Training in docker runs for hours, then after a `systemctl daemon-reload` on the host every new process says RuntimeError: No CUDA GPUs are available. Docker uses the systemd cgroup driver with cgroup v2.",
    ),
    (
        "container-lost-gpu-cgroup",
        "Our Kubernetes pod loses its GPU after some time: nvidia-smi in the pod answers `Failed to initialize NVML: Unknown Error` while the node is healthy.",
    ),
    (
        "container-without-gpus",
        "==========\n== PyTorch ==\n==========\n\nWARNING: The NVIDIA Driver was not detected.  GPU functionality will not be available.\n   Use the NVIDIA Container Toolkit to start this container with GPU support; see\n   https://docs.nvidia.com/datacenter/cloud-native/ .\n",
    ),
    (
        "container-without-gpus",
        "I started it with `docker run -it pytorch/pytorch:2.1.0-cuda12.1-cudnn8-runtime bash`.\n>>> torch.cuda.is_available()\nFalse\nbash: nvidia-smi: command not found",
    ),
    (
        "container-without-gpus",
        collect_env("2.2.0", "12.1", False)
        + "\nThis is inside docker, compose file without any gpu section. RuntimeError: Found no NVIDIA driver on your system.",
    ),
    # ----------------------------------------------------------------------------------- architectures
    (
        "arch-not-in-build",
        "NVIDIA GeForce RTX 3090 with CUDA capability sm_86 is not compatible with the current PyTorch installation.\nThe current PyTorch install supports CUDA capabilities sm_37 sm_50 sm_60 sm_70.\nIf you want to use the NVIDIA GeForce RTX 3090 GPU with PyTorch, please check the instructions at https://pytorch.org/get-started/locally/\n"
        + cut(
            collect_env("1.8.1+cu102", "10.2", True, gpus=("NVIDIA GeForce RTX 3090",), driver="460.32.03"),
            20,
        ),
    ),
    (
        "arch-not-in-build",
        collect_env("1.7.1+cu101", "10.1", True, gpus=("GeForce RTX 3080",), driver="455.45.01"),
    ),
    (
        "arch-not-in-build",
        collect_env("1.12.1+cu102", "10.2", True, gpus=("NVIDIA A100-PCIE-40GB",), driver="470.57.02")
        + "\nRuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    (
        "arch-not-in-build",
        fenced(
            collect_env(
                "2.6.0+cu124",
                "12.4",
                True,
                gpus=("NVIDIA GeForce RTX 5070 Ti",),
                driver="572.47",
                os="Microsoft Windows 11 Home",
                platform="Windows-11-10.0.26100-SP0",
            ),
            "RuntimeError: CUDA error: no kernel image is available",
        ),
    ),
    (
        "arch-not-in-build",
        coloured(
            collect_env(
                "2.5.1+cu121",
                "12.1",
                True,
                gpus=("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
                driver="575.57.08",
            )
        ),
    ),
    (
        "arch-not-in-build",
        collect_env("2.4.0+cu121", "12.1", True, gpus=("NVIDIA B200",) * 8, driver="570.86.15"),
    ),
    (
        "arch-not-in-build",
        "UserWarning:\nNVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.\nThe current PyTorch install supports CUDA capabilities sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90.",
    ),
    (
        "arch-not-in-build",
        "Traceback (most recent call last):\nRuntimeError: CUDA error: no kernel image is available for execution on the device\n>>> torch.__version__\n'1.12.0+cu113'\n>>> torch.cuda.get_device_name(0)\n'NVIDIA H100 PCIe'\n",
    ),
    (
        "arch-not-in-build",
        accelerate_env("2.5.1+cu124", True, "NVIDIA GeForce RTX 5090")
        + "\nRuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    (
        "arch-not-in-build",
        "ptxas fatal   : Value 'sm_120' is not defined for option 'gpu-name'\ntriton 2.3.1, torch 2.3.1+cu121, RTX 5080",
    ),
    (
        "gpu-too-old-for-build",
        "/usr/lib/python3/site-packages/torch/cuda/__init__.py:132: UserWarning:\n    Found GPU0 Tesla K40c which is of cuda capability 3.5.\n    PyTorch no longer supports this GPU because it is too old.\n    The minimum cuda capability supported by this library is 3.7.\n",
    ),
    (
        "gpu-too-old-for-build",
        old_collect_env("1.3.1", "10.1.243", "Yes", gpus=("Tesla K40m",), driver="430.26")
        + "\nRuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    (
        "gpu-too-old-for-build",
        collect_env(
            "2.8.0+cu128", "12.8", True, gpus=("NVIDIA GeForce GTX 1080 Ti",) * 2, driver="570.153.02"
        ),
    ),
    (
        "gpu-too-old-for-build",
        collect_env("2.9.1+cu130", "13.0", True, gpus=("Tesla V100-SXM2-16GB",) * 8, driver="580.95.05"),
    ),
    (
        "gpu-too-old-for-build",
        collect_env("2.7.0+cu128", "12.8", True, gpus=("Tesla P100-PCIE-16GB",), driver="570.124.06"),
    ),
    (
        "gpu-too-old-for-build",
        "Tesla P40 with torch 2.9.0+cu128: RuntimeError: CUDA error: no kernel image is available for execution on the device. torch.cuda.get_arch_list() gives ['sm_70', 'sm_75', 'sm_80', 'sm_86', 'sm_90', 'sm_100', 'sm_120']",
    ),
    (
        "rocm-arch-not-in-build",
        collect_env("2.4.1+rocm6.1", "N/A", True, rocm="6.1.40091-a8dbc0c19", gpus=())
        + "\nRuntimeError: HIP error: invalid device function\nThe GPU is an RX 6700 XT, gfx1031.",
    ),
    (
        "rocm-arch-not-in-build",
        '"hipErrorNoBinaryForGpu: Unable to find code object for all current devices!"\nAborted (core dumped)\nRadeon RX 580, torch 1.12 rocm5.1',
    ),
    (
        "rocm-arch-not-in-build",
        "rocBLAS error: Cannot read /opt/rocm/lib/rocblas/library/TensileLibrary.dat: Illegal seek for GPU arch : gfx1103",
    ),
    (
        "rocm-arch-not-in-build",
        "Strix Halo (gfx1151), torch 2.9.0+rocm6.4: HIP error: invalid device function. Setting HSA_OVERRIDE_GFX_VERSION=11.0.0 makes it run.",
    ),
    (
        "jetson-wrong-wheel",
        collect_env(
            "2.3.0",
            "None",
            False,
            os="Ubuntu 22.04.4 LTS (aarch64)",
            platform="Linux-5.15.136-tegra-aarch64-with-glibc2.35",
            gpus=("Orin (nvgpu)",),
            driver="N/A",
            nvcc="12.2.140",
        ),
    ),
    (
        "jetson-wrong-wheel",
        "Jetson AGX Orin, JetPack 6.0 (L4T R36.3). `pip install torch torchvision` gives 2.4.0+cpu? torch.cuda.is_available() is False.",
    ),
    (
        "jetson-wrong-wheel",
        "On a Jetson Xavier NX with JetPack 5.1.2 I ran pip3 install torch, got 2.1.0 and AssertionError: Torch not compiled with CUDA enabled",
    ),
    # ----------------------------------------------------------------------------------- torch itself
    (
        "cpu-only-torch",
        "AssertionError: Torch not compiled with CUDA enabled\n\nRTX 3060, Windows 11, pip install torch",
    ),
    (
        "cpu-only-torch",
        windows(
            collect_env(
                "2.3.1+cpu",
                "Could not collect",
                False,
                os="Microsoft Windows 11 Pro",
                gpus=("NVIDIA GeForce RTX 4060 Laptop GPU",),
                driver="555.99",
                platform="Windows-11-10.0.22631-SP0",
            )
        ),
    ),
    ("cpu-only-torch", old_collect_env("1.4.0", "None", "No", gpus=("GeForce GTX 1080",), driver="435.21")),
    (
        "cpu-only-torch",
        quoted(
            collect_env(
                "2.1.2",
                "Could not collect",
                False,
                gpus=("NVIDIA A10G",),
                driver="535.104.12",
                packages=("numpy==1.26.4",),
            )
        ),
    ),
    (
        "cpu-only-torch",
        accelerate_env("2.5.1", False)
        + smi("550.54.15", "12.4", "NVIDIA L4", memory=23034)
        + "\n>>> print(torch.version.cuda)\nNone\n",
    ),
    (
        "cpu-only-torch",
        "conda list | grep torch\npytorch                   2.0.1           cpu_py310hab5cca8_0    conda-forge\ntorchvision               0.15.2          cpu_py310h83e0c9b_0    conda-forge\n\n"
        + smi("525.85.12", "12.0", "NVIDIA RTX A4000", memory=16376),
    ),
    (
        "cpu-only-torch",
        "$ python -c 'import torch; print(torch.__version__, torch.version.cuda)'\n2.8.0+cpu None\n$ nvidia-smi -L\nGPU 0: NVIDIA L40S (UUID: GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee)\n",
    ),
    (
        "cuda-libs-not-installed",
        '  File ".../torch/__init__.py", line 367, in <module>\n    from torch._C import *\nImportError: libcudnn.so.9: cannot open shared object file: No such file or directory\n\npip install --no-deps torch==2.5.1',
    ),
    (
        "cuda-libs-not-installed",
        "OSError: libcublas.so.11: cannot open shared object file: No such file or directory\n\ntorch 1.13.1 (CUDA 11.7) out of a poetry lock file; nvidia-cublas-cu11 is not installed",
    ),
    (
        "cuda-libs-not-installed",
        "ValueError: libcublas.so.*[0-9] not found in the system path ['/app', '/usr/lib/python311.zip']\n",
    ),
    (
        "cuda-libs-not-installed",
        "ImportError: libcupti.so.12: cannot open shared object file: No such file or directory\nI copied site-packages/torch into the image to save space.",
    ),
    (
        "duplicate-torch-install",
        collect_env(
            "1.9.0",
            "11.1",
            True,
            gpus=("Tesla V100-PCIE-32GB",),
            driver="470.57.02",
            packages=("numpy==1.21.2",),
        ).replace(
            "[conda] Could not collect",
            "[conda] pytorch                   1.7.1           py3.8_cuda11.0.221_cudnn8.0.5_0    pytorch",
        )
        + "\nImportError: undefined symbol in libtorch_python.so, I think two versions of torch are installed.",
    ),
    (
        "duplicate-torch-install",
        "import torch fails: /home/me/.local/lib/python3.9/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: _ZN5torch3jit17parseSchemaOrNameERKSs\nThe conda environment has its own torch 2.0, but ~/.local has torch 1.13 as well.",
    ),
    (
        "duplicate-torch-install",
        "pip list shows torch 2.1.0, conda list shows pytorch 2.0.1, both pip and conda installed torch in the same environment and import breaks.",
    ),
    (
        "numpy2-abi",
        "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.0.1 as it may crash. To support both 1.x and 2.x\nversions of NumPy, modules must be compiled with NumPy 2.0.\n",
    ),
    (
        "numpy2-abi",
        "RuntimeError: Numpy is not available\n\n"
        + collect_env(
            "2.1.0+cu118",
            "11.8",
            True,
            gpus=("NVIDIA GeForce RTX 3070",),
            driver="531.41",
            packages=("numpy==2.1.1",),
        ),
    ),
    (
        "numpy2-abi",
        "UserWarning: Failed to initialize NumPy: _ARRAY_API not found (Triggered internally at ../torch/csrc/utils/tensor_numpy.cpp:84.)",
    ),
    (
        "numpy2-abi",
        collect_env(
            "2.2.2",
            "None",
            False,
            os="macOS 14.5 (x86_64)",
            platform="macOS-14.5-x86_64-i386-64bit",
            packages=("numpy==2.0.0",),
        ),
    ),
    (
        "mkl-symbol-removed",
        "ImportError: /opt/conda/lib/python3.10/site-packages/torch/lib/libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent",
    ),
    (
        "mkl-symbol-removed",
        "conda install pytorch==1.13.1 gives an environment in which import torch dies: libtorch_cpu.so: undefined symbol: iJIT_IsProfilingActive\nmkl                       2024.1.0           ha957f24_691    conda-forge\n",
    ),
    (
        "libstdcxx-too-old",
        "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by /opt/conda/lib/python3.9/site-packages/matplotlib/_c.so)",
    ),
    (
        "libstdcxx-too-old",
        "ImportError: /usr/lib64/libstdc++.so.6: version `CXXABI_1.3.9' not found (required by .../torch/lib/libtorch_python.so)\nCentOS Linux release 7.9",
    ),
    (
        "libstdcxx-too-old",
        "OSError: /apps/gcc/4.8.5/lib64/libstdc++.so.6: version `GLIBCXX_3.4.20' not found (required by libc10.so); the module system puts an old gcc first",
    ),
    # ---------------------------------------------------------------------------------- companions
    (
        "torch-torchvision-mismatch",
        "RuntimeError: operator torchvision::nms does not exist\n\ntorch==2.5.1\ntorchvision==0.19.1\n",
    ),
    (
        "torch-torchvision-mismatch",
        collect_env(
            "2.0.0+cu117",
            "11.7",
            True,
            gpus=("NVIDIA GeForce RTX 3090",),
            driver="525.60.11",
            packages=("torchvision==0.14.1",),
        ),
    ),
    (
        "torch-torchvision-mismatch",
        old_collect_env(
            "1.5.0",
            "10.2",
            "Yes",
            gpus=("TITAN RTX",),
            driver="440.33.01",
            extra=("[pip3] numpy==1.18.1", "[pip3] torch==1.5.0", "[pip3] torchvision==0.5.0"),
        ),
    ),
    (
        "torch-torchvision-mismatch",
        "AttributeError: partially initialized module 'torchvision' has no attribute 'extension' (most likely due to a circular import)\ntorch 2.4.0, torchvision 0.18.0",
    ),
    (
        "torch-torchvision-mismatch",
        "UserWarning: Failed to load image Python extension: '/opt/venv/lib/python3.10/site-packages/torchvision/image.so: undefined symbol: _ZN3c1017RegisterOperatorsD1Ev' If you don't plan on using image functionality",
    ),
    (
        "torch-torchvision-mismatch",
        "RuntimeError: Couldn't load custom C++ ops. This can happen if your PyTorch and torchvision versions are incompatible, or if you had errors while compiling torchvision from source.\n",
    ),
    (
        "torch-torchvision-cuda-mismatch",
        "RuntimeError: Detected that PyTorch and torchvision were compiled with different CUDA versions. PyTorch has CUDA Version=11.7 and torchvision has CUDA Version=11.8. Please reinstall the torchvision that matches your PyTorch install.",
    ),
    (
        "torch-torchvision-cuda-mismatch",
        collect_env(
            "2.1.0+cu121",
            "12.1",
            True,
            gpus=("NVIDIA A10",),
            driver="535.104.05",
            packages=("torchvision==0.16.0+cu118",),
        ),
    ),
    (
        "torch-torchvision-cuda-mismatch",
        "OSError: libcudart.so.11.0: cannot open shared object file: No such file or directory\n\nfrom torchaudio import _extension\ntorch 2.1.2+cu121",
    ),
    (
        "torchvision-cpu-build",
        "NotImplementedError: Could not run 'torchvision::nms' with arguments from the 'CUDA' backend. This could be because the operator doesn't exist for this backend",
    ),
    (
        "torchvision-cpu-build",
        collect_env(
            "2.2.1+cu121",
            "12.1",
            True,
            os="Microsoft Windows 10",
            gpus=("NVIDIA GeForce RTX 3060",),
            driver="551.23",
            packages=("torchvision==0.17.1+cpu",),
        ),
    ),
    (
        "extension-abi-mismatch",
        "ImportError: /opt/venv/lib/python3.10/site-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
    ),
    (
        "extension-abi-mismatch",
        "WARNING[XFORMERS]: xFormers can't load C++/CUDA extensions. xFormers was built for:\n    PyTorch 2.1.0+cu121 with CUDA 1201 (you have 2.2.0+cu121)\n",
    ),
    (
        "extension-abi-mismatch",
        "ImportError: mmcv/_ext.cpython-38-x86_64-linux-gnu.so: undefined symbol: _ZNK2at6Tensor7reshapeEN3c108ArrayRefIlEE\n"
        + cut(collect_env("1.11.0", "11.3", True, gpus=("NVIDIA A30",), driver="510.47.03"), 14),
    ),
    (
        "extension-abi-mismatch",
        "apex: import amp_C fails, ImportError: amp_C.cpython-39-x86_64-linux-gnu.so: undefined symbol: _ZNK3c1011StorageImpl27throw_data_ptr_access_errorEv. I upgraded torch from 2.0 to 2.2.",
    ),
    (
        "extension-abi-mismatch",
        "OSError: .../torch_scatter/_version_cuda.so: undefined symbol: _ZN5torch3jit17parseSchemaOrNameERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    ),
    # -------------------------------------------------------------------------------- libraries
    (
        "ld-library-path-shadows-cudnn",
        "RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (8, 9, 2) but found runtime version (8, 5, 0). PyTorch already comes bundled with cuDNN. Looks like your LD_LIBRARY_PATH contains incompatible version of cudnn",
    ),
    (
        "ld-library-path-shadows-cudnn",
        "RuntimeError: cuDNN error: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH\nexport LD_LIBRARY_PATH=/usr/local/cudnn-8.6/lib64:$LD_LIBRARY_PATH\ntorch 2.4.0+cu121",
    ),
    (
        "ld-library-path-shadows-cudnn",
        "Could not load library libcudnn_cnn_train.so.8. Error: /usr/local/cuda/lib64/libcudnn_cnn_train.so.8: undefined symbol: _ZN5cudnn3cnn34layerNormFwd_execute_internal_impl, version libcudnn_cnn_infer.so.8\nLD_LIBRARY_PATH=/usr/local/cuda/lib64",
    ),
    (
        "ld-library-path-shadows-cuda",
        "ImportError: .../torch/lib/../../nvidia/cusparse/lib/libcusparse.so.12: undefined symbol: __nvJitLinkAddData_12_1, version libnvJitLink.so.12",
    ),
    (
        "ld-library-path-shadows-cuda",
        "OSError: .../nvidia/cublas/lib/libcublas.so.11: undefined symbol: cublasLtHSHMatmulAlgoInit, version libcublasLt.so.11\n\necho $LD_LIBRARY_PATH: /usr/local/cuda-11.2/lib64",
    ),
    (
        "ld-library-path-shadows-cuda",
        "import torch fails with an ImportError about libcusolver; when I unset LD_LIBRARY_PATH (it has /usr/local/cuda-11.4/lib64) everything works.\ntorch==2.2.0",
    ),
    (
        "nccl-library-mismatch",
        "ImportError: .../torch/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister",
    ),
    (
        "nccl-library-mismatch",
        "pip list:\ntorch                    2.3.0\nnvidia-nccl-cu11         2.14.3\nnvidia-nccl-cu12         2.20.5\n\nImportError: libtorch_cuda.so: undefined symbol: ncclGroupSimulateEnd",
    ),
    (
        "nccl-library-mismatch",
        "LD_PRELOAD=/usr/lib/libnccl.so.2.8.4 was in my job script. torch.distributed fails with ImportError: undefined symbol: ncclRedOpCreatePreMulSum",
    ),
    (
        "nccl-not-in-build",
        "RuntimeError: Distributed package doesn't have NCCL built in\nWindows 10, torch 2.0.1+cu118, torchrun --nproc_per_node=2",
    ),
    (
        "nccl-not-in-build",
        "I want to use DDP on Windows 11 with two RTX 3090 (torch 2.1.0+cu121). init_process_group(backend='nccl') raises an error.",
    ),
    (
        "nccl-not-in-build",
        "RuntimeError: Distributed package doesn't have NCCL built in. MacBook Pro M2, macOS 13.4 (arm64), torch 2.0.1",
    ),
    (
        "libuv-missing-windows",
        "torch.distributed.DistStoreError: use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it.\nWindows 11, torch 2.4.1+cu124",
    ),
    (
        "libuv-missing-windows",
        "RuntimeError: use_libuv was requested but PyTorch was build without libuv support\nWindows, torchrun --standalone --nproc_per_node=1 train.py",
    ),
    (
        "nvcc-torch-cuda-mismatch",
        "RuntimeError:\nThe detected CUDA version (12.3) mismatches the version that was used to compile\nPyTorch (11.8). Please make sure to use the same CUDA versions.\n",
    ),
    (
        "nvcc-torch-cuda-mismatch",
        "Exception: >- DeepSpeed Op Builder: Installed CUDA version 12.4 does not match the version torch was compiled with 11.8, unable to compile cuda/cpp extensions without a matching cuda version.",
    ),
    ("nvcc-torch-cuda-mismatch", ds_report("2.1.2+cu118", "11.8", "12.2")),
    (
        "nvcc-torch-cuda-mismatch",
        collect_env(
            "1.13.1+cu117",
            "11.7",
            True,
            gpus=("NVIDIA GeForce RTX 3080",),
            driver="525.105.17",
            nvcc="10.1.243",
        )
        + "\npython setup.py build_ext of a CUDA extension is refused.",
    ),
    # ------------------------------------------------------------------------------------- GPUs
    (
        "exclusive-compute-mode",
        "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable\n"
        + smi(
            "470.82.01", "11.4", "Tesla V100-SXM2...", "Tesla V100-SXM2...", mode="E. Process", memory=32510
        ),
    ),
    (
        "exclusive-compute-mode",
        "Our cluster sets GPUs to Exclusive_Process. With DDP the second rank dies: CUDA error: all CUDA-capable devices are busy or unavailable.",
    ),
    (
        "mig-single-device",
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11111111-2222-3333-4444-555555555555)\n  MIG 3g.20gb     Device  0: (UUID: MIG-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee)\n  MIG 3g.20gb     Device  1: (UUID: MIG-bbbbbbbb-bbbb-cccc-dddd-eeeeeeeeeeee)\n\ntorch.cuda.device_count() is 1 and DDP with two ranks fails",
    ),
    (
        "mig-single-device",
        "We were given two MIG instances of an H100 by Slurm, torchrun --nproc_per_node=2 fails with invalid device ordinal since only one MIG device is visible.",
    ),
    (
        "bios-large-bar-off",
        "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:\nNVRM: BAR1 is 0M @ 0x0 (PCI:0000:0a:00.0)\nnvidia: probe of 0000:0a:00.0 failed with error -1",
    ),
    (
        "bios-large-bar-off",
        "Tesla P40 in a desktop board: nvidia-smi says No devices were found until I turned on Above 4G Decoding in the BIOS.",
    ),
    (
        "bios-large-bar-off",
        "[   12.3] NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x24:0x72:1460)\n[   12.3] NVRM: GPU 0000:01:00.0: rm_init_adapter failed, device minor number 0\nnvidia-smi: No devices were found",
    ),
    (
        "gpu-ecc-error",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
        + cut(collect_env("2.3.0+cu121", "12.1", True, gpus=_A100, driver="535.161.08"), 30),
    ),
    (
        "gpu-ecc-error",
        "[1234.5] NVRM: Xid (PCI:0000:3b:00): 48, pid=4321, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 6, subpartition 0.",
    ),
    (
        "gpu-ecc-error",
        "kernel: NVRM: Xid (PCI:0000:c1:00): 95, pid='<unknown>', name=<unknown>, Uncontained: LTC TAG error\njob killed on node 17",
    ),
    (
        "gpu-lost",
        "Unable to determine the device handle for GPU 0000:61:00.0: GPU is lost.  Reboot the system to recover this GPU",
    ),
    ("gpu-lost", "NVRM: Xid (PCI:0000:1b:00): 79, pid=1923, GPU has fallen off the bus."),
    (
        "p2p-blocked-by-acs-iommu",
        "Two RTX 4090 on a Threadripper board, dist.all_reduce hangs forever with GPU usage at 100 %. With NCCL_P2P_DISABLE=1 it works.",
    ),
    (
        "p2p-blocked-by-acs-iommu",
        collect_env("2.1.0+cu121", "12.1", True, gpus=("NVIDIA RTX A6000",) * 4, driver="535.129.03")
        + "\nDDP gets stuck at the first backward. lspci -vvv | grep ACSCtl shows SrcValid+ ReqRedir+ CmpltRedir+; amd_iommu=on is in the kernel line.",
    ),
    (
        "p2p-blocked-by-acs-iommu",
        "DataParallel over 2 GPUs returns garbage / freezes; simpleP2P sample fails verification. Booting with iommu=off cures it.",
    ),
    (
        "p2p-blocked-by-acs-iommu",
        "dmesg: AMD-Vi: Event logged [IO_PAGE_FAULT device=21:00.0 domain=0x001c address=0xd0139068 flags=0x0020]\nnccl-tests hang with 4 GPUs, fine with 1",
    ),
    # ---------------------------------------------------------------------------------- limits
    (
        "shm-too-small",
        "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
    ),
    (
        "shm-too-small",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\ndocker run --gpus all -it my/image",
    ),
    (
        "shm-too-small",
        "include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-9b (size 9637888)\nNCCL WARN Call to posix_fallocate failed : No space left on device",
    ),
    (
        "shm-too-small",
        "Filesystem      Size  Used Avail Use% Mounted on\noverlay         1.8T  900G  810G  53% /\nshm              64M   61M  3.0M  96% /dev/shm\n\nworkers die in the pod",
    ),
    (
        "memlock-limit-too-low",
        "NCCL WARN Call to ibv_reg_mr failed\nibv_create_cq: Cannot allocate memory\nulimit -l gives 64",
    ),
    (
        "memlock-limit-too-low",
        "max locked memory           (kbytes, -l) 64\nopen files                          (-n) 65536\n\nRDMA over mlx5_0 InfiniBand does not work in this container, NCCL: Call to ibv_create_qp failed",
    ),
    (
        "hostname-resolves-to-loopback",
        "[E ProcessGroupGloo.cpp:138] Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] timed out connecting: Connection refused, remote=[127.0.1.1]:41327\ntorchrun --nnodes 2",
    ),
    (
        "hostname-resolves-to-loopback",
        "Warning: Unable to resolve hostname to a (local) address. Using the loopback address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME.\ntwo nodes, gloo",
    ),
    (
        "hostname-resolves-to-loopback",
        "With two machines the second cannot connect. /etc/hosts of the first says `127.0.1.1 trainbox`, so its own name resolves to loopback.",
    ),
    # -------------------------------------------------------------------------------- variables
    (
        "cuda-visible-devices-invalid",
        "CUDA_VISIBLE_DEVICES=4,5 in the script, but the machine has only 2 GPUs: RuntimeError: No CUDA GPUs are available\n"
        + smi("535.104.05", "12.2", "NVIDIA A30", "NVIDIA A30"),
    ),
    (
        "cuda-visible-devices-invalid",
        collect_env("2.2.0+cu121", "12.1", False, gpus=("NVIDIA L40S",) * 4, driver="550.54.15")
        + "\nCUDA_VISIBLE_DEVICES=7\n",
    ),
    (
        "cuda-visible-devices-invalid",
        collect_env("2.3.0+cu121", "12.1", False, gpus=("Tesla T4",), driver="525.105.17")
        + "\n$ env | grep CUDA\nCUDA_VISIBLE_DEVICES=\n",
    ),
    (
        "cuda-visible-devices-set-too-late",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '2' in my code has no effect, it always uses the first GPU. On the command line CUDA_VISIBLE_DEVICES=2 python train.py works.",
    ),
    (
        "cuda-visible-devices-set-too-late",
        "CUDA_VISIBLE_DEVICES is ignored when it is set after import torch: all four GPUs are still used.",
    ),
    (
        "cuda-visible-devices-set-too-late",
        'After `import monai` setting os.environ["CUDA_VISIBLE_DEVICES"]="1" does nothing, device_count still says 8.',
    ),
)

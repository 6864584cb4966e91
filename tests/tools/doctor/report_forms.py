"""The forms in which people paste their machine: collect_env old and new, accelerate env, ds_report, nvidia-smi."""

from __future__ import annotations

from collections.abc import Sequence


def collect_env(
    torch: str,
    cuda: str = "None",
    available: object = False,
    *,
    os: str = "Ubuntu 22.04.4 LTS (x86_64)",
    gpus: Sequence[str] = (),
    driver: str = "Could not collect",
    nvcc: str = "Could not collect",
    python: str = "3.10.12 (main, Nov 20 2023, 15:14:05) [GCC 11.4.0] (64-bit runtime)",
    platform: str = "Linux-5.15.0-105-generic-x86_64-with-glibc2.35",
    rocm: str = "N/A",
    packages: Sequence[str] = (),
) -> str:
    """The form since torch 1.7."""
    listed = "\n".join(f"GPU {index}: {name}" for index, name in enumerate(gpus)) or "Could not collect"
    pip = "\n".join(f"[pip3] {name}" for name in (*packages, f"torch=={torch}"))
    return f"""Collecting environment information...
PyTorch version: {torch}
Is debug build: False
CUDA used to build PyTorch: {cuda}
ROCM used to build PyTorch: {rocm}

OS: {os}
GCC version: (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0
Clang version: Could not collect
CMake version: version 3.22.1
Libc version: glibc-2.35

Python version: {python}
Python platform: {platform}
Is CUDA available: {available}
CUDA runtime version: {nvcc}
CUDA_MODULE_LOADING set to: {"LAZY" if available is True else "N/A"}
GPU models and configuration: {listed}
Nvidia driver version: {driver}
cuDNN version: Could not collect
HIP runtime version: N/A
MIOpen runtime version: N/A
Is XNNPACK available: True

CPU:
Architecture:                       x86_64
CPU(s):                             64
Vendor ID:                          AuthenticAMD

Versions of relevant libraries:
{pip}
[conda] Could not collect
"""


def old_collect_env(
    torch: str,
    cuda: str,
    available: str,
    *,
    os: str = "Ubuntu 16.04.5 LTS",
    gpus: Sequence[str] = (),
    driver: str = "Could not collect",
    nvcc: str = "Could not collect",
    extra: Sequence[str] = ("[pip] numpy (1.15.4)",),
) -> str:
    """The form of torch 1.0 to 1.6: yes and no, no ROCm."""
    listed = (
        "\n" + "\n".join(f"GPU {index}: {name}" for index, name in enumerate(gpus))
        if gpus
        else "Could not collect"
    )
    lines = "\n".join(extra)
    return f"""PyTorch version: {torch}
Is debug build: No
CUDA used to build PyTorch: {cuda}

OS: {os}
GCC version: (Ubuntu 5.4.0-6ubuntu1~16.04.10) 5.4.0 20160609
CMake version: version 3.12.2

Python version: 3.6
Is CUDA available: {available}
CUDA runtime version: {nvcc}
GPU models and configuration: {listed}
Nvidia driver version: {driver}
cuDNN version: Could not collect

Versions of relevant libraries:
{lines}
"""


def smi(
    driver: str,
    cuda: str,
    *names: str,
    mode: str = "Default",
    mig: str = "N/A",
    ecc: str = "0",
    memory: int = 24576,
) -> str:
    """nvidia-smi's table."""
    rows = "".join(
        f"""|   {index}  {name:<28}On  | 00000000:{index + 1:02X}:00.0 Off | {ecc:>20} |
| N/A   34C    P0    62W / 400W |   1024MiB / {memory}MiB |      0%   {mode:>10} |
|                               |                      | {mig:>20} |
+-------------------------------+----------------------+----------------------+
"""
        for index, name in enumerate(names)
    )
    return f"""+-----------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<12} Driver Version: {driver:<12} CUDA Version: {cuda:<8} |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|                               |                      |               MIG M. |
|===============================+======================+======================|
{rows}
+-----------------------------------------------------------------------------+
| Processes:                                                                  |
|  No running processes found                                                 |
+-----------------------------------------------------------------------------+
"""


def accelerate_env(torch: str, available: bool, gpu: str = "", ram: str = "503.52 GB") -> str:
    """What `accelerate env` prints."""
    return f"""Copy-and-paste the text below in your GitHub issue

- `Accelerate` version: 0.34.2
- Platform: Linux-5.15.0-105-generic-x86_64-with-glibc2.35
- `accelerate` bash location: /usr/local/bin/accelerate
- Python version: 3.10.14
- Numpy version: 1.26.4
- PyTorch version (GPU?): {torch} ({available})
- PyTorch XPU available: False
- System RAM: {ram}
{"- GPU type: " + gpu if gpu else ""}
- `Accelerate` default config:
	Not found
"""


def ds_report(torch: str, cuda: str, nvcc: str, compiled: str = "", shm: str = "62.79 GB") -> str:
    """What DeepSpeed's ds_report prints."""
    return f"""--------------------------------------------------
DeepSpeed C++/CUDA extension op report
--------------------------------------------------
JIT compiled ops requires ninja
ninja .................. [OKAY]
--------------------------------------------------
op name ................ installed .. compatible
--------------------------------------------------
fused_adam ............. [NO] ....... [OKAY]
cpu_adam ............... [NO] ....... [OKAY]
--------------------------------------------------
DeepSpeed general environment info:
torch install path ............... ['/opt/venv/lib/python3.10/site-packages/torch']
torch version .................... {torch}
deepspeed install path ........... ['/opt/venv/lib/python3.10/site-packages/deepspeed']
deepspeed info ................... 0.14.4, unknown, unknown
torch cuda version ............... {cuda}
torch hip version ................ None
nvcc version ..................... {nvcc}
deepspeed wheel compiled w. ...... {compiled or f"torch {torch[:3]}, cuda {cuda}"}
shared memory (/dev/shm) size .... {shm}
"""


def quoted(text: str) -> str:
    """A text as a reply quotes it."""
    return "\n".join(f"> {line}" for line in text.split("\n"))


def fenced(text: str, words: str = "") -> str:
    """A text in a Markdown issue."""
    return (
        f"### Describe the bug\n\n{words}\n\n### Versions\n\n<details>\n\n```sh\n{text}\n```\n\n</details>\n"
    )


def windows(text: str) -> str:
    """A text with Windows line ends and a byte order mark."""
    return "\ufeff" + text.replace("\n", "\r\n")


def coloured(text: str) -> str:
    """A text as a terminal with colours would be copied."""
    return "\n".join(f"\x1b[33m{line}\x1b[0m" if line else line for line in text.split("\n"))


def odd_colons(text: str) -> str:
    """A text out of an editor that writes full-width colons."""
    return text.replace(": ", "：")


def no_colons(text: str) -> str:
    """A text that lost its colons."""
    return text.replace(": ", " ")


def indented(text: str) -> str:
    """A text in an indented code block."""
    return "\n".join("    " + line for line in text.split("\n"))


def cut(text: str, lines: int) -> str:
    """The first lines only."""
    return "\n".join(text.split("\n")[:lines])

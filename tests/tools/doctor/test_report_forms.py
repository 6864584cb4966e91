"""Other tools' forms of the same facts."""

from __future__ import annotations

import pytest

from phalanx.tools.doctor.checks import diagnose
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.report_text import facts_from_text
from tests.tools.doctor.report_forms import accelerate_env, ds_report

_MMCV = """sys.platform: linux
CUDA available: True
GPU 0,1,2,3: NVIDIA GeForce RTX 3090
NVCC: Build cuda_11.1.TC455_06.29190527_0
GCC: gcc (Ubuntu 9.4.0-1ubuntu1~20.04.1) 9.4.0
PyTorch: 1.8.0
PyTorch compiling details: PyTorch built with:
  - CUDA Runtime 10.2
  - NVCC architecture flags: -gencode;arch=compute_37,code=sm_37;-gencode;arch=compute_75,code=sm_75
TorchVision: 0.9.0
"""
_DETECTRON = """----------------------  -----------------------------------------
sys.platform            linux
PyTorch                 1.8.0 @/opt/conda/lib/python3.7/site-packages/torch
GPU available           True
GPU 0,1,2,3             NVIDIA GeForce RTX 3090 (arch=8.6)
torchvision             0.9.0 @/opt/conda/lib/python3.7/site-packages/torchvision
"""
_LIGHTNING = """* CUDA:
	- GPU:
		- NVIDIA GeForce RTX 3090
		- NVIDIA GeForce RTX 3090
		- NVIDIA GeForce RTX 3090
		- NVIDIA GeForce RTX 3090
	- available:         True
* Packages:
	- pyTorch_version:   1.8.0
	- torchvision:       0.9.0
"""
_LIST = """GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-00000000-1111-2222-3333-444444444444)
GPU 1: NVIDIA GeForce RTX 3090 (UUID: GPU-10000000-1111-2222-3333-444444444444)
GPU 2: NVIDIA GeForce RTX 3090 (UUID: GPU-20000000-1111-2222-3333-444444444444)
GPU 3: NVIDIA GeForce RTX 3090 (UUID: GPU-30000000-1111-2222-3333-444444444444)
>>> print(torch.__version__)
1.8.0
>>> torch.cuda.is_available()
True
torchvision==0.9.0
"""


@pytest.mark.parametrize(
    "text",
    [
        _MMCV,
        _DETECTRON,
        _LIGHTNING,
        _LIST,
        "GPU: 4x NVIDIA GeForce RTX 3090\ntorch==1.8.0\ntorchvision 0.9.0\nIs CUDA available: Yes",
    ],
)
def test_torch_torchvision_and_gpus(text: str) -> None:
    facts = facts_from_text(text).facts
    assert facts.torch is not None
    assert facts.torchvision is not None
    assert (facts.torch.version, facts.torch.cuda_available, facts.torchvision.version) == (
        "1.8.0",
        True,
        "0.9.0",
    )
    assert [gpu.name for gpu in facts.gpus or ()] == ["NVIDIA GeForce RTX 3090"] * 4


def _limits(facts: Facts) -> tuple[int | None, ...]:
    assert facts.limits is not None
    return facts.limits.shm_total_bytes, facts.limits.memlock_bytes, facts.limits.nofile


def test_limits_of_a_shell_and_disks() -> None:
    text = """max locked memory           (kbytes, -l) 65536
open files                          (-n) 1024
shm              64M   60M  4.0M  94% /dev/shm
/dev/sda1       1.8T  1.7T   12G 100% /
"""
    facts = facts_from_text(text).facts
    assert _limits(facts) == (64 << 20, 64 << 20, 1024)
    assert facts.disks is not None
    assert (facts.disks[0].path, facts.disks[0].free_bytes) == ("/", 12 << 30)


def test_ds_report_and_accelerate_env() -> None:
    facts = facts_from_text(ds_report("2.1.2+cu118", "11.8", "12.2")).facts
    assert facts.torch is not None
    assert facts.compilers is not None
    assert (facts.torch.version, facts.torch.cuda, facts.compilers.nvcc) == ("2.1.2+cu118", "11.8", "12.2")
    assert _limits(facts)[0] == int(62.79 * (1 << 30))
    facts = facts_from_text(accelerate_env("2.4.0+cu121", False, "NVIDIA L4")).facts
    assert facts.torch is not None
    assert (facts.torch.version, facts.torch.cuda_available) == ("2.4.0+cu121", False)
    assert facts.gpus is not None
    assert facts.gpus[0].name == "NVIDIA L4"


def test_conda_builds_environment_and_topology() -> None:
    text = """# packages in environment at /opt/conda:
pytorch                   2.0.1           py3.10_cuda11.7_cudnn8.5.0_0    pytorch
torchvision               0.15.2              py310_cpu    pytorch
export CUDA_VISIBLE_DEVICES=0,1
LD_LIBRARY_PATH=/usr/local/cuda/lib64
        GPU0    GPU1    CPU Affinity
GPU0     X      NV12    0-31
GPU1    NV12     X      0-31
"""
    facts = facts_from_text(text).facts
    assert facts.torch is not None
    assert facts.torchvision is not None
    assert (facts.torch.cuda, facts.torchvision.cuda) == ("11.7", "")
    assert facts.env == {"CUDA_VISIBLE_DEVICES": "0,1", "LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}
    assert facts.topology is not None
    assert facts.topology.links is not None
    assert [link.kind for link in facts.topology.links] == ["NV12"]


def test_capabilities_of_the_build_one_a_line() -> None:
    facts = facts_from_text(
        "UserWarning: Found GPU0 NVIDIA GeForce GTX 1060 which is of compute capability (CC) 6.1.\n"
        "The following list shows the CCs this version of PyTorch was built for and the hardware CCs it supports:\n"
        "- 7.5 which supports hardware CC >=7.5,<8.0\n"
        "- 12.0 which supports hardware CC >=12.0,<13.0\n"
    ).facts
    assert facts.torch is not None
    assert facts.torch.arch_list == ("sm_75", "sm_120")
    root = diagnose(facts).root_cause
    assert root is not None
    assert root.id == "gpu-too-old-for-build"


def test_the_cuda_that_conda_was_asked_for() -> None:
    facts = facts_from_text(
        "conda install pytorch torchvision cudatoolkit=11.3 -c pytorch\nDriver version: 418.87.00\nIs CUDA available: False"
    ).facts
    assert facts.torch is not None
    assert facts.torch.cuda == "11.3"
    root = diagnose(facts).root_cause
    assert root is not None
    assert root.id == "driver-too-old"

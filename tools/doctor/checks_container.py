"""Containers: with the GPUs in them, and still in them."""

from __future__ import annotations

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.judging import fail, suspected, symptom_weight, warn
from phalanx.tools.doctor.reading import cuda_works, has_nvidia_gpu, in_container, is_rocm, torch_cuda

_START = (
    "docker run --gpus all ... (compose: deploy.resources.reservations.devices; Kubernetes: limits: nvidia.com/gpu: 1)",
    "singularity / apptainer: exec --nv; podman: --device nvidia.com/gpu=all",
)


def check_without_gpus(facts: Facts) -> Finding | None:
    """A container sees the GPUs it is started with, and no others."""
    title = "the container was started without GPUs"
    box = facts.container
    asked = box.visible_devices if box else None
    if (
        box
        and in_container(facts)
        and box.gpu_devices is False
        and asked
        and asked not in ("void", "none", "")
    ):
        evidence = (f"{box.kind}, NVIDIA_VISIBLE_DEVICES={asked}", "no /dev/nvidia* in it")
        return fail("container-without-gpus", title, evidence, _START, 84)
    nothing = not facts.gpus and not (facts.driver and (facts.driver.version or facts.driver.cuda))
    if (
        in_container(facts)
        and not facts.live
        and nothing
        and torch_cuda(facts)
        and cuda_works(facts) is False
    ):
        seen = f"torch with CUDA {torch_cuda(facts)} in a container, neither GPU nor driver in sight"
        told = suspected(facts, "container-without-gpus", title, _START, evidence=(seen,))
        return told or warn("container-without-gpus", title, (seen,), _START, 62)
    refuted = (
        cuda_works(facts) is True
        or torch_cuda(facts) == ""
        or is_rocm(facts)
        or (has_nvidia_gpu(facts) is True and symptom_weight(facts, "container-without-gpus") < 86)
    )
    return suspected(facts, "container-without-gpus", title, _START, refuted=refuted)


def check_toolkit(facts: Facts) -> Finding | None:
    """`--gpus` is carried out by NVIDIA's container toolkit on the host."""
    fix = (
        "on the host: sudo apt install nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
        "then: docker run --rm --gpus all ubuntu nvidia-smi",
    )
    return suspected(
        facts,
        "container-toolkit-missing",
        "the host has no NVIDIA container toolkit",
        fix,
        refuted=cuda_works(facts) is True,
    )


def check_lost_gpus(facts: Facts) -> Finding | None:
    """systemd rewrites a container's device rules at a reload, and runc's GPUs are not among them."""
    fix = (
        "restart the container; for good: docker run --device /dev/nvidiactl --device /dev/nvidia-uvm --device /dev/nvidia0 --gpus all ...",
        'or "exec-opts": ["native.cgroupdriver=cgroupfs"] in /etc/docker/daemon.json, then sudo systemctl restart docker',
    )
    return suspected(
        facts,
        "container-lost-gpu-cgroup",
        "a running container lost its GPU devices",
        fix,
        refuted=cuda_works(facts) is True,
    )

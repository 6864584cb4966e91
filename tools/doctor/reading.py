"""What follows from facts without judging them: the questions that several checks ask."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx.tools.doctor.facts import Facts, GpuFacts, PackageFacts
from phalanx.tools.doctor.symptoms import Sighting, mentions, sightings
from phalanx.tools.facts.tables import capability_of_gpu, cuda_of_driver, is_geforce
from phalanx.tools.facts.versions import minor, same, version_of


def system(facts: Facts) -> str:
    """ "linux", "windows", "darwin"; Linux where nothing is known."""
    return (facts.platform and facts.platform.system) or "linux"


def torch_version(facts: Facts) -> str | None:
    """The torch that is imported."""
    return facts.torch.version if facts.torch else None


def torch_cuda(facts: Facts) -> str | None:
    """The CUDA of the torch build: "" for a build without, None where it is not known."""
    return facts.torch.cuda if facts.torch else None


def is_rocm(facts: Facts) -> bool:
    """Whether this is a ROCm build or an AMD machine."""
    hip = bool(facts.torch and facts.torch.hip)
    return hip or any(gpu.gfx for gpu in facts.gpus or ())


def cuda_works(facts: Facts) -> bool | None:
    """What torch.cuda.is_available() says."""
    return facts.torch.cuda_available if facts.torch else None


def nvidia_gpus(facts: Facts) -> tuple[GpuFacts, ...]:
    """GPUs that are NVIDIA's as far as one can tell."""
    return tuple(gpu for gpu in facts.gpus or () if not gpu.gfx and not _other_maker(gpu.name or ""))


def _other_maker(name: str) -> bool:
    return bool(re.search(r"radeon|instinct|\bamd\b|intel|apple|\bM[1-4]\b|\bMI\d{2,3}", name, re.I))


def has_nvidia_gpu(facts: Facts) -> bool | None:
    """Whether there is an NVIDIA GPU: by NVML, nvidia-smi, a driver's version, or the bus."""
    if nvidia_gpus(facts):
        return True
    driver = facts.driver
    if driver is not None and (driver.version or driver.hardware):
        return True
    if facts.gpus is not None or (driver is not None and driver.hardware == ()):
        return False
    return None


def capability(gpu: GpuFacts) -> str | None:
    """Compute capability as read, else by the product's name."""
    return gpu.capability or (capability_of_gpu(gpu.name) if gpu.name else None)


def gpu_label(gpu: GpuFacts) -> str:
    """ "GPU 1 (NVIDIA A100-SXM4-80GB)"."""
    name = f" ({gpu.name})" if gpu.name else ""
    return f"GPU {gpu.index if gpu.index is not None else 0}{name}"


def is_consumer(facts: Facts) -> bool:
    """Whether any GPU is a GeForce or TITAN board."""
    return any(is_geforce(gpu.name) for gpu in nvidia_gpus(facts) if gpu.name)


def driver_cuda(facts: Facts) -> str | None:
    """The newest CUDA that the driver supports, as reported or by its version."""
    if facts.driver is None:
        return None
    return facts.driver.cuda or (cuda_of_driver(facts.driver.version) if facts.driver.version else None)


def packages(facts: Facts, *names: str) -> tuple[PackageFacts, ...]:
    """Installed distributions of these names."""
    return tuple(entry for entry in facts.packages or () if entry.name in names)


def package_version(facts: Facts, name: str) -> str | None:
    """The version of a distribution that is installed once."""
    found = packages(facts, name)
    return found[0].version if found else None


def variable(facts: Facts, name: str) -> str | None:
    """An environment variable."""
    return (facts.env or {}).get(name)


def env(facts: Facts) -> Mapping[str, str]:
    """The environment, empty where it is not known."""
    return facts.env or {}


def in_container(facts: Facts) -> bool:
    """Whether this is known to be a container."""
    return bool(facts.container and facts.container.kind)


def words_of(facts: Facts) -> tuple[str, ...]:
    """Every message there is: a report's lines, errors of imports and of the driver, the kernel's on NVIDIA."""
    errors = [
        part.error
        for part in (facts.torch, facts.torchvision, facts.torchaudio, facts.driver)
        if part and part.error
    ]
    kernel = [line for line in facts.kernel_log or () if "nv" in line.lower()]
    return (
        *facts.messages,
        *_surroundings(facts),
        *(line for error in errors for line in error.split("\n")),
        *kernel,
    )


def _surroundings(facts: Facts) -> tuple[str, ...]:
    """Where this is, in a word each, for symptoms that mean something else elsewhere."""
    platform, box = facts.platform, facts.container
    words = ["wsl2" if platform and platform.wsl else "", "windows" if system(facts) == "windows" else ""]
    words.append("container" if box and box.kind else "")
    said = " ".join(word for word in words if word)
    return (f"({said})",) if said and facts.messages else ()


def seen(facts: Facts, cause: str) -> tuple[Sighting, ...]:
    """Symptoms of a cause among the messages."""
    told = (*facts.messages, *_surroundings(facts)) if facts.messages else ()
    return sightings(words_of(facts), cause, told)


def says(facts: Facts, pattern: str) -> bool:
    """Whether the messages contain a pattern (lower case)."""
    return mentions(words_of(facts), pattern)


def is_vendor_build(version: str | None) -> bool:
    """A torch built from source or by a vendor, whose companions and architectures are its builder's choice.

    >>> is_vendor_build("2.8.0a0+34c6371d24.nv25.08"), is_vendor_build("2.6.0+cu126"), is_vendor_build("2.0.0a0+git7f2b5ea")
    (True, False, True)
    """
    return bool(re.search(r"a0\b|\+git|\.nv\d|\+[0-9a-f]{7,}|\+nv|\+das|\+computecanada", version or ""))


def is_nightly(version: str | None) -> bool:
    """A nightly or release candidate, which no table lists."""
    return bool(re.search(r"dev\d{6,}|rc\d|\.dev", version or ""))


def same_cuda(first: str | None, second: str | None) -> bool:
    """Whether two CUDA versions share major and minor number."""
    return same(first, second, 2)


def cuda_major(text: str | None) -> int | None:
    """12 for "12.1"."""
    return (version_of(text) or (None,))[0]


def short_cuda(text: str | None) -> str:
    """ "12.1" for "12.1.105"."""
    return minor(text)


def nodes(facts: Facts) -> int | None:
    """How many nodes the job has, as far as job or environment tell."""
    if facts.job and facts.job.nnodes:
        return facts.job.nnodes
    for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "GROUP_WORLD_SIZE", "NNODES"):
        text = variable(facts, name)
        if text and text.isdigit():
            return int(text)
    return None

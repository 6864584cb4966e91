"""torch itself: there, importable, with CUDA, alone, and fit for its NumPy and MKL."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.tools.doctor.checks_arch import is_jetson
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.fixes import install_cuda_torch, newest_for, pip_install, pip_uninstall, torch_line
from phalanx.tools.doctor.judging import fail, fine, proven, suspected, symptom_weight, warn
from phalanx.tools.doctor.reading import (
    cuda_works,
    driver_cuda,
    has_nvidia_gpu,
    is_rocm,
    is_vendor_build,
    package_version,
    packages,
    says,
    system,
    torch_cuda,
    torch_version,
)
from phalanx.tools.facts.versions import version_of


def check_import(facts: Facts) -> Finding | None:
    """Whether `import torch` ends, and how."""
    torch = facts.torch
    if torch is None:
        return None
    release, tag = newest_for(facts)
    line = torch_line(facts, release, tag if has_nvidia_gpu(facts) else "cpu")
    if torch.installed is False:
        return fail(
            "torch-not-installed", "torch is not installed in this Python", _where(facts), (line,), 97
        )
    if torch.timed_out:
        fix = (
            "python -X importtime -c 'import torch' shows where it stands",
            "a torch on a network file system: install it on a local disk",
            line,
        )
        return fail(
            "torch-import-hangs",
            "import torch did not end in time",
            (*_where(facts), torch.error or ""),
            fix,
            80,
        )
    if torch.signal:
        trace = (f"python -X faulthandler -c 'import torch' shows where; then: {line}",)
        return fail(
            "torch-import-crashes",
            f"import torch dies of {torch.signal}",
            (*_where(facts), torch.error or ""),
            trace,
            79,
        )
    if torch.error and torch.version is None and _is_somebody_s_own(torch.file):
        return fail(
            "torch-name-taken",
            "a file of your own is imported in place of torch",
            (*_where(facts), torch.error[-300:]),
            (f"mv {torch.file} to another name: Python looks into the script's folder first",),
            95,
        )
    if torch.error and torch.version is None:
        return fail(
            "torch-import-broken", "import torch fails", (*_where(facts), torch.error[-300:]), (line,), 61
        )
    return suspected(
        facts,
        "torch-import-broken",
        "a native library of torch does not load",
        (line,),
        refuted=cuda_works(facts) is True,
    )


def _is_somebody_s_own(path: str | None) -> bool:
    """torch.py, which no torch has, rather than torch/__init__.py."""
    return bool(path) and re.search(r"(^|/)torch\.py$", path or "") is not None


def _where(facts: Facts) -> tuple[str, ...]:
    python = facts.python
    return tuple(
        text
        for text in ((python and python.executable) or "", (facts.torch and facts.torch.file) or "")
        if text
    )


def check_cpu_only(facts: Facts) -> Finding | None:
    """A CPU build on a machine with a GPU: what pip gives on Windows, and what an update may bring."""
    cuda, version = torch_cuda(facts), torch_version(facts)
    title = "this torch is a CPU build"
    fix = install_cuda_torch(facts)
    bare = cuda == "" and not is_rocm(facts) and cuda_works(facts) is not True
    if system(facts) == "darwin" or (facts.torch and facts.torch.hip):
        return None
    if bare and has_nvidia_gpu(facts) and not is_jetson(facts):
        gpus = [gpu.name for gpu in facts.gpus or () if gpu.name][:2] or ["an NVIDIA driver is installed"]
        return proven(
            facts,
            "cpu-only-torch",
            title + " on a machine with an NVIDIA GPU",
            (f"torch {version or ''} has no CUDA", *gpus),
            fix,
            90,
        )
    toolkit = facts.compilers.nvcc if facts.compilers else None
    if bare and has_nvidia_gpu(facts) is None and toolkit:
        return warn(
            "cpu-only-torch",
            title,
            (f"torch {version or ''} has no CUDA", f"a CUDA toolkit {toolkit} is installed"),
            fix,
            max(66, symptom_weight(facts, "cpu-only-torch")),
        )
    lost = (
        bare
        and has_nvidia_gpu(facts) is None
        and says(facts, r"cuda|\bgpu")
        and says(facts, r"worked before|no longer|gone|not available|unavailable|pytorch-cuda|cudatoolkit")
    )
    if lost and not says(facts, r"without (?:an? )?(?:nvidia )?gpu|no (?:nvidia )?gpu"):
        return warn(
            "cpu-only-torch",
            title,
            (f"torch {version or ''} has no CUDA",),
            fix,
            max(68, symptom_weight(facts, "cpu-only-torch")),
        )
    if bare and has_nvidia_gpu(facts) is False:
        return fine("cpu-only-torch", "a CPU build of torch on a machine without a GPU", version or "")
    known = cuda not in (None, "")
    return suspected(
        facts,
        "cpu-only-torch",
        title,
        fix,
        refuted=known or is_jetson(facts) or cuda_works(facts) is True or has_nvidia_gpu(facts) is False,
    )


def check_cuda_libraries(facts: Facts) -> Finding | None:
    """torch's wheels take CUDA from packages of their own, which --no-deps or a copied folder leaves out."""
    title = "CUDA libraries that torch loads are not installed"
    major = (version_of(torch_cuda(facts)) or (12,))[0]
    version = torch_version(facts)
    requirement = f"torch=={version}" if version and not is_vendor_build(version) else "torch"
    fix = (
        pip_install(facts, requirement, force=True),
        f"or the missing package alone, such as: {pip_install(facts, f'nvidia-cublas-cu{major}', f'nvidia-cudnn-cu{major}')}",
    )
    return suspected(
        facts,
        "cuda-libs-not-installed",
        title,
        fix,
        refuted=cuda_works(facts) is True and not says(facts, r"cannot open shared"),
    )


def check_cudnn_files(facts: Facts) -> Finding | None:
    """cuDNN's parts are loaded late, by name."""
    fix = (pip_install(facts, "torch", force=True), "or unset LD_LIBRARY_PATH where it names another cuDNN")
    return suspected(facts, "cudnn-library-not-found", "a part of cuDNN is not found by the loader", fix)


def check_duplicates(facts: Facts) -> Iterator[Finding]:
    """Two torches: Python files of one, native libraries of the other."""
    fix = (
        pip_uninstall(facts, "torch", "torchvision", "torchaudio") + "   (twice, until nothing is left)",
        "conda remove pytorch torchvision torchaudio   (where conda has one too)",
        f"then once: {install_cuda_torch(facts)[0]}",
        "or a clean environment: python -m venv .venv; and export PYTHONNOUSERSITE=1 against the user site",
    )
    title = "two torches are installed in one environment"
    found = packages(facts, "torch", "pytorch", "pytorch-nightly", "torch-nightly")
    releases = {version_of(entry.version)[:3] for entry in found if version_of(entry.version)}
    places = {entry.location for entry in found if entry.location}
    imported = version_of(torch_version(facts))[:3]
    other = bool(imported and releases and imported not in releases)
    told = symptom_weight(facts, "duplicate-torch-install") >= 80
    if len(releases) > 1 or len(places) > 1 or other:
        evidence = [
            f"{entry.name} {entry.version}{' in ' + entry.location if entry.location else ''}"
            for entry in found[:4]
        ]
        evidence += [f"imported: torch {torch_version(facts)}"] if other else []
        broken = bool(facts.torch and facts.torch.error) or told
        yield (fail if broken else warn)(
            "duplicate-torch-install", title, evidence, fix, 82 if broken else 63
        )
        return
    result = suspected(facts, "duplicate-torch-install", title, fix)
    if result:
        yield result


def check_numpy(facts: Facts) -> Finding | None:
    """torch learnt NumPy 2 with 2.3, its Windows builds with 2.4.1."""
    numpy, torch = package_version(facts, "numpy"), torch_version(facts)
    title = "torch was built for NumPy 1, NumPy 2 is installed"
    learnt = (2, 4, 1) if system(facts) == "windows" else (2, 3)
    fix = (pip_install(facts, "numpy<2"), "or torch 2.3 or newer")
    if (
        numpy
        and torch
        and version_of(numpy) >= (2,)
        and version_of(torch) < learnt
        and version_of(torch) > (0, 1)
    ):
        if facts.torch and facts.torch.numpy_works:
            return None
        return proven(facts, "numpy2-abi", title, (f"numpy {numpy}", f"torch {torch}"), fix, 87)
    settled = bool(numpy and version_of(numpy) < (2,)) or not (torch or says(facts, "torch"))
    if torch and version_of(torch) >= learnt:  # what NumPy 2 breaks here is another package
        settled = settled or symptom_weight(facts, "numpy2-abi") < 80
    return suspected(facts, "numpy2-abi", title, fix, refuted=settled)


def check_mkl(facts: Facts) -> Finding | None:
    """MKL 2024.1 dropped a symbol that conda's torches up to 2.2 were linked to."""
    mkl, torch = packages(facts, "mkl"), packages(facts, "pytorch")
    fix = ("conda install 'mkl<2024.1'", "or torch from pip: " + pip_install(facts, "torch", force=True))
    title = "conda's torch needs an older MKL"
    if (
        mkl
        and torch
        and version_of(mkl[0].version) >= (2024, 1)
        and version_of(torch[0].version) < (2, 3)
        and mkl[0].source != "pip"
    ):
        evidence = (f"mkl {mkl[0].version}", f"pytorch {torch[0].version} from conda")
        if cuda_works(facts) is None and torch_version(facts) in (None, torch[0].version):
            return proven(facts, "mkl-symbol-removed", title, evidence, fix, 74)
        return warn("mkl-symbol-removed", title, evidence, fix, 45)
    return suspected(facts, "mkl-symbol-removed", title, fix)


def check_cuda_unavailable(facts: Facts) -> Finding | None:
    """CUDA that does not start although a GPU, a driver and a CUDA build are there: no check may know why."""
    if cuda_works(facts) is not False or not torch_cuda(facts) or not facts.gpus or not has_nvidia_gpu(facts):
        return None
    fix = (
        "python -c 'import torch; torch.zeros(1).cuda()' prints the driver's own words",
        "nvidia-smi; echo $CUDA_VISIBLE_DEVICES; ls -l /dev/nvidia*",
    )
    evidence = (
        f"torch {torch_version(facts) or ''} with CUDA {torch_cuda(facts)}",
        f"driver: CUDA {driver_cuda(facts) or 'not known'}",
    )
    return warn(
        "cuda-unavailable", "torch does not reach CUDA, though GPU, driver and build fit", evidence, fix, 41
    )

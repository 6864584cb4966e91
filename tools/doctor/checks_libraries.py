"""Native libraries and compilers: what is loaded instead of what torch brings, and what would compile for it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.tools.doctor.facts import Facts, LibraryFacts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.fixes import pip_install, pip_uninstall
from phalanx.tools.doctor.judging import fail, fine, proven, suspected, symptom_lines, symptom_weight, warn
from phalanx.tools.doctor.reading import (
    cuda_works,
    env,
    is_nightly,
    is_vendor_build,
    nvidia_gpus,
    packages,
    says,
    short_cuda,
    system,
    torch_cuda,
    torch_version,
)
from phalanx.tools.facts.tables import cuda_variants, gcc_bounds
from phalanx.tools.facts.versions import at_least, same, version_of

_UNSET = (
    "unset LD_LIBRARY_PATH   (or take the CUDA and cuDNN folders out of it; look in ~/.bashrc and in loaded modules)",
)


def search_folders(facts: Facts) -> tuple[str, ...]:
    """The folders of LD_LIBRARY_PATH, in order."""
    return tuple(folder for folder in env(facts).get("LD_LIBRARY_PATH", "").split(":") if folder)


def foreign(facts: Facts, name: str) -> LibraryFacts | None:
    """A mapped library of that name that does not come with torch's packages."""
    for library in facts.libraries or ():
        if library.name.startswith(name) and not re.search(
            r"site-packages|dist-packages|/torch/lib/|/nvidia/|conda", library.path
        ):
            return library
    return None


def blamed(facts: Facts, pattern: str) -> str | None:
    """The loader's complaint about a library of LD_LIBRARY_PATH, when torch's import ended with it."""
    error = (facts.torch and facts.torch.error) or ""
    for folder in search_folders(facts):
        if re.search(rf"{re.escape(folder.rstrip('/'))}/[^/\s]*(?:{pattern})", error):
            return error
    return None


def check_cudnn(facts: Facts) -> Finding | None:
    """The loaded cuDNN must be of the major number torch was built with, and not older in the minor."""
    torch = facts.torch
    built, loaded = (
        version_of(_dotted(text))
        for text in ((torch and torch.cudnn) or "", (torch and torch.cudnn_loaded) or "")
    )
    folders = [folder for folder in search_folders(facts) if re.search(r"cudnn|cuda", folder, re.I)]
    cause, title = "ld-library-path-shadows-cudnn", "another cuDNN is loaded than the one torch brings"
    complaint = blamed(facts, "libcudnn")
    if complaint:
        words = "LD_LIBRARY_PATH puts a cuDNN first that cannot be loaded"
        return fail(cause, words, (complaint,), _UNSET, 93)
    foreigner = foreign(facts, "libcudnn")
    evidence = [f"LD_LIBRARY_PATH has {folder}" for folder in folders[:3]]
    if foreigner:
        evidence.insert(0, f"loaded: {foreigner.path}")
    if built and loaded and (built[0] != loaded[0] or loaded[:2] < built[:2]):
        found = ".".join(map(str, loaded))
        return proven(
            facts,
            cause,
            title,
            (f"torch was built with cuDNN {'.'.join(map(str, built))}, {found} is loaded", *evidence),
            _UNSET,
            92,
        )
    if foreigner and any(foreigner.path.startswith(folder) for folder in search_folders(facts)):
        broken = cuda_works(facts) is False or bool(torch and torch.error)
        return (fail if broken else warn)(cause, title, evidence, _UNSET, 84 if broken else 56)
    return suspected(
        facts, cause, title, _UNSET, evidence=evidence, refuted=bool(built and loaded and not folders)
    )


def _dotted(text: str) -> str:
    """ "9.10.2" for torch's own number 91002, "8.9.2" for 8902."""
    if text.isdigit() and len(text) >= 4:
        number = int(text)
        major, rest = (
            (number // 10000, number % 10000) if number >= 90000 else (number // 1000, number % 1000)
        )
        return f"{major}.{rest // 100}.{rest % 100}"
    return text


def check_cuda_shadowed(facts: Facts) -> Finding | None:
    """LD_LIBRARY_PATH goes before the wheel's own folders."""
    cuda = torch_cuda(facts)
    named = [(folder, re.search(r"cuda[-/](\d{1,2}\.\d)", folder)) for folder in search_folders(facts)]
    other = [folder for folder, match in named if match and not (cuda and same(match[1], cuda))]
    plain = [
        folder
        for folder in search_folders(facts)
        if re.search(r"/cuda(?:/|-)", folder) and not folder.startswith("/usr/lib/wsl")
    ]
    cause, title = (
        "ld-library-path-shadows-cuda",
        "LD_LIBRARY_PATH puts another CUDA before the one torch brings",
    )
    complaint = blamed(facts, "libcu(?!dnn)|libnv")
    if complaint:
        words = "LD_LIBRARY_PATH puts a CUDA library first that cannot be loaded"
        return fail(cause, words, (complaint,), _UNSET, 93)
    foreigners = [
        library
        for name in ("libcublas", "libcusparse", "libnvJitLink", "libcudart", "libcusolver")
        if (library := foreign(facts, name))
    ]
    shadowing = [
        library
        for library in foreigners
        if any(library.path.startswith(folder) for folder in search_folders(facts))
    ]
    evidence = (
        *(f"loaded: {library.path}" for library in shadowing[:3]),
        *(f"LD_LIBRARY_PATH has {folder}" for folder in (other or plain)[:3]),
        f"torch: CUDA {short_cuda(cuda)}" if cuda else "",
    )
    broken = bool(facts.torch and facts.torch.error) or says(facts, r"import torch.{0,20}fail|importerror")
    if shadowing and (broken or cuda_works(facts) is False):
        return proven(facts, cause, title, evidence, _UNSET, 83)
    if other and broken and cuda_works(facts) is not True:
        return proven(facts, cause, title, evidence, _UNSET, 76)
    if shadowing or (other and cuda and cuda_works(facts) is False):
        return warn(cause, title, evidence, _UNSET, 52)
    found = suspected(
        facts, cause, title, _UNSET, evidence=evidence, refuted=cuda_works(facts) is True and not plain
    )
    if found is None and not facts.live and plain and cuda != "" and cuda_works(facts) is None:
        return warn(cause, title, evidence, _UNSET, 41)
    if found is None and other and cuda:
        return warn(cause, title, evidence, _UNSET, 22)
    return found


def check_nccl(facts: Facts) -> Iterator[Finding]:
    """torch calls the NCCL it was built with; an older one lacks symbols, another CUDA's cannot load."""
    cause, title = (
        "nccl-library-mismatch",
        "another NCCL is installed or loaded than the one torch was built with",
    )
    fix = (
        pip_uninstall(facts, "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        pip_install(facts, "torch", force=True),
        *_UNSET,
    )
    torch = facts.torch
    majors = {
        match[1]
        for entry in facts.packages or ()
        if (match := re.fullmatch(r"nvidia-[a-z-]{2,20}-cu(\d\d)", entry.name))
    }
    nccls = packages(facts, "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
    broken = bool(torch and torch.error) or cuda_works(facts) is False or symptom_weight(facts, cause) >= 80
    if len({entry.name for entry in nccls}) > 1:
        evidence = [f"{entry.name} {entry.version}" for entry in nccls]
        yield (fail if broken else warn)(
            cause, "NCCL packages of two CUDA majors are installed", evidence, fix, 84 if broken else 60
        )
        return
    if torch and torch.nccl and torch.nccl_loaded and not same(torch.nccl, torch.nccl_loaded):
        foreigner = foreign(facts, "libnccl")
        evidence = [
            f"torch was built with NCCL {torch.nccl}",
            f"loaded: NCCL {torch.nccl_loaded}",
            foreigner.path if foreigner else "",
        ]
        older = not at_least(torch.nccl_loaded, torch.nccl)
        yield (fail if older else warn)(cause, title, evidence, fix, 86 if older else 50)
        return
    if len(majors) > 1 and broken and "cu11" in " ".join(f"cu{major}" for major in majors):
        yield warn(
            cause,
            "NVIDIA packages of two CUDA majors are installed",
            [f"cu{major}" for major in sorted(majors)],
            fix,
            55,
        )
    wanted = _wanted_nccl(facts)
    if wanted and nccls and not same(wanted, nccls[0].version, 3):
        yield warn(
            cause,
            title,
            (
                f"torch {torch_version(facts)} wants NCCL {wanted}",
                f"installed: {nccls[0].name} {nccls[0].version}",
            ),
            (pip_install(facts, f"{nccls[0].name}=={wanted}"),),
            43,
        )
    found = suspected(facts, cause, title, fix)
    if found:
        yield found


def _wanted_nccl(facts: Facts) -> str | None:
    version, cuda = torch_version(facts), torch_cuda(facts)
    if not version or not cuda or is_nightly(version) or is_vendor_build(version):
        return None
    rows = [row for row in cuda_variants(version) if same(row["cuda"], cuda) and row["certain"]]
    return rows[0]["nccl"] if rows else None


def check_nccl_built(facts: Facts) -> Finding | None:
    """Windows, macOS and CPU builds have no NCCL: gloo is what they can do."""
    cause, title = "nccl-not-in-build", "this torch has no NCCL"
    fix = (
        'init_process_group(backend="gloo"), or with Lightning: process_group_backend="gloo"',
        "or run under Linux (on Windows: WSL 2)",
    )
    place, torch = system(facts), facts.torch
    wants = (facts.job and facts.job.backend) == "nccl"
    if torch and torch.nccl_built is False and (wants or len(nvidia_gpus(facts)) > 1):
        return proven(facts, cause, title, ("torch.distributed.is_nccl_available() is False",), fix, 78)
    if place in ("windows", "darwin") and wants:
        return proven(facts, cause, title, (f"the {place} builds of torch have no NCCL",), fix, 86)
    distributed = says(
        facts,
        r"\bddp\b|\bnccl\b|torchrun|multi-?gpu|init_process_group|\bfsdp\b|distributeddataparallel|"
        r"distributed (?:training|data|run|launch|package)",
    )
    if place in ("windows", "darwin") and distributed and not symptom_weight(facts, "libuv-missing-windows"):
        evidence = (f"the {place} builds of torch have no NCCL", *symptom_lines(facts, cause))
        told = symptom_weight(facts, cause)
        if told >= 60:
            return fail(cause, title, evidence, fix, told)
        return warn(cause, title, evidence, fix, 64)
    return suspected(facts, cause, title, fix, refuted=bool(torch and torch.nccl_built))


def check_libuv(facts: Facts) -> Finding | None:
    """torch 2.4 made libuv the TCP store's default; its Windows builds came without it."""
    fix = ("set USE_LIBUV=0   (PowerShell: $env:USE_LIBUV=0), or init_method='tcp://host:port?use_libuv=0'",)
    return suspected(facts, "libuv-missing-windows", "this Windows build has no libuv for the TCP store", fix)


def check_libstdcxx(facts: Facts) -> Iterator[Finding]:
    """The first libstdc++ that is loaded serves the whole process."""
    fix = (
        "conda install -c conda-forge 'libstdcxx-ng>=13'   (in a conda environment)",
        "export LD_LIBRARY_PATH=$CONDA_PREFIX/lib:$LD_LIBRARY_PATH",
        "or without conda: sudo apt install libstdc++6 (Ubuntu: ppa:ubuntu-toolchain-r/test)",
    )
    found = suspected(facts, "libstdcxx-too-old", "an older libstdc++ is loaded first", fix)
    if found:
        yield found
    old = suspected(
        facts,
        "glibc-too-old",
        "this system's glibc is older than the binary needs",
        ("take a newer system image or container; glibc is not upgraded in place",),
    )
    if old:
        yield old
    libc = facts.platform.libc if facts.platform else None
    torch = torch_version(facts)
    if (
        libc
        and torch
        and not old
        and version_of(libc) < (2, 28)
        and version_of(torch) >= (2, 7)
        and facts.live
        and system(facts) == "linux"
    ):
        yield warn(
            "glibc-too-old",
            "torch's wheels from 2.7 on need glibc 2.28",
            (f"glibc {libc}", f"torch {torch}"),
            ("take a newer system image or container",),
            47,
        )


def check_nvcc(facts: Facts) -> Iterator[Finding]:
    """Extensions are compiled by nvcc for torch's CUDA: another major number is refused."""
    nvcc = facts.compilers.nvcc if facts.compilers else None
    cuda = torch_cuda(facts)
    cause, title = (
        "nvcc-torch-cuda-mismatch",
        f"nvcc's CUDA {short_cuda(nvcc)} is not torch's {short_cuda(cuda)}",
    )
    wanted = short_cuda(cuda) or "<torch.version.cuda>"
    fix = (
        f"install toolkit {wanted} and: export CUDA_HOME=/usr/local/cuda-{wanted} PATH=/usr/local/cuda-{wanted}/bin:$PATH",
        f"or in conda: conda install -c nvidia cuda-nvcc={wanted}",
    )
    evidence = (f"nvcc {nvcc}", f"torch: CUDA {cuda}")
    if nvcc and cuda and version_of(nvcc)[0] != version_of(cuda)[0]:
        building = symptom_weight(facts, cause) >= 60 or says(
            facts,
            r"(?:build|compil)\w{0,5} [^\n]{0,60}(?:extension|op\b|ops\b|wheel|kernel)|setup\.py|cpp_extension|cudaextension|load_inline|nvcc fatal",
        )
        yield (
            proven(facts, cause, title, evidence, fix, 83)
            if building
            else warn(cause, title, evidence, fix, 50)
        )
    else:
        fits = bool(nvcc and cuda)
        found = suspected(facts, cause, "nvcc's CUDA is not torch's", fix, refuted=fits and same(nvcc, cuda))
        if found:
            yield found
        elif fits:
            yield fine(cause, "nvcc's CUDA fits torch's", *evidence)
    for name, words, line in (
        (
            "nvcc-too-old-for-gpu",
            "this nvcc does not know the GPU",
            f"install toolkit {wanted} or newer, or set TORCH_CUDA_ARCH_LIST to what it knows",
        ),
        (
            "cuda-home-missing",
            "no CUDA toolkit where something must be compiled",
            f"install toolkit {wanted} and: export CUDA_HOME=/usr/local/cuda-{wanted}",
        ),
        ("ninja-missing", "ninja is not on PATH", pip_install(facts, "ninja")),
    ):
        other = suspected(facts, name, words, (line,))
        if other:
            yield other


def check_compilers(facts: Facts) -> Iterator[Finding]:
    """torch.compile and DeepSpeed's ops compile on this machine."""
    tools = facts.compilers
    told = suspected(
        facts,
        "gcc-too-new-for-nvcc",
        "the host compiler is newer than nvcc takes",
        ("sudo apt install g++-12 && export CC=gcc-12 CXX=g++-12 CUDAHOSTCXX=g++-12",),
    )
    if told:
        yield told
    missing = suspected(
        facts,
        "compiler-missing",
        "no compiler for torch.compile",
        ("sudo apt install build-essential python3-dev",),
    )
    if missing:
        yield missing
    if tools is None:
        return
    if tools.gcc == "" and not tools.clang and not missing and system(facts) == "linux":
        yield warn(
            "compiler-missing",
            "no C compiler: torch.compile and DeepSpeed's ops cannot build",
            ("neither gcc nor clang on PATH",),
            ("sudo apt install build-essential",),
            35,
        )
    elif tools.python_headers is False and not missing:
        yield warn(
            "compiler-missing",
            "Python's headers are missing: torch.compile cannot build",
            ("no Python.h",),
            ("sudo apt install python3-dev",),
            30,
        )
    bounds = gcc_bounds(tools.nvcc) if tools.nvcc else None
    major = (version_of(tools.gcc) or (0,))[0]
    if bounds and major > bounds[1] and not told and facts.live:
        names = f"gcc-{bounds[1]} CXX=g++-{bounds[1]}"
        yield warn(
            "gcc-too-new-for-nvcc",
            f"gcc {tools.gcc} is newer than nvcc {tools.nvcc} takes",
            (f"nvcc {short_cuda(tools.nvcc)} takes gcc {bounds[0]} to {bounds[1]}",),
            (f"sudo apt install g++-{bounds[1]} && export CC={names} CUDAHOSTCXX=g++-{bounds[1]}",),
            33,
        )
    if tools.nvcc == "" and packages(facts, "deepspeed") and nvidia_gpus(facts):
        yield warn(
            "cuda-home-missing",
            "DeepSpeed compiles its ops, and there is no nvcc",
            ("deepspeed is installed, nvcc is not on PATH",),
            (f"install CUDA toolkit {short_cuda(torch_cuda(facts))} and export CUDA_HOME",),
            32,
        )
    if tools.ninja == "" and packages(facts, "deepspeed") and nvidia_gpus(facts):
        yield warn(
            "ninja-missing",
            "DeepSpeed compiles its ops with ninja, which is not on PATH",
            (),
            (pip_install(facts, "ninja"),),
            31,
        )

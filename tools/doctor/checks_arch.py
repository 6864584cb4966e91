"""torch's machine code against each GPU: families, PTX, AMD targets, Jetson."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.tools.doctor.facts import Facts, GpuFacts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.fixes import cuda_for_capability, installer, newest_for, torch_line
from phalanx.tools.doctor.judging import fine, proven, suspected, symptom_weight, warn
from phalanx.tools.doctor.reading import (
    capability,
    cuda_works,
    driver_cuda,
    gpu_label,
    is_nightly,
    is_rocm,
    is_vendor_build,
    nvidia_gpus,
    says,
    system,
    torch_cuda,
    torch_version,
)
from phalanx.tools.facts.tables import (
    Build,
    architectures_of_build,
    builds_of_release,
    capability_facts,
    code_for,
    parse_architecture,
)
from phalanx.tools.facts.versions import version_of

# The first toolkit that compiles for any GPU of a major number, and the last one for what was dropped.
_FIRST_CUDA = {7: (9, 0), 8: (11, 0), 9: (11, 8), 10: (12, 8), 11: (13, 0), 12: (12, 8)}
_STOCK_GFX = frozenset(
    [
        "gfx900",
        "gfx906",
        "gfx908",
        "gfx90a",
        "gfx942",
        "gfx950",
        "gfx1030",
        "gfx1100",
        "gfx1101",
        "gfx1102",
        "gfx1200",
        "gfx1201",
    ]
)  # the targets of torch's own ROCm wheels, newest releases included
_JETSON = ("5.3", "6.2", "7.2", "8.7")


def build_of(facts: Facts) -> Build | None:
    """What the torch build contains: its own list, else the table's."""
    torch = facts.torch
    if torch is None:
        return None
    if torch.arch_list:
        return Build(torch.arch_list, True)
    if not torch.version or not torch.cuda or is_vendor_build(torch.version):
        return None
    machine = (facts.platform and facts.platform.machine) or ""
    place = (
        "windows"
        if system(facts) == "windows"
        else "linux_aarch64"
        if machine in ("aarch64", "arm64")
        else "linux_x86_64"
    )
    build = architectures_of_build(torch.version, torch.cuda, place)
    return Build(build.architectures, build.certain and not is_nightly(torch.version)) if build else None


def check_architectures(facts: Facts) -> Iterator[Finding]:
    """Code runs within its major number from its minor number up; PTX on everything newer."""
    unfit: dict[str, list[GpuFacts]] = {"arch-not-in-build": [], "gpu-too-old-for-build": []}
    judged = [(gpu, _fit(facts, gpu)) for gpu in nvidia_gpus(facts) if capability(gpu)]
    for gpu, verdict in judged:
        if verdict in unfit:
            unfit[verdict].append(gpu)
    runs = [gpu for gpu, verdict in judged if verdict == "runs"]
    for cause, gpus in unfit.items():
        if gpus:
            yield _unfit(facts, cause, gpus, some_run=bool(runs))
    if any(unfit.values()):
        return
    yield from _by_symptom(facts, all_run=bool(runs) and len(runs) == len(judged))
    if runs:
        yield fine(
            "arch-not-in-build",
            "torch has code for every GPU",
            *dict.fromkeys(f"{gpu.name or 'GPU'}: {capability(gpu)}" for gpu in runs),
        )


def _fit(facts: Facts, gpu: GpuFacts) -> str:
    """ "runs", the cause why it does not, or "" where nothing is known."""
    has = capability(gpu) or ""
    build = build_of(facts)
    cuda = version_of(torch_cuda(facts))[:2]
    if build is not None:
        if runs_on(build.architectures, has) or (has in ("7.2", "8.7") and cuda >= (13, 2)):
            return "runs"
        if has in _JETSON:
            return ""
        lowest = min(
            (entry[1] for entry in map(parse_architecture, build.architectures) if entry), default=None
        )
        if lowest is None:
            return ""
        return "gpu-too-old-for-build" if version_of(has)[:2] < lowest else "arch-not-in-build"
    if torch_cuda(facts) is None and torch_version(facts):
        return _fit_any_build(torch_version(facts) or "", has)
    if not cuda or (is_vendor_build(torch_version(facts)) and cuda_works(facts) is not False):
        return ""
    row = capability_facts(has)
    if cuda < _FIRST_CUDA.get(version_of(has)[0], (0, 0)):
        return "arch-not-in-build"
    if row and row["last_cuda"] and cuda > version_of(row["last_cuda"])[:2] and has not in _JETSON:
        return "gpu-too-old-for-build"
    return ""


def runs_on(architectures: tuple[str, ...], has: str) -> bool:
    """Whether a build runs on a GPU. PTX counts where it is the newest entry, kept for newer GPUs: PTX of an old

    architecture comes from a toolkit whose cuBLAS and cuDNN have no code for the GPU, and torch refuses it.
    """
    code = code_for(architectures, has)
    if code is None or code.startswith("sm_"):
        return code is not None
    numbers = [entry[1] for entry in map(parse_architecture, architectures) if entry]
    found = parse_architecture(code)
    return found is not None and found[1] >= max(numbers)


def _fit_any_build(torch: str, has: str) -> str:
    """A verdict that holds for every CUDA build of a release, where the report does not name the build."""
    builds = [] if is_vendor_build(torch) or is_nightly(torch) else builds_of_release(torch)
    if not builds or has in _JETSON or any(runs_on(build.architectures, has) for build in builds):
        return ""
    lows = [
        min(entry[1] for entry in map(parse_architecture, build.architectures) if entry) for build in builds
    ]
    return (
        "gpu-too-old-for-build"
        if version_of(has)[:2] < min(lows) or version_of(has)[0] <= 5
        else "arch-not-in-build"
    )


def _unfit(facts: Facts, cause: str, gpus: list[GpuFacts], *, some_run: bool) -> Finding:
    build = build_of(facts)
    content = (
        f"torch {torch_version(facts) or ''} has code for {' '.join(build.architectures)}"
        if build
        else f"torch is built with CUDA {torch_cuda(facts)}"
    )
    evidence = (*(f"{gpu_label(gpu)} has compute capability {capability(gpu)}" for gpu in gpus[:4]), content)
    newer = cause == "arch-not-in-build"
    title = (
        f"{gpus[0].name or 'the GPU'} is {'newer' if newer else 'older'} than the code in this torch build"
    )
    fix = _newer_fix(facts, gpus[0]) if newer else _older_fix(facts, gpus[0])
    certain = build is None or build.certain
    if some_run or not certain:
        return warn(cause, title, evidence, fix, 85 if certain else 70)
    return proven(facts, cause, title, evidence, fix, 91)


def _newer_fix(facts: Facts, gpu: GpuFacts) -> tuple[str, ...]:
    release, tag = newest_for(facts, cuda_for_capability(capability(gpu) or ""))
    return (torch_line(facts, release, tag),)


def _older_fix(facts: Facts, gpu: GpuFacts) -> tuple[str, ...]:
    has = version_of(capability(gpu))[:2]
    if has >= (5, 0):
        first = torch_line(facts, "2.9.1", "cu126")
    elif has >= (3, 7):
        first = torch_line(facts, "2.6.0", "cu118")
    else:
        first = "no current torch has code for this GPU; build from source with TORCH_CUDA_ARCH_LIST=" + (
            capability(gpu) or ""
        )
    return (first, "or leave it out: export CUDA_VISIBLE_DEVICES=<the other GPUs>")


def _by_symptom(facts: Facts, *, all_run: bool) -> Iterator[Finding]:
    if is_rocm(facts):
        return
    known = [version_of(capability(gpu))[:2] for gpu in nvidia_gpus(facts) if capability(gpu)]
    release, tag = newest_for(facts)
    old = bool(known) and max(known) <= (6, 2) and not symptom_weight(facts, "gpu-too-old-for-build")
    if old and symptom_weight(facts, "arch-not-in-build") >= 74:
        yield warn(
            "gpu-too-old-for-build",
            "the GPU is older than the code in this torch build",
            ("an old GPU, and no kernel image for it",),
            _older_fix(facts, nvidia_gpus(facts)[0]),
            62,
        )
    for cause, title in (
        ("gpu-too-old-for-build", "the GPU is older than the code in this torch build"),
        ("arch-not-in-build", "the GPU is newer than the code in this torch build"),
    ):
        if cause == "arch-not-in-build" and old:
            continue
        found = suspected(facts, cause, title, (torch_line(facts, release, tag),), refuted=all_run)
        if found:
            yield found


def check_ptx(facts: Facts) -> Finding | None:
    """PTX of a newer toolkit cannot be compiled by an older driver, though machine code would run."""
    build, newest, cuda = build_of(facts), driver_cuda(facts), torch_cuda(facts)
    if build is None or not newest or not cuda:
        return None
    for gpu in nvidia_gpus(facts):
        code = code_for(build.architectures, capability(gpu) or "")
        if code and code.startswith("compute_"):
            if version_of(newest)[:2] < version_of(cuda)[:2]:
                return warn(
                    "driver-too-old",
                    "this GPU runs torch's PTX only, which the driver is too old to compile",
                    (f"{gpu_label(gpu)}: {code}", f"driver: CUDA {newest}; torch: CUDA {cuda}"),
                    _newer_fix(facts, gpu),
                    58,
                )
            return warn(
                "ptx-only",
                "this GPU runs torch's portable code: the first use of each kernel is slow",
                (f"{gpu_label(gpu)}: {code}",),
                _newer_fix(facts, gpu),
                20,
            )
    return None


def check_rocm_architectures(facts: Facts) -> Finding | None:
    """AMD's code is for exact targets."""
    targets = tuple(dict.fromkeys(gpu.gfx for gpu in facts.gpus or () if gpu.gfx))
    listed = tuple(
        entry for entry in (facts.torch and facts.torch.arch_list) or () if entry.startswith("gfx")
    )
    override = (facts.env or {}).get("HSA_OVERRIDE_GFX_VERSION")
    missing = [name for name in targets if name not in (listed or _STOCK_GFX)]
    title = f"this ROCm build of torch has no code for {missing[0] if missing else 'the GPU'}"
    fix = (
        "a build that lists the target: https://rocm.docs.amd.com, or AMD's nightly wheels for it",
        f"or borrow a sibling's code: export HSA_OVERRIDE_GFX_VERSION={_sibling(targets[0]) if targets else '11.0.0'}",
    )
    works = cuda_works(facts) is True and bool(override)
    if missing and not works and (listed or symptom_weight(facts, "rocm-arch-not-in-build")):
        content = (
            f"the build has {' '.join(listed)}"
            if listed
            else "stock ROCm wheels have " + " ".join(sorted(_STOCK_GFX))
        )
        return proven(
            facts, "rocm-arch-not-in-build", title, (f"GPU target {', '.join(missing)}", content), fix, 88
        )
    if missing and not works:
        return warn("rocm-arch-not-in-build", title, (f"GPU target {', '.join(missing)}",), fix, 58)
    if not is_rocm(facts) and not says(facts, r"rocm|\bhip\b|gfx\d"):
        return None
    return suspected(
        facts, "rocm-arch-not-in-build", title, fix, refuted=bool(listed) and bool(targets) and not missing
    )


def _sibling(target: str) -> str:
    return {"gfx10": "10.3.0", "gfx11": "11.0.0", "gfx12": "12.0.0"}.get(target[:5], "9.0.0")


def is_jetson(facts: Facts) -> bool:
    """Tegra kernels, JetPack, or an integrated GPU."""
    platform = facts.platform
    if platform and (platform.jetson or re.search(r"tegra|jetson", f"{platform.kernel} {platform.os}", re.I)):
        return True
    return any(re.search(r"\borin\b|xavier|tegra|jetson", gpu.name or "", re.I) for gpu in facts.gpus or ())


def check_jetson(facts: Facts) -> Finding | None:
    """Jetson's GPU needs the wheels built for its JetPack; the registry's aarch64 ones hold no code for it."""
    if not is_jetson(facts):
        return None
    version = torch_version(facts)
    fix = (
        "install NVIDIA's wheel for this JetPack: https://developer.download.nvidia.com/compute/redist/jp/ (see docs.nvidia.com/deeplearning/frameworks/install-pytorch-jetson-platform)",
        "or run the container: docker run --runtime nvidia nvcr.io/nvidia/l4t-pytorch (dustynv/pytorch for newer JetPacks)",
    )
    title = "a generic aarch64 wheel of torch on a Jetson"
    unfit = symptom_weight(facts, "arch-not-in-build") >= 74
    if version and (".nv" in version or "+nv" in version or (cuda_works(facts) is True and not unfit)):
        return fine("jetson-wrong-wheel", "torch is the Jetson build", version)
    if (
        version
        and not is_vendor_build(version)
        and (
            cuda_works(facts) is False
            or torch_cuda(facts) == ""
            or symptom_weight(facts, "jetson-wrong-wheel")
            or says(facts, r"not available|unavailable|no gpu|is_available")
            or unfit
        )
    ):
        how = "uv pip" if installer(facts) == "uv" else "pip"
        return proven(
            facts,
            "jetson-wrong-wheel",
            title,
            (f"torch {version} (a wheel {how} takes from the registry)", "this is a Jetson"),
            fix,
            94,
        )
    return suspected(facts, "jetson-wrong-wheel", title, fix, refuted=cuda_works(facts) is True)

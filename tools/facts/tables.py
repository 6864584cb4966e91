"""The fact tables, and typed questions to them. Nothing is read before the first question."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.tools.facts.versions import Version, at_least, minor, tag_of_cuda, version_of


@functools.cache
def table(name: str) -> dict[str, Any]:
    """One table as it lies in the package: ``table("xid")``, ``table("gpus")``."""
    text = (importlib.resources.files("phalanx.tools.facts") / f"{name}.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


# ---------------------------------------------------------------------------------------------------- drivers


@dataclass(frozen=True)
class DriverNeed:
    """The lowest driver that runs programs of one CUDA release."""

    cuda: str
    version: str
    full_version: (
        str | None
    )  # the driver of that very release, where ``version`` rests on minor compatibility
    certain: bool = True


@functools.lru_cache(maxsize=1024)
def driver_for_cuda(cuda: str, system: str = "linux") -> DriverNeed | None:
    """The lowest driver for a CUDA build; from CUDA 11 on any driver of the same major number will do.

    >>> driver_for_cuda("12.4").version, driver_for_cuda("10.2").version, driver_for_cuda("12.1", "windows").version
    ('525.60.13', '440.33', '528.33')
    """
    key = "windows_min" if system == "windows" else "linux_min"
    wanted = version_of(cuda)[:2]
    full = _toolkit_driver(wanted, key)
    floor = next(
        (
            row
            for row in table("cuda_driver")["minor_version_compatibility"]
            if wanted[:1] == (row["cuda_major"],)
        ),
        None,
    )
    if floor is None and wanted and wanted[0] > 13:
        return None
    lowest = (floor or {}).get(key) or str((floor or {}).get("linux_min_branch") or "") or None
    if full and lowest and not at_least(full, lowest):
        lowest = full  # the first minor of a major started on an older driver than the later ones
    needed = lowest or full
    return DriverNeed(minor(cuda), needed, full) if needed else None


def _toolkit_driver(wanted: Version, key: str) -> str | None:
    rows = [*table("cuda_driver")["toolkits"], *table("older_builds")["toolkits"]]
    numbers = [row[key] for row in rows if version_of(row["cuda"])[:2] == wanted and row[key]]
    return min(numbers, key=version_of, default=None)


@functools.lru_cache(maxsize=1024)
def cuda_of_driver(driver: str) -> str | None:
    """The newest CUDA that a driver supports, as nvidia-smi prints it.

    >>> cuda_of_driver("535.104.05"), cuda_of_driver("430.64")
    ('12.2', '10.1')
    """
    branch = (version_of(driver) or (0,))[0]
    known = {row["branch"]: row["cuda_reported"] for row in table("cuda_driver")["driver_branches"]}
    known |= {row["driver_branch"]: row["cuda"] for row in table("older_builds")["toolkits"]}
    fitting = [number for number in known if number <= branch]
    return known[max(fitting)] if fitting else None


@functools.lru_cache(maxsize=1024)
def driver_runs_cuda(
    driver: str | None, driver_cuda: str | None, cuda: str, system: str = "linux"
) -> bool | None:
    """Whether a driver runs a CUDA build, by its own version or by the CUDA it reports; None where neither tells.

    >>> driver_runs_cuda("535.54.03", None, "12.4"), driver_runs_cuda(None, "9.1", "10.2")
    (True, False)
    """
    need = driver_for_cuda(cuda, system)
    if driver and version_of(driver) and need is not None:
        return at_least(driver, need.version)
    build, reported = version_of(cuda)[:2], version_of(driver_cuda)[:2]
    if not build or not reported:
        return None
    return reported[0] >= build[0] if build[0] >= 11 else reported >= build


# ---------------------------------------------------------------------------------------------- architectures


@dataclass(frozen=True)
class Build:
    """What a torch binary contains."""

    architectures: tuple[str, ...]  # sm_80, compute_90
    certain: bool


def architectures_of_build(torch: str, cuda: str, platform: str = "linux_x86_64") -> Build | None:
    """The machine code in a released torch binary, None where the tables have no such build.

    >>> architectures_of_build("2.6.0+cu126", "12.6").architectures[-1]
    'sm_90'
    """
    if re.search(r"\ba0|\+git|\.nv\d|a0\+", torch):  # a source or vendor build has whatever its builder chose
        return None
    release, tag = minor(torch), tag_of_cuda(cuda)
    for row in table("arch")["torch_builds"]:
        if (row["torch"], row["variant"], row["platform"]) == (release, tag, platform):
            return Build(
                (*row["sm"], *(row["ptx"] or ())),
                bool(row["certain"]) and row.get("ptx_certain") is not False,
            )
    older = _older_build(version_of(torch), version_of(cuda)[:2])
    if older is not None:
        return older
    return architectures_of_build(torch, cuda) if platform == "windows" else None


def builds_of_release(torch: str) -> list[Build]:
    """Every Linux x86_64 binary of a torch release.

    >>> len(builds_of_release("2.6.0")), builds_of_release("0.3.1")[0].architectures[0]
    (3, 'sm_35')
    """
    rows = table("arch")["torch_builds"]
    found = [row for row in rows if row["torch"] == minor(torch) and row["platform"] == "linux_x86_64"]
    version = version_of(torch)
    for row in table("older_builds")["torch_builds"]:
        if version_of(row["from"]) <= version < version_of(row["below"]):
            found.append(row)
    return [Build((*row["sm"], *(row["ptx"] or ())), bool(row["certain"])) for row in found]


def _older_build(torch: Version, cuda: Version) -> Build | None:
    for row in table("older_builds")["torch_builds"]:
        fits = version_of(row["from"]) <= torch < version_of(row["below"])
        if fits and cuda < version_of(row["cuda_below"]):
            return Build((*row["sm"], *row["ptx"]), bool(row["certain"]))
    return None


_INTEGRATED = {
    (5, 3),
    (6, 2),
    (7, 2),
    (8, 7),
}  # Jetson: neither run their siblings' code nor give them theirs


def code_for(architectures: Iterable[str], capability: str) -> str | None:
    """The entry of an architecture list that runs on a GPU: "sm_80", "compute_90" (PTX), or None.

    >>> code_for(["sm_80", "sm_120"], "12.1"), code_for(["sm_80"], "8.9"), code_for(["sm_75", "compute_75"], "8.6")
    ('sm_120', 'sm_80', 'compute_75')
    >>> code_for(["sm_90"], "12.0") is None
    True
    """
    gpu = version_of(capability)[:2]
    if len(gpu) < 2:
        return None
    best: tuple[int, tuple[int, int], str] | None = None
    for entry in architectures:
        parsed = parse_architecture(entry)
        if parsed is None:
            continue
        kind, number, suffix = parsed
        if _runs(kind, number, suffix, (gpu[0], gpu[1])):
            best = max(best or (-1, (0, 0), ""), (int(kind == "sm"), number, entry))
    return best[2] if best else None


def parse_architecture(entry: str) -> tuple[str, tuple[int, int], str] | None:
    """Kind, number and suffix of an entry: ("sm", (12, 0), "a") for "sm_120a"."""
    match = re.fullmatch(r"(sm|compute)_(\d{1,2})(\d)([af]?)", entry.strip())
    return (match[1], (int(match[2]), int(match[3])), match[4]) if match else None


def _runs(kind: str, code: tuple[int, int], suffix: str, gpu: tuple[int, int]) -> bool:
    if suffix == "a":
        return code == gpu
    if kind == "compute" and not suffix:
        return gpu >= code
    if (code in _INTEGRATED or gpu in _INTEGRATED) and code != gpu:
        return False
    return code[0] == gpu[0] and gpu[1] >= code[1]


def capability_facts(capability: str) -> dict[str, Any] | None:
    """The row of a compute capability: architecture, toolkits and drivers that know it, features."""
    rows = table("arch")["compute_capabilities"]
    return next((row for row in rows if row["compute_capability"] == minor(capability)), None)


# ------------------------------------------------------------------------------------------------------- GPUs


@functools.cache
def gpu_by_name(name: str) -> dict[str, Any] | None:
    """The row of a product, by the name nvidia-smi prints, old or new."""
    wanted = _bare(name)
    for row in table("gpus")["gpus"]:
        if wanted in {_bare(known) for known in (row["name"], *(row.get("aliases") or ()))}:
            found: dict[str, Any] = row
            return found
    return None


@functools.cache
def capability_of_gpu(name: str) -> str | None:
    """Compute capability by product name, also of products the table leaves out.

    >>> capability_of_gpu("GeForce RTX 3090"), capability_of_gpu("Tesla K40c"), capability_of_gpu("Radeon VII")
    ('8.6', '3.5', None)
    >>> capability_of_gpu("RTX4090"), capability_of_gpu("2080ti"), capability_of_gpu("RTX5090D")
    ('8.9', '7.5', '12.0')
    """
    row = gpu_by_name(name)
    if row is not None:
        return str(row["compute_capability"])
    if re.search(r"radeon|instinct|\bMI\d{2,3}|\bgfx|intel|\bAMD\b", name, re.I):
        return None
    spaced = spoken_name(name)
    for pattern, capability in table("older_builds")["gpu_families"]:
        if re.search(pattern, spaced, re.I):
            return str(capability)
    return None


def is_geforce(name: str) -> bool:
    """Whether a product is a consumer board, which forward compatibility leaves out."""
    name = spoken_name(re.sub(r"\(rev [^()]{1,8}\)", "", name))
    if re.search(r"tesla|quadro|\bRTX A\d|\bA\d{1,3}\b|\b[HLVBP]\d{1,3}\b|RTX PRO|Ada Gen", name, re.I):
        return False
    return bool(re.search(r"geforce|\b[GR]TX\b|titan", name, re.I))


_GEFORCE_NUMBER = re.compile(
    r"(?<![\w.])((?:10[1-8]|16[56]|20[5-9]|30[5-9]|40[5-9]|50[5-9])0|9[5-8]0)(?![\w.])"
)


def spoken_name(name: str) -> str:
    """A product as its maker writes it, from how people do: "RTX3090" and "3090" are one card.

    >>> spoken_name("rtx3080ti"), spoken_name("2080ti x4"), spoken_name("Tesla_V100-32G")
    ('RTX 3080 Ti', 'RTX 2080 Ti x4', 'Tesla V100 32G')
    """
    spaced = re.sub(r"[-_]+", " ", name)
    spaced = re.sub(
        r"\b([RG]TX?|TITAN) ?(?=[AXV]?\d{3,4})", lambda match: match[1].upper() + " ", spaced, flags=re.I
    )
    spaced = re.sub(r"(?<=\d{3}) ?(?:Ti\b)", " Ti", spaced, flags=re.I)
    spaced = re.sub(r"(?<=0)(?=(?:D|SUPER|Laptop|x\d)\b)", " ", spaced, flags=re.I)
    if re.search(r"[RG]TX?\b|titan|geforce|quadro|tesla", spaced, re.I):
        return spaced
    return _GEFORCE_NUMBER.sub(
        lambda match: ("GTX " if match[1] < "2" or match[1][0] == "9" else "RTX ") + match[1], spaced, count=1
    )


def _bare(name: str) -> str:
    return re.sub(r"\b(nvidia|geforce|tesla)\b|[^a-z0-9]+", "", name.lower())


# -------------------------------------------------------------------------------------------------- companions


@dataclass(frozen=True)
class Companion:
    """The torchvision or torchaudio that belongs to a torch."""

    versions: tuple[str, ...]
    stable_from: str | None = None  # set where the companion takes any torch from this one on


def companion_of(package: str, torch: str) -> Companion | None:
    """Releases of torchvision or torchaudio that belong to a torch; None where the table does not know it.

    >>> companion_of("torchvision", "2.6.0+cu124").versions
    ('0.21.0',)
    """
    release = _release(torch)
    if release is None:
        return None
    named = release.get(package)
    versions = tuple(named) if isinstance(named, list) else ((named,) if named else ())
    if not versions:
        return None
    pin = str(release.get(f"{package}_pin") or "exact")
    return Companion(versions, pin.split(">=")[1] if ">=" in pin else None)


def torch_of_companion(package: str, version: str) -> str | None:
    """The torch release that a torchvision or torchaudio belongs to."""
    wanted = version_of(version)[:3]
    for release in (*table("torch_matrix")["releases"], *table("older_builds")["releases"]):
        named = release.get(package)
        if wanted in {version_of(text) for text in (named if isinstance(named, list) else [named])}:
            return str(release["torch"])
    return None


def _release(torch: str) -> dict[str, Any] | None:
    wanted = (*version_of(torch), 0, 0)[:3]
    for release in (*table("torch_matrix")["releases"], *table("older_builds")["releases"]):
        if version_of(release["torch"]) == wanted:
            found: dict[str, Any] = release
            return found
    return None


def cuda_variants(torch: str) -> tuple[dict[str, Any], ...]:
    """The CUDA builds that exist of a torch release: tag, cuda, cudnn, nccl."""
    release = _release(torch)
    return tuple(release.get("cuda_variants") or ()) if release else ()


def releases() -> tuple[dict[str, Any], ...]:
    """Every torch release of the matrix, oldest first."""
    return tuple(table("torch_matrix")["releases"])


def default_cuda(torch: str) -> str | None:
    """The CUDA of what `pip install torch` gave on Linux x86_64 for a release.

    >>> default_cuda("2.6.0"), default_cuda("1.2.0"), default_cuda("9.9")
    ('12.4', '10.0', None)
    """
    release = _release(torch)
    if release is None:
        return None
    if "default_cuda" in release:
        return str(release["default_cuda"])
    tag = release["pypi_default"]["linux_x86_64"]
    return next((str(row["cuda"]) for row in release["cuda_variants"] if row["tag"] == tag), None)


@functools.lru_cache(maxsize=1024)
def best_variant(
    torch: str, driver: str | None, driver_cuda: str | None, system: str = "linux"
) -> str | None:
    """The newest CUDA build ("cu126") of a torch release that a driver runs."""
    fitting = [
        row
        for row in cuda_variants(torch)
        if driver_runs_cuda(driver, driver_cuda, row["cuda"], system) is True
    ]
    best = max(fitting, key=lambda row: version_of(row["cuda"]), default=None)
    return str(best["tag"]) if best else None


# ----------------------------------------------------------------------------------------- variables, Xid, GCC


@functools.cache
def variables() -> dict[str, dict[str, Any]]:
    """Every environment variable of the table by its own name."""
    found: dict[str, dict[str, Any]] = {}
    for row in table("nccl_env")["variables"]:
        names = [name.strip() for name in row["name"].split("/")]
        heirs = [name.strip() for name in (row["replaced_by"] or "").split("/")]
        stem = names[0].rsplit("_RANK", 1)[0]
        for position, name in enumerate(names):
            heir = heirs[position] if len(heirs) == len(names) else heirs[0]
            full = name if not name.startswith("_") else stem + name
            found[full] = row | {"name": full, "replaced_by": heir or None}
    return found


def xid(code: int) -> dict[str, Any] | None:
    """Meaning, likely causes and action of an Xid code."""
    return next((row for row in table("xid")["xids"] if row["xid"] == code), None)


def gcc_bounds(cuda: str) -> tuple[int, int] | None:
    """The lowest and highest GCC major that torch's extension builder takes with a toolkit."""
    rows = table("cuda_driver")["host_compilers"]["gcc"]
    row = next((row for row in rows if row["cuda"] == minor(cuda)), None)
    return (int(row["min_major"]), int(row["max_major"])) if row else None

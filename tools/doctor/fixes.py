"""Commands to type, for the way packages are installed here."""

from __future__ import annotations

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.reading import is_nightly, is_vendor_build, system, torch_version
from phalanx.tools.facts.tables import best_variant, capability_facts, companion_of, cuda_variants, releases
from phalanx.tools.facts.versions import cuda_of_tag, minor, version_of

INDEX = "https://download.pytorch.org/whl"


def installer(facts: Facts) -> str:
    """ "pip", "conda" or "uv"."""
    return (facts.python and facts.python.installer) or "pip"


def pip_install(facts: Facts, *requirements: str, index: str | None = None, force: bool = False) -> str:
    """An install line; torch's own wheels come from its index for conda users too, since conda's channel ended."""
    words = " ".join(f"'{word}'" if any(mark in word for mark in "<>[ ") else word for word in requirements)
    if installer(facts) == "uv":
        return f"uv pip install {'--reinstall ' if force else ''}{words}" + (
            f" --index-url {INDEX}/{index}" if index else ""
        )
    line = f"python -m pip install {'--force-reinstall ' if force else ''}{words}"
    return line + (f" --index-url {INDEX}/{index}" if index else "")


def pip_uninstall(facts: Facts, *names: str) -> str:
    """A line that takes packages away."""
    if installer(facts) == "uv":
        return f"uv pip uninstall {' '.join(names)}"
    return f"python -m pip uninstall -y {' '.join(names)}"


def fitting_variant(facts: Facts, release: str) -> str | None:
    """The newest build of a torch release that this machine's driver runs and its GPUs are in."""
    driver = facts.driver
    if driver is None or not (driver.version or driver.cuda):
        return None
    return best_variant(release, driver.version, driver.cuda, system(facts))


def release_of(version: str | None) -> str | None:
    """ "2.6.0" for "2.6.0+cu126"; None for nightlies and source builds."""
    if version is None or is_nightly(version) or is_vendor_build(version):
        return None
    return ".".join(str(part) for part in version_of(version)[:3])


def install_cuda_torch(facts: Facts) -> tuple[str, ...]:
    """Install the CUDA build of the same torch, else of the newest that this driver runs."""
    release = release_of(torch_version(facts))
    tag = None
    if release and cuda_variants(release):
        tag = fitting_variant(facts, release) or str(cuda_variants(release)[-1]["tag"])
    if tag is None:
        release, tag = newest_for(facts)
    return (torch_line(facts, release, tag),)


def newest_for(facts: Facts, oldest_cuda: str = "0") -> tuple[str, str]:
    """The newest torch release, and its CUDA tag, that this driver runs; with a CUDA of at least ``oldest_cuda``."""
    floor = version_of(oldest_cuda)
    for row in reversed(releases()):
        if row["released"] is None and not row.get("certain", True):
            continue
        tags = [tag for tag in row["cuda_variants"] if version_of(tag["cuda"]) >= floor]
        tag = fitting_variant(facts, row["torch"])
        if tag is not None and tag in {entry["tag"] for entry in tags}:
            return str(row["torch"]), tag
    latest = next(row for row in reversed(releases()) if row.get("certain", True))
    tags = [entry for entry in latest["cuda_variants"] if entry["on_pypi"]] or latest["cuda_variants"]
    return str(latest["torch"]), str(tags[0]["tag"])


def torch_line(facts: Facts, release: str | None, tag: str) -> str:
    """Install torch with the companions that belong to it, all from one index."""
    names = [f"torch=={release}" if release else "torch"]
    for name, present in (("torchvision", facts.torchvision), ("torchaudio", facts.torchaudio)):
        companion = companion_of(name, release) if release else None
        if present is not None and present.version is not None:
            names.append(f"{name}=={companion.versions[-1]}" if companion else name)
    return pip_install(facts, *names, index=tag, force=True)


def cuda_for_capability(capability: str) -> str:
    """The first CUDA whose compiler knows a GPU."""
    row = capability_facts(capability)
    return minor(row["min_cuda"]) if row else "12.8"


def tag_of(version: str | None) -> str | None:
    """The index a version's tag names: "cu126"."""
    cuda = cuda_of_tag(version)
    return None if cuda is None else ("cpu" if cuda == "" else "cu" + cuda.replace(".", ""))

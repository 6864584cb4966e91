"""torchvision, torchaudio, compiled extensions and libraries on top: each built for one torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.tools.doctor.facts import CompanionFacts, Facts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.fixes import INDEX, pip_install, release_of, tag_of
from phalanx.tools.doctor.judging import fail, fine, proven, suspected, symptom_lines, symptom_weight, warn
from phalanx.tools.doctor.reading import (
    cuda_works,
    is_nightly,
    is_vendor_build,
    package_version,
    same_cuda,
    says,
    short_cuda,
    torch_cuda,
    torch_version,
)
from phalanx.tools.facts.tables import Companion, companion_of, cuda_variants, torch_of_companion
from phalanx.tools.facts.versions import at_least, minor, tag_of_cuda, version_of

_IDS = {"torchvision": "torch-torchvision-mismatch", "torchaudio": "torch-torchaudio-mismatch"}
# Lowest torch (second) from a release of a library on (first); what is below fails at import or first use.
_NEEDS: dict[str, tuple[tuple[str, str], ...]] = {
    "transformers": (("4.48", "2.0"), ("4.51", "2.1"), ("4.56", "2.2")),
    "accelerate": (("1.3", "2.0"),),
}
_TOO_OLD_FOR_TORCH = {
    "deepspeed": ("0.14.4", "2.4"),
    "xformers": ("0.0.20", "2.0"),
}  # below the first, torch from the second on breaks it


def check_torchvision(facts: Facts) -> Iterator[Finding]:
    """torchvision's operators are compiled for one torch release."""
    yield from _check_companion(facts, "torchvision", facts.torchvision)


def check_torchaudio(facts: Facts) -> Iterator[Finding]:
    """torchaudio too, up to 2.10."""
    yield from _check_companion(facts, "torchaudio", facts.torchaudio)


def _check_companion(facts: Facts, name: str, companion: CompanionFacts | None) -> Iterator[Finding]:
    cause, torch = _IDS[name], torch_version(facts)
    version = companion.version if companion else None
    right = companion_of(name, torch) if torch and release_of(torch) else None
    verdict = _pair(version, torch, right)
    title = f"{name} {version or ''} is not the release that belongs to torch {torch or ''}".replace(
        "  ", " "
    )
    fix = _pair_fix(facts, name, right)
    if verdict == "wrong" and right:
        evidence = (
            f"torch {torch} goes with {name} {' or '.join(right.versions)}",
            f"installed: {name} {version}, built for torch {torch_of_companion(name, version or '') or 'another release'}",
        )
        error = (companion.error or "")[-200:] if companion else ""
        yield proven(facts, cause, title, (*evidence, error), fix, 87)
        return
    if verdict == "patch" and right and version:
        yield warn(
            cause,
            title,
            (f"torch {torch} goes with {name} {' or '.join(right.versions)}", f"installed: {name} {version}"),
            fix,
            46,
        )
    elif verdict == "right":
        yield fine(cause, f"{name} {version} belongs to torch {torch}")
    if (
        verdict == "right"
        and name == "torchvision"
        and symptom_weight(facts, cause) >= 70
        and not _alike(facts)
    ):
        line = symptom_lines(facts, cause)
        yield fail(
            "torch-torchvision-cuda-mismatch",
            "torch and torchvision are of one release but of different builds",
            (*line, f"torch {torch}, torchvision {version}"),
            fix,
            92,
        )
        return
    found = suspected(
        facts,
        cause,
        f"{name} is not the release that belongs to this torch",
        fix,
        refuted=verdict == "right" and symptom_weight(facts, cause) < 84,
    )
    if found:
        yield found


def _alike(facts: Facts) -> bool:
    """Whether both builds are known to be of one CUDA, so that only their files can be at fault."""
    own = facts.torchvision.cuda if facts.torchvision else None
    return own is not None and own != "" and same_cuda(own, torch_cuda(facts))


def _pair(version: str | None, torch: str | None, right: Companion | None) -> str:
    """ "right", "patch" (same minor release), "wrong", or "" where nothing can be said."""
    if not version or not torch or right is None or is_vendor_build(version) or is_nightly(version):
        return ""
    if version_of(version)[:3] in {version_of(text) for text in right.versions}:
        return "right"
    if right.stable_from and at_least(version, right.versions[-1]):
        return "right"
    if version_of(version)[:2] in {version_of(text)[:2] for text in right.versions}:
        return "patch"
    owner = torch_of_companion("torchaudio" if version_of(version)[0] else "torchvision", version)
    stable = companion_of("torchaudio" if version_of(version)[0] else "torchvision", owner) if owner else None
    if stable and stable.stable_from and at_least(torch, stable.stable_from):
        return "right"
    return "wrong"


def _pair_fix(facts: Facts, name: str, right: Companion | None) -> tuple[str, ...]:
    torch = torch_version(facts)
    release, cuda = release_of(torch), torch_cuda(facts)
    tag = tag_of(torch) or (tag_of_cuda(cuda) if cuda is not None else None)
    if release and right:
        known = {row["tag"] for row in cuda_variants(release)} | {"cpu"}
        index = tag if tag in known or not cuda_variants(release) else None
        return (
            pip_install(facts, f"torch=={release}", f"{name}=={right.versions[-1]}", index=index, force=True),
        )
    if torch and is_nightly(torch):
        return (
            f"{pip_install(facts, '--pre', 'torch', name, force=True)} --index-url {INDEX}/nightly/{tag or 'cu130'}",
        )
    return (pip_install(facts, "torch", name, index=tag, force=True),)


def check_torchvision_cuda(facts: Facts) -> Finding | None:
    """Both must come from one CUDA build."""
    own = facts.torchvision.cuda if facts.torchvision else None
    cuda = torch_cuda(facts)
    right = companion_of("torchvision", torch_version(facts) or "")
    fix = _pair_fix(facts, "torchvision", right)
    cause, title = "torch-torchvision-cuda-mismatch", "torch and torchvision come from different CUDA builds"
    if own and cuda and not same_cuda(own, cuda):
        return proven(
            facts,
            cause,
            title,
            (f"torch: CUDA {short_cuda(cuda)}", f"torchvision: CUDA {short_cuda(own)}"),
            fix,
            89,
        )
    if _from_two_indexes(facts):
        evidence = (
            f"torch {torch_version(facts)}",
            f"torchvision {facts.torchvision.version if facts.torchvision else ''} (without a CUDA tag: the registry's build)",
        )
        return warn(cause, title, evidence, fix, max(42, symptom_weight(facts, cause)))
    other = _other_major(facts)
    if other:
        return fail(
            cause,
            "an extension is built for another CUDA than torch",
            (other, f"torch: CUDA {short_cuda(cuda)}"),
            (f"reinstall it for torch {torch_version(facts) or ''} with CUDA {short_cuda(cuda)}", *fix),
            93,
        )
    return suspected(facts, cause, title, fix, refuted=bool(own and cuda and same_cuda(own, cuda)))


def _from_two_indexes(facts: Facts) -> bool:
    """An old torch with a CUDA tag came from the project's index, a torchvision without one from the registry."""
    torch, companion = torch_version(facts) or "", facts.torchvision
    tagged = bool(re.search(r"\+cu\d", torch)) and version_of(torch) < (1, 8)
    return bool(
        tagged
        and companion
        and companion.version
        and "+" not in companion.version
        and cuda_works(facts) is not True
    )


def _other_major(facts: Facts) -> str | None:
    """A line that misses the CUDA runtime of another major number than torch's."""
    cuda = version_of(torch_cuda(facts))
    for line in symptom_lines(facts, "cuda-libs-not-installed"):
        match = re.search(r"lib(?:cudart|cublas|cusparse|nvrtc)\.so\.(\d{1,2})", line)
        if match and cuda and int(match[1]) != cuda[0]:
            return line
    return None


def check_torchvision_cpu(facts: Facts) -> Finding | None:
    """A CPU torchvision has no CUDA operators (nms, roi_align) for a CUDA torch."""
    own = facts.torchvision.cuda if facts.torchvision else None
    right = companion_of("torchvision", torch_version(facts) or "")
    fix = _pair_fix(facts, "torchvision", right)
    cause, title = "torchvision-cpu-build", "a CPU build of torchvision beside a CUDA build of torch"
    if own == "" and torch_cuda(facts):
        return proven(
            facts, cause, title, (f"torch: CUDA {short_cuda(torch_cuda(facts))}", "torchvision: CPU"), fix, 90
        )
    if (
        own == ""
        and torch_cuda(facts) is None
        and (symptom_weight(facts, cause) or says(facts, r"\bgpu|cuda"))
    ):
        return fail(cause, title, ("torchvision is a CPU build", *symptom_lines(facts, cause)), fix, 80)
    if own == "" and torch_cuda(facts) is None and torch_version(facts) is None:
        return warn(cause, title, ("torchvision is a CPU build",), fix, 47)
    return suspected(facts, cause, title, fix, refuted=bool(own))


def check_extensions(facts: Facts) -> Finding | None:
    """A compiled extension holds the layout of one torch, and of one C++ ABI."""
    fix = (
        "install the extension's wheel for this torch, Python and C++ ABI, or build it here: "
        + pip_install(
            facts, "--no-build-isolation", "--no-cache-dir", "--no-binary :all: <package>", force=True
        ),
        "python -c 'import torch; print(torch.__version__, torch.version.cuda, torch._C._GLIBCXX_USE_CXX11_ABI)' names what to look for",
    )
    title = "a compiled extension was built for another torch"
    found = suspected(facts, "extension-abi-mismatch", title, fix)
    version, torch = package_version(facts, "flash-attn"), torch_version(facts)
    if (
        found is None
        and version
        and torch
        and not facts.live
        and not at_least(version, "2.8")
        and at_least(torch, "2.7")
    ):
        # Its wheels up to 2.7.4 have the old C++ ABI, torch from 2.7 on the new one; one built here is fine.
        return warn("extension-abi-mismatch", title, (f"flash-attn {version}", f"torch {torch}"), fix, 42)
    return found


def check_library_fit(facts: Facts) -> Iterator[Finding]:
    """accelerate, deepspeed and transformers against this torch."""
    torch = torch_version(facts)
    if not torch:
        return
    for name, needs in _NEEDS.items():
        version = package_version(facts, name)
        for since, lowest in reversed(needs) if version else ():
            if at_least(version, since) and not at_least(torch, lowest):
                yield warn(
                    f"{name}-needs-newer-torch",
                    f"{name} {version} needs torch {lowest} or newer",
                    (f"torch {torch}",),
                    (pip_install(facts, f"{name}<{since}"), f"or torch {lowest} or newer"),
                    48,
                )
                break
    for name, (fixed, since) in _TOO_OLD_FOR_TORCH.items():
        version = package_version(facts, name)
        if version and not at_least(version, fixed) and at_least(torch, since):
            yield warn(
                f"{name}-too-old-for-torch",
                f"{name} {version} does not know torch {minor(torch)}",
                (f"torch {torch}",),
                (pip_install(facts, f"{name}>={fixed}"),),
                48,
            )
    accelerate, transformers = package_version(facts, "accelerate"), package_version(facts, "transformers")
    if accelerate and transformers and at_least(transformers, "4.46") and not at_least(accelerate, "0.26"):
        yield warn(
            "accelerate-too-old-for-transformers",
            f"transformers {transformers} trains with accelerate 0.26 or newer",
            (f"accelerate {accelerate}",),
            (pip_install(facts, "accelerate>=0.26"),),
            44,
        )

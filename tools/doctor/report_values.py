"""What stands behind a label, read into a draft of facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from phalanx.tools.doctor.draft import Draft
from phalanx.tools.doctor.quantities import number, size_bytes, truth
from phalanx.tools.facts.versions import cuda_of_tag, version_of

_NOTHING = ("", "none", "n/a", "na", "null", "could not collect", "not available", "unknown", "?", "-", "not found",
            "not installed", "no response", "false", "no")  # fmt: skip
_TORCH = re.compile(r"\d{1,2}\.\d{1,3}(?:\.\d{1,3})?[\w.+-]{0,60}")
_CONTAINERS = (
    "docker",
    "podman",
    "singularity",
    "apptainer",
    "kubernetes",
    "k8s",
    "enroot",
    "lxc",
    "container",
)


def known(value: Any) -> str | None:
    """The value as text, None where the report says that there is none."""
    if value is None or isinstance(value, (bool, dict, list)):
        return None
    text = str(value).strip()
    return None if text.lower() in _NOTHING else text


def items(value: Any) -> list[str]:
    """A list, or the parts of a text that lists things."""
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value if item is not None]
    return [part.strip() for part in re.split(r"[,;\n]|\s/\s", str(value or "")) if part.strip()]


def version_text(value: Any) -> str | None:
    """The first version number in a value, as it was written."""
    text = known(value)
    match = re.search(r"\d{1,6}(?:\.\d{1,6}){0,4}", text or "")
    return match.group() if match else None


def torch_version(draft: Draft, value: Any) -> None:
    """ "2.4.0+cu121 (True)", "1.10.0 py3.7_cuda10.2_cudnn7.6.5_0", "1.5.1+cu101 (central) and a newer one"."""
    text = known(value)
    match = _TORCH.search(text or "")
    if text is None or match is None:
        return
    version = match.group().rstrip(".,-")
    draft.put("torch.version", version)
    draft.hint("torch.installed", True)
    tag = cuda_of_tag(version)
    if tag is not None:
        draft.hint("torch.cuda", tag)
    build = re.search(r"cuda(\d{1,2}\.\d)|_(cpu)_", text)
    if build:
        draft.hint("torch.cuda", build[1] or "")
    rocm = re.search(r"rocm(\d{1,2}\.\d)", text)
    if rocm:
        draft.hint("torch.hip", rocm[1])
        draft.hint("torch.cuda", "")
    answer = re.search(r"\((true|false|cuda|cpu|na|xpu|mps)\)", text, re.I)
    if answer:
        draft.hint("torch.cuda_available", answer[1].lower() in ("true", "cuda"))


def torch_cuda(draft: Draft, value: Any) -> None:
    """The CUDA of the build; "Could not collect" is how the first collect_env says that there is none."""
    text = str(value if value is not None else "").strip()
    if re.match(r"\d", text):
        draft.put("torch.cuda", version_text(text) if not re.search(r"\.x", text) else text.split()[0])
    elif value is None or text.lower() in ("none", "could not collect", "n/a", "cpu", "no"):
        draft.put("torch.cuda", "")


def torch_hip(draft: Draft, value: Any) -> None:
    """The ROCm of the build."""
    draft.put("torch.hip", version_text(value) if known(value) else "")


def arch_list(draft: Draft, value: Any) -> None:
    """Architectures, in any list form."""
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    entries = re.findall(r"\b(?:sm|compute)_\d{2,3}[af]?\b|\bgfx[0-9a-f]{3,4}\b", text)
    if entries:
        draft.put("torch.arch_list", list(dict.fromkeys(entries)))


def operating_system(draft: Draft, value: Any) -> None:
    """Name of the operating system."""
    text = known(value)
    if text:
        draft.put("platform.os", text)
        _system(draft, text)


def _system(draft: Draft, text: str) -> None:
    words = text.lower()
    if re.search(r"\bwsl|microsoft-standard|windows subsystem", words):
        draft.hint("platform.wsl", True)
        draft.hint("platform.system", "linux")
    elif "windows" in words or re.search(r"\bwin(?:32|10|11|dows)?\b", words):
        draft.hint("platform.system", "windows")
    elif re.search(r"mac ?os|darwin|os ?x\b|apple", words):
        draft.hint("platform.system", "darwin")
    elif re.search(
        r"linux|ubuntu|debian|cent ?os|red hat|rhel|fedora|suse|arch\b|arch-based|rocky|alma|amazon|pop!|mint|manjaro|gentoo|nixos|wsl",
        words,
    ):
        draft.hint("platform.system", "linux")
    machine = re.search(r"\b(x86_64|amd64|aarch64|arm64|ppc64le|64-bit arm)\b", words)
    if machine:
        draft.hint("platform.machine", machine[1])
    if re.search(r"tegra|jetson|l4t|jetpack", words):
        draft.hint("platform.jetson", True)
    libc = re.search(r"glibc(\d\.\d{1,2})", words)
    if libc:
        draft.hint("platform.libc", libc[1])


def platform(draft: Draft, value: Any) -> None:
    """ "Linux-5.15.0-x86_64-with-glibc2.35", or what people call a platform: "docker nvidia/cuda:10.1-devel"."""
    text = known(value)
    if text is None:
        return
    _system(draft, text)
    kernel(draft, text)
    container(draft, text)
    image(draft, text)
    docker_options(draft, text)
    draft.hint("platform.os", text)


def kernel(draft: Draft, value: Any) -> None:
    """A kernel's release."""
    match = re.search(r"\b(\d\.\d{1,2}\.\d{1,3}-[\w.+-]{1,60})", str(value or ""))
    if match:
        draft.hint("platform.kernel", match[1])
        _system(draft, str(value))


def gcc(draft: Draft, value: Any) -> None:
    """ "(Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0": the last number is the version."""
    text = known(value)
    if text is None:
        draft.hint("compilers.gcc", "" if str(value).lower() == "could not collect" else None)
        return
    versions = re.findall(
        r"\b\d{1,2}\.\d{1,2}\.\d{1,2}\b", re.sub(r"\([^()]{0,120}\)", " ", text)
    ) or re.findall(r"\b\d{1,2}\.\d{1,2}(?:\.\d{1,2})?\b|\b\d{1,2}\b", text)
    if versions:
        draft.put("compilers.gcc", versions[0])


def clang(draft: Draft, value: Any) -> None:
    """Clang's version."""
    draft.put("compilers.clang", version_text(value))


def python_version(draft: Draft, value: Any) -> None:
    """ "3.10.12 (main, ...) [GCC 11.4.0] (64-bit runtime)"."""
    text = known(value)
    if text is None:
        return
    draft.put("python.version", version_text(text))
    if re.search(r"conda", text, re.I):
        draft.hint("python.installer", "conda")


def installer(draft: Draft, value: Any) -> None:
    """What packages were installed with."""
    text = known(value) or ""
    match = re.search(r"\b(conda|mamba|uv|poetry|pip)", text, re.I)
    if match:
        word = match[1].lower()
        draft.put("python.installer", {"mamba": "conda", "poetry": "pip"}.get(word, word))
    if "environment" in text or "source" in text:
        draft.messages.append(f"install: {text}")


def nvcc(draft: Draft, value: Any) -> None:
    """The toolkit's version; collect_env calls it the CUDA runtime version."""
    if known(value) is None:
        return
    draft.put("compilers.nvcc", version_text(str(value).replace("V", " ")))


def driver(draft: Draft, value: Any) -> None:
    """The driver's version; on a ROCm machine it is AMD's, which no table here judges."""
    text = known(value)
    if text is None:
        return
    version = version_text(text)
    if version and version_of(version)[0] >= 300:
        draft.put("driver.version", version)
    elif version and 7 <= version_of(version)[0] <= 20 and re.fullmatch(r"\d{1,2}\.\d", text):
        draft.hint("driver.cuda", version)
    cuda = re.search(r"cuda[ :]{1,3}(\d{1,2}\.\d)", text, re.I)
    if cuda:
        draft.hint("driver.cuda", cuda[1])


def driver_cuda(draft: Draft, value: Any) -> None:
    """The newest CUDA of a driver, or the driver's own number under the same name."""
    version = version_text(value)
    if version and version_of(version)[0] >= 100:
        driver(draft, value)
    else:
        draft.put("driver.cuda", version)


def driver_library(draft: Draft, value: Any) -> None:
    """The driver's libraries in user space."""
    version = version_text(value)
    if version and version_of(version)[0] >= 300:
        draft.put("driver.user_version", version)


def cudnn(draft: Draft, value: Any) -> None:
    """A version, or collect_env's list of library files."""
    text = known(value)
    if text is None or "/" in text or "\\" in text:
        return
    draft.put("torch.cudnn", version_text(text))


def nccl(draft: Draft, value: Any) -> None:
    """ "2.14.3+cuda11.8", or the tuple torch gives."""
    text = ".".join(str(part) for part in value) if isinstance(value, (list, tuple)) else str(value)
    text = re.sub(r",\s?", ".", text)
    draft.put("torch.nccl", version_text(text))
    cuda = re.search(r"\+cuda(\d{1,2}\.\d)", text)
    if cuda:
        draft.hint("torch.cuda", cuda[1])


def _companion(name: str) -> Callable[[Draft, Any], None]:
    def reader(draft: Draft, value: Any) -> None:
        text = known(value)
        match = _TORCH.search(text or "")
        if match is None:
            return
        draft.put(f"{name}.version", match.group().rstrip(".,-"))
        tag = cuda_of_tag(match.group())
        if tag is not None:
            draft.hint(f"{name}.cuda", tag)

    return reader


def _companion_cuda(name: str) -> Callable[[Draft, Any], None]:
    def reader(draft: Draft, value: Any) -> None:
        text = str(value if value is not None else "")
        found = version_text(text.replace("cu", " ")) if re.search(r"\d", text) else None
        tag = re.search(r"cu(\d{2,3})\b", text)
        if tag:
            draft.put(f"{name}.cuda", f"{tag[1][:-1]}.{tag[1][-1]}")
        elif found:
            draft.put(f"{name}.cuda", found)
        elif re.search(r"\bcpu\b|none", text, re.I):
            draft.put(f"{name}.cuda", "")

    return reader


torchvision = _companion("torchvision")
torchaudio = _companion("torchaudio")
torchvision_cuda = _companion_cuda("torchvision")
torchaudio_cuda = _companion_cuda("torchaudio")


def container(draft: Draft, value: Any) -> None:
    """Which container."""
    if value is True:
        draft.hint("container.kind", "container")
    text = known(value) or ""
    kind = next((name for name in _CONTAINERS if re.search(rf"\b{name}", text, re.I)), None)
    if kind:
        draft.hint("container.kind", kind)


def image(draft: Draft, value: Any) -> None:
    """The image, and the CUDA in its name."""
    match = re.search(r"[\w./-]{0,60}(?:cuda|pytorch)[\w./-]{0,40}:[\w.-]{1,60}", str(value or ""))
    if match is None:
        return
    draft.hint("container.image", match.group())
    draft.hint("container.kind", "docker")
    cuda = re.search(r"cuda:?(\d{1,2}\.\d)", match.group())
    if cuda:
        draft.hint("container.cuda", cuda[1])


def docker_options(draft: Draft, text: str) -> None:
    """What a `docker run` line says."""
    if re.search(r"\bdocker\b|\bpodman\b|nvidia-docker", text):
        draft.hint("container.kind", "docker")
    shm = re.search(r"--shm-size[= ]{1,2}['\"]?(\d{1,12}\s?[kmgt]?)", text, re.I)
    if shm:
        draft.hint("limits.shm_total_bytes", size_bytes(shm[1]))


def shm(draft: Draft, value: Any) -> None:
    """ "64M (docker default)", "1.0G, 87% used"."""
    total = size_bytes(value)
    if total is None or total < 0:
        return
    draft.put("limits.shm_total_bytes", total)
    used = re.search(r"(\d{1,3})\s?%", str(value))
    if used:
        draft.put("limits.shm_used_bytes", total * int(used[1]) // 100)


def fabric_manager(draft: Draft, value: Any) -> None:
    """The service's state."""
    words = str(value).lower()
    state = next(
        (
            name
            for name in ("inactive", "failed", "not running", "absent", "not installed", "dead")
            if name in words
        ),
        None,
    )
    if state is None and ("active" in words or "running" in words):
        state = "active"
    draft.put(
        "driver.fabric_manager",
        {"not running": "inactive", "dead": "inactive", "not installed": "absent"}.get(state or "", state),
    )


def iommu(draft: Draft, value: Any) -> None:
    """The IOMMU's mode."""
    words = str(value).lower()
    mode = "passthrough" if re.search(r"\bpt\b|passthrough", words) else None
    draft.put(
        "topology.iommu",
        mode or {True: "translating", False: "off"}.get(bool(truth(words)))
        if truth(words) is not None or mode
        else None,
    )


def jetson(draft: Draft, value: Any) -> None:
    """A JetPack or L4T version says that this is a Jetson."""
    if value is True or known(value):
        draft.put("platform.jetson", True)


def host_addresses(draft: Draft, value: Any) -> None:
    """What the host's own name resolves to."""
    found = re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|::1\b", " ".join(items(value)))
    if found:
        draft.put("network.host_addresses", found)


def interconnect(draft: Draft, value: Any) -> None:
    """InfiniBand or RoCE between the nodes."""
    if re.search(r"infiniband|\bib\b|roce|rdma", str(value), re.I):
        draft.hint("network.infiniband", [{"device": "adapter", "link_layer": "InfiniBand"}])


def libstdcxx(draft: Draft, value: Any) -> None:
    """A symbol version (3.4.30) or a library's own (6.0.30)."""
    text = version_text(value)
    if text and text.startswith("3.4"):
        draft.put("platform.libstdcxx", text)
    if text:
        draft.messages.append(f"libstdc++: {value}")


def libraries(draft: Draft, value: Any) -> None:
    """Mapped libraries are kept as lines that the symptoms read."""
    draft.messages.extend(items(value)[:100])


def environment(draft: Draft, value: Any) -> None:
    """Environment variables, as an object or as lines."""
    if isinstance(value, Mapping):
        for name, text in value.items():
            draft.env.setdefault(str(name), "" if text is None else str(text))
        return
    platform(draft, value)
    for line in str(value or "").split("\n"):
        match = re.match(r"\s{0,8}(?:export\s)?([A-Z][A-Z0-9_]{2,60})=(.{0,2000})$", line)
        if match:
            draft.env.setdefault(match[1], match[2].strip("'\""))


def variable(name: str) -> Callable[[Draft, Any], None]:
    """A reader of one variable."""

    def reader(draft: Draft, value: Any) -> None:
        text = known(value)
        if text is not None:
            draft.env.setdefault(name, text)

    return reader


def distribution(name: str) -> Callable[[Draft, Any], None]:
    """A reader of the version of one distribution."""

    def reader(draft: Draft, value: Any) -> None:
        version = known(value)
        if version and version[0].isdigit() and not any(entry["name"] == name for entry in draft.packages):
            draft.package(name, version.split()[0])

    return reader


def packages(draft: Draft, value: Any) -> None:
    """Requirements: a list, an object of versions, or one a line."""
    if isinstance(value, Mapping):
        for name, version in value.items():
            package(draft, str(name), str(version))
        return
    for entry in items(value):
        match = re.match(r"([A-Za-z][\w.-]{1,60})\s?==\s?([\w.+!-]{1,60})", entry)
        if match:
            package(draft, match[1], match[2])


def package(draft: Draft, name: str, version: str, **more: str | None) -> None:
    """One distribution, which may also be the torch that a report names nowhere else."""
    lower = name.lower().replace("_", "-")
    draft.package(lower, version, **more)
    build = more.get("build") or ""
    if lower in ("torch", "pytorch") and version_of(version):
        draft.hint("torch.version", version)
        tag = cuda_of_tag(version)
        named = re.search(r"cuda(\d{1,2}\.\d{1,2})|(?:^|_)(cpu)_", build)
        if tag is not None or named:
            draft.hint("torch.cuda", tag if tag is not None else (named[1] if named and named[1] else ""))
    if lower in ("torchvision", "torchaudio") and version_of(version):
        draft.hint(f"{lower}.version", version)
        tag = cuda_of_tag(version)
        named = re.search(r"_cu(\d{2,3})$|(?:^|_)(cpu)(?:_|$)", build)
        if tag is not None:
            draft.hint(f"{lower}.cuda", tag)
        elif named:
            draft.hint(f"{lower}.cuda", f"{named[1][:-1]}.{named[1][-1]}" if named[1] else "")


def kernel_log(draft: Draft, value: Any) -> None:
    """Lines of the kernel's log."""
    lines: Iterable[str] = value if isinstance(value, (list, tuple)) else str(value).split("\n")
    draft.kernel_log.extend(str(line)[:500] for line in lines if str(line).strip())


def count_of(value: Any) -> int | None:
    """A whole number."""
    return number(value)

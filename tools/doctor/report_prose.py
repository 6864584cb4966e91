"""Facts inside sentences: what warnings, tracebacks and people say in passing."""

from __future__ import annotations

import re
from collections.abc import Callable

from phalanx.tools.doctor import report_values as read
from phalanx.tools.doctor.draft import Draft

Reader = Callable[[Draft, re.Match[str]], None]


def _found_driver(draft: Draft, match: re.Match[str]) -> None:
    """torch prints the CUDA of a driver that is too old as one number: 9010 is 9.1."""
    number = int(match[1])
    draft.hint("driver.cuda", f"{number // 1000}.{number % 1000 // 10}")


def _incompatible(draft: Draft, match: re.Match[str]) -> None:
    """ "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with ..."."""
    number = match[2]
    name = match[1].strip()
    capability = f"{number[:-1]}.{number[-1]}"
    known = next((gpu for gpu in draft.gpus if gpu.get("name", "") in (name, "")), None)
    if known is None:
        draft.gpu(None, name=name, capability=capability)
    else:
        known.setdefault("capability", capability)


def _too_old(draft: Draft, match: re.Match[str]) -> None:
    """ "Found GPU0 GeForce GT 710 which is of cuda capability 3.5"."""
    draft.gpu(int(match[1]), name=match[2].strip(), capability=match[3])


def _archs(draft: Draft, match: re.Match[str]) -> None:
    found = re.findall(r"(?:sm|compute)_\d{2,3}[af]?|gfx[0-9a-f]{3,4}", match.group())
    draft.put("torch.arch_list", list(dict.fromkeys(found)))


def _built_for(draft: Draft, match: re.Match[str]) -> None:
    """Newer torches list one capability of the build a line, under the warning."""
    known = draft.get("torch.arch_list") or []
    draft.put("torch.arch_list", known)
    known.append(f"sm_{match[1].replace('.', '')}")


def _conda_cuda(draft: Draft, match: re.Match[str]) -> None:
    """ "conda install pytorch cudatoolkit=11.3": the CUDA that was asked for, where nothing says what came."""
    if not draft.get("torch.version"):
        draft.hint("torch.cuda", match[1])


def _gencode(draft: Draft, match: re.Match[str]) -> None:
    """torch.__config__.show() lists what it was compiled for."""
    found = re.findall(r"code=((?:sm|compute)_\d{2,3}[af]?)", match.string)
    draft.put("torch.arch_list", list(dict.fromkeys(found)))


def _put(path: str, group: int = 1) -> Reader:
    def reader(draft: Draft, match: re.Match[str]) -> None:
        draft.hint(path, match[group])

    return reader


def _torch(draft: Draft, match: re.Match[str]) -> None:
    if not draft.get("torch.version"):
        read.torch_version(draft, match[1])


def _detected_nvcc(draft: Draft, match: re.Match[str]) -> None:
    draft.hint("compilers.nvcc", match[1])


def _compiled_with(draft: Draft, match: re.Match[str]) -> None:
    draft.hint("torch.cuda", match[1])


def _different_cuda(draft: Draft, match: re.Match[str]) -> None:
    draft.hint("torch.cuda", match[1])
    draft.hint("torchvision.cuda", match[2])


def _cudnn(draft: Draft, match: re.Match[str]) -> None:
    draft.hint("torch.cudnn", re.sub(r",\s?", ".", match[1]))
    draft.hint("torch.cudnn_loaded", re.sub(r",\s?", ".", match[2]))


def _numpy(draft: Draft, match: re.Match[str]) -> None:
    if not any(package["name"] == "numpy" for package in draft.packages):
        draft.package("numpy", match[1])


def _docker(draft: Draft, match: re.Match[str]) -> None:
    read.docker_options(draft, match.string)
    read.image(draft, match.string)


def _wsl(draft: Draft, match: re.Match[str]) -> None:
    draft.hint("platform.wsl", True)
    draft.hint("platform.system", "linux")


def _printed(draft: Draft, match: re.Match[str]) -> None:
    """ "2.8.0+cpu None False": what print(torch.__version__, torch.version.cuda, ...) leaves."""
    if not draft.get("torch.version"):
        read.torch_version(draft, match[1])
        if match[2]:
            read.torch_cuda(draft, match[2])
        draft.hint("torch.cuda_available", {"True": True, "False": False}.get(match[3] or ""))


def _gfx(draft: Draft, match: re.Match[str]) -> None:
    if not draft.gpus:
        draft.gpu(None, gfx=match[0])


def _container(draft: Draft, match: re.Match[str]) -> None:
    read.container(draft, match.group())


_INSIDE: tuple[tuple[re.Pattern[str], Reader], ...] = tuple(
    (re.compile(pattern, re.I), reader)
    for pattern, reader in (
        (r"too old \(found version (\d{4,5})\)", _found_driver),
        (r"([A-Z][\w .()-]{2,60}) with CUDA capability sm_(\d{2,3}) is not compatible", _incompatible),
        (r"Found GPU(\d{1,2}) ([\w .()-]{3,60}?) which is of (?:cuda capability|compute capability \(CC\)) (\d{1,2}\.\d)", _too_old),
        (r"(?:install supports CUDA capabilities|get_arch_list|arch_list)[^\n]{0,20}(?:[\s,'\"\[(]{1,6}(?:sm|compute)_\d{2,3}[af]?){1,30}", _archs),
        (r"\[?'sm_\d{2,3}[af]?'(?:, ?'(?:sm|compute)_\d{2,3}[af]?'){1,30}", _archs),
        (r"(\d{1,2}\.\d) which supports hardware CC", _built_for),
        (r"(?:conda|mamba) install .{0,120}(?:cudatoolkit|pytorch-cuda)=(\d{1,2}\.\d)", _conda_cuda),
        (r"NVCC architecture flags:.{0,40}arch=compute_", _gencode),
        (r"^\s{0,8}- (?:Built with )?CUDA Runtime (\d{1,2}\.\d)", _compiled_with),
        (r"detected CUDA version \((\d{1,2}\.\d)\) mismatches", _detected_nvcc),
        (r"used to compile\s{0,6}PyTorch \((\d{1,2}\.\d)\)", _compiled_with),
        (r"PyTorch has CUDA Version=(\d{1,2}\.\d) and torchvision has CUDA Version=(\d{1,2}\.\d)", _different_cuda),
        (r"compiled\s{1,4}against \((\d{1,2}, ?\d{1,2}, ?\d{1,2})\) but (?:found runtime version|linked against) \((\d{1,2}, ?\d{1,2}, ?\d{1,2})\)", _cudnn),
        (r"cannot be run in\s{0,4}NumPy (\d\.\d{1,2}\.\d{1,2})", _numpy),
        (r"\b(?:docker|podman|nvidia-docker) (?:run|compose)\b", _docker),
        (r"FROM (?:nvidia/cuda|pytorch/pytorch|nvcr\.io)\S{0,100}", _docker),
        (r"\b(?:wsl ?2?|windows subsystem for linux|microsoft-standard-wsl2)\b", _wsl),
        (r"\bin(?:side)? (?:a |the |my |our )?(docker|podman|singularity|apptainer|kubernetes|container|pod)\b", _container),
        (r"\bjetson\b|\bjetpack\b|\bl4t\b|-tegra\b", lambda draft, match: draft.hint("platform.jetson", True)),
        (r"^\s{0,8}'?(\d\.\d{1,2}\.\d{1,2}(?:\+cu\d{2,3}|\+cpu|\+rocm[\d.]{1,5}))'?(?: (None|\d{1,2}\.\d))?(?: (True|False))?\s{0,4}$", _printed),
        (r"\bgfx[0-9a-f]{3,4}\b", _gfx),
        (r"\b(?:py)?torch(?: version| build)?[ =:v]{1,4}(\d\.\d{1,2}(?:\.\d{1,2})?(?:\.dev\d{8})?(?:\+(?:cu\d{2,3}|cpu|rocm[\d.]{1,5}))?)", _torch),
        (r"\bdriver(?: version)?(?: is|:|=)? ?v?(\d{3}\.\d{2,3}(?:\.\d{1,2})?)\b", _put("driver.version")),
        (r"on (?:microsoft )?(windows)(?: 1[01])?\b", lambda draft, match: draft.hint("platform.system", "windows")),
    )
)  # fmt: skip
# A line can only match where one of these words is in it: most lines of a log are passed over at once.
_WORTH = re.compile(
    r"too old|architecture flags|hardware cc|conda install|mamba install|cuda runtime|not compatible|found gpu|sm_|arch_list|mismatch|used to compile|pytorch has cuda|against \(|numpy|docker|podman|"
    r"from nv|from py|wsl|windows|in(?:side)? |jetson|jetpack|l4t|tegra|gfx|torch|driver|^\s{0,8}'?\d\.\d",
    re.I,
)
_MODEL = re.compile(
    r"\b(?:NVIDIA |GeForce |Tesla |Quadro |TITAN )?(?:[RG]TX (?:A|PRO )?\d{3,4}0?(?: ?(?:Ti|SUPER|Ada|D|Laptop GPU|Max-Q|M))*|"
    r"(?:Tesla |Quadro |NVIDIA )(?:[ABHKLMPTV]|GB|RTX )\d{1,4}\w{0,2}(?:-\w{1,8}){0,3}|[ABHV][12]00|GeForce \w{2,5} \d{3,4}M?|TITAN (?:RTX|V|Xp|X)|"
    r"(?:GTX|GT) \d{3,4}M?)\b"
)


def read_prose(draft: Draft, line: str) -> None:
    """Read what a line says in passing."""
    if not _WORTH.search(line):
        return
    for pattern, reader in _INSIDE:
        match = pattern.search(line)
        if match:
            reader(draft, match)


def gpu_in_prose(lines: list[str]) -> str | None:
    """The product a person names where no tool listed any; None where several different ones are named."""
    found: set[str] = set()
    for line in lines:
        found.update(match.group().strip() for match in _MODEL.finditer(line[:500]))
        if len(found) > 1:
            return None
    return next(iter(found), None)

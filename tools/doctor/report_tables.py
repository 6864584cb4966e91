"""Tables in pasted text: nvidia-smi, its topology, pip and conda lists, df, ulimit, ip."""

from __future__ import annotations

import re

from phalanx.tools.doctor import report_values as read
from phalanx.tools.doctor.draft import Draft
from phalanx.tools.doctor.quantities import size_bytes

_SMI_HEADER = re.compile(r"NVIDIA-SMI[ :]{1,4}(\d{3}[\d.]{0,12}|N/A)", re.I)
_SMI_DRIVER = re.compile(r"(?:Driver|KMD) Version ?: {0,4}(\d{3}[\d.]{1,12})", re.I)
_SMI_CUDA = re.compile(r"CUDA (?:UMD )?Version ?: {0,4}(\d{1,2}\.\d|N/A|ERR!)", re.I)
_SMI_GPU = re.compile(r"^\|\s{1,4}(\d{1,2})\s{1,4}(\S.{2,60}?)\s{1,30}(On|Off|N/A|WDDM|TCC|MCDM|ERR!)\s{0,4}\|\s{0,4}([0-9A-Fa-f:.]{7,16})?\s(.{0,24})\|\s{0,24}(\S{1,6})?")  # fmt: skip
_SMI_USE = re.compile(r"^\|[^|]{0,60}\|\s{0,14}(\d{1,7})MiB\s{0,3}/\s{0,3}(\d{1,7})MiB\s{0,4}\|\s{0,8}(\d{1,3}%|N/A|ERR!)?\s{0,8}(Default|E\. Process|E\. Thread|Prohibited|N/A|ERR!)?")  # fmt: skip
_SMI_MIG = re.compile(r"^\|[^|]{0,60}\|[^|]{0,40}\|\s{0,20}(Enabled|Disabled)\*?\s{0,4}\|")
_SMI_LIST = re.compile(r"^\s{0,4}GPU (\d{1,2}): (\S.{0,80}?) \(UUID: (GPU-[0-9a-f-]{8,40})\)?")
_MIG_LIST = re.compile(
    r"^\s{0,6}MIG (\d\S{0,16})\s{1,12}Device\s{1,4}(\d{1,2}):(?: \(UUID: (MIG-[0-9A-Za-z/-]{8,60})\)?)?"
)
_TOPOLOGY = re.compile(
    r"^\s{0,4}GPU(\d{1,2})((?:[\s|]{1,8}(?:X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC|NVL|PSB)\b){1,16})"
)
_PIP_OLD = re.compile(
    r"^\s{0,6}\[(pip\d?|conda)\]\s{1,6}([A-Za-z][\w.-]{1,50})(?:==|\s{1,30}|\s?\()\(?([\w.+!-]{1,60})\)?(?:\s{1,20}(\S{1,60}))?(?:\s{1,20}(\S{1,80}))?"
)
_PIP_LINE = re.compile(
    r"^\s{0,6}(?:[-*+]\s)?([A-Za-z][\w.-]{1,50})\s?(={1,2})\s?(\d[\w.+!-]{0,60})\s{0,6}(?:[\\;#].{0,80})?$"
)
_LISTED = re.compile(
    r"^\s{0,4}([A-Za-z][\w.-]{1,50})\s{1,40}(\d[\w.+!-]{0,60})(?:\s{1,30}(\S{1,60}))?(?:\s{1,30}(\S{1,80}))?\s{0,4}$"
)
_LISTABLE = re.compile(
    r"(?:py)?torch\w{0,12}|numpy|nvidia-[\w-]{1,30}|nccl|cud\w{1,20}|cuda[\w-]{0,20}|mkl[\w-]{0,20}|triton|flash[_-]attn|"
    r"xformers|apex|deepspeed|accelerate|transformers|bitsandbytes|libstdcxx-ng|libgcc-ng|intel-openmp|pytorch-\w{1,10}|"
    r"cpuonly|vllm|lightning|pytorch-lightning|torchtriton|torch-\w{1,20}|magma-cuda\d{1,3}|gcc[\w-]{0,12}|ninja|peft|trl|datasets|safetensors"
)  # fmt: skip
_DF = re.compile(
    r"^(\S{1,80})\s{1,30}(?:([a-z]\w{1,12})\s{1,20})?([\d.]{1,12}[KMGTP]?i?)\s{1,20}([\d.]{1,12}[KMGTP]?i?)\s{1,20}(-|[\d.]{1,12}[KMGTP]?i?)\s{1,20}(\d{1,3})%\s{1,20}(/\S{0,120})$"
)
_ULIMIT = re.compile(
    r"^(max locked memory|open files|max user processes|stack size)\s{1,40}\((?:(\w{1,8}), )?-\w\)\s{1,20}(\S{1,20})"
)
_NVCC = re.compile(r"Cuda compilation tools, release (\d{1,2}\.\d)(?:, V([\d.]{3,12}))?")
_VARIABLE = re.compile(r"^\s{0,8}(?:[-*+$%>]\s)?(?:export |set |setenv |declare -x |ENV |- )?\"?([A-Z][A-Z0-9_]{2,50})\s?=\s?(.{0,1500}?)\"?\s{0,8}\\?$")  # fmt: skip
_VARIABLE_ABOUT = re.compile(
    r"CUDA_\w+|NCCL_\w+|GLOO_\w+|TORCH\w+|PYTORCH_\w+|LD_LIBRARY_PATH|LD_PRELOAD|MASTER_\w+|RANK|WORLD_SIZE|LOCAL_RANK|"
    r"LOCAL_WORLD_SIZE|SLURM_\w+|OMP_NUM_THREADS|NVIDIA_\w+|HSA_\w+|ROCR_\w+|HIP_\w+|UCX_\w+|FI_\w+|PYTHONPATH|CONDA_PREFIX|"
    r"VIRTUAL_ENV|USE_LIBUV|TP_SOCKET_IFNAME|MKL_\w+|TORCHELASTIC_\w+|CUDAHOSTCXX|CC|CXX"
)
_INTERFACE = re.compile(r"^\d{1,3}: ([\w.@-]{1,20}): <([A-Z_,-]{1,120})> mtu (\d{2,6})")
_PLACES = ("/dev/shm", "/", "/tmp", "/home", "/scratch", "/workspace", "/data", "/mnt")


def read_table_line(draft: Draft, line: str) -> bool:
    """Read a line that belongs to a table; False where it belongs to none."""
    if not line or line.isspace():
        return True
    return any(reader(draft, line) for reader in _READERS)


def _smi(draft: Draft, line: str) -> bool:
    if "Version" in line and _SMI_HEADER.search(line):
        driver, cuda = _SMI_DRIVER.search(line), _SMI_CUDA.search(line)
        draft.put("driver.version", driver[1] if driver else None)
        draft.put("driver.cuda", cuda[1] if cuda and cuda[1][0].isdigit() else None)
        if cuda and cuda[1] == "ERR!":
            draft.hint("driver.error", "nvidia-smi prints CUDA Version: ERR!")
        return True
    if not line.startswith("|"):
        return False
    return _smi_row(draft, line)


def _smi_row(draft: Draft, line: str) -> bool:
    gpu = _SMI_GPU.match(line)
    if gpu:
        name = gpu[2].rstrip(". ")
        draft.gpu(
            int(gpu[1]),
            name=None if "ERR!" in gpu[2] else name,
            pci_bus_id=gpu[4],
            persistence={"On": True, "Off": False}.get(gpu[3]),
            ecc_uncorrectable=int(gpu[6]) if (gpu[6] or "").isdigit() else None,
            ecc_enabled={"Off": False}.get(gpu[6] or "", True if (gpu[6] or "").isdigit() else None),
            problem="nvidia-smi prints ERR! for it" if "ERR!" in line else None,
        )
        return True
    use, mig = _SMI_USE.match(line), _SMI_MIG.match(line)
    if use and draft.gpus:
        _smi_use(draft, use, "ERR!" in line)
    if mig and draft.gpus:
        draft.gpus[-1].setdefault("mig_enabled", mig[1] == "Enabled")
    return bool(use or mig) or not re.search(r"[a-z]{3} [a-z]{3}", line)


def _smi_use(draft: Draft, use: re.Match[str], broken: bool) -> None:
    last = draft.gpus[-1]
    last.setdefault("memory_used_bytes", int(use[1]) << 20)
    last.setdefault("memory_total_bytes", int(use[2]) << 20)
    modes = {
        "Default": "default",
        "E. Process": "exclusive",
        "E. Thread": "exclusive",
        "Prohibited": "prohibited",
    }
    if use[4] in modes:
        last.setdefault("compute_mode", modes[use[4]])
    if broken:
        last.setdefault("problem", "nvidia-smi prints ERR! for it")


def _smi_list(draft: Draft, line: str) -> bool:
    gpu, mig = _SMI_LIST.match(line), _MIG_LIST.match(line)
    if gpu:
        draft.gpu(int(gpu[1]), name=gpu[2], uuid=gpu[3])
    if mig and draft.gpus:
        last = draft.gpus[-1]
        last["mig_enabled"] = True
        last["mig_uuids"] = [*last.get("mig_uuids", ()), mig[3] or f"MIG {mig[1]} device {mig[2]}"]
    return bool(gpu or mig)


def _topology(draft: Draft, line: str) -> bool:
    row = _TOPOLOGY.match(line)
    if row is None:
        return False
    first = int(row[1])
    for second, kind in enumerate(re.findall(r"\w+", row[2])):
        if kind != "X" and second > first:
            draft.links.append({"first": first, "second": second, "kind": kind})
    return True


def _packages(draft: Draft, line: str) -> bool:
    old = _PIP_OLD.match(line)
    if old:
        conda = old[1] == "conda"
        read.package(
            draft, old[2], old[3], source="conda" if conda else "pip", build=old[4] if conda else None
        )
        if conda and old[5] != "pypi" and old[2] in ("pytorch", "cudatoolkit"):
            draft.hint("python.installer", "conda")
        return True
    pinned = _PIP_LINE.match(line)
    if pinned and (pinned[2] == "==" or _LISTABLE.fullmatch(pinned[1])):
        read.package(draft, pinned[1], pinned[3], source="pip")
        return True
    listed = _LISTED.match(line)
    if listed and _LISTABLE.fullmatch(listed[1].lower()):
        channel = listed[4] or ""
        build = listed[3] if listed[3] and not listed[3].startswith(("/", "pypi")) else None
        location = listed[3] if listed[3] and listed[3].startswith("/") else None
        source = "conda" if (build and channel != "pypi") else "pip"
        read.package(draft, listed[1], listed[2], build=build, location=location, source=source)
        return True
    return False


def _df(draft: Draft, line: str) -> bool:
    row = _DF.match(line)
    if row is None:
        return False
    total, used, free = (size_bytes(row[part], "k") for part in (3, 4, 5))
    if row[7] == "/dev/shm":
        draft.put("limits.shm_total_bytes", total)
        draft.put("limits.shm_used_bytes", used)
    elif len(draft.disks) < 50:
        draft.disks.append(
            {"path": row[7], "total_bytes": total, "free_bytes": free, "filesystem": row[2] or None}
        )
    return True


def _ulimit(draft: Draft, line: str) -> bool:
    row = _ULIMIT.match(line)
    if row is None:
        return False
    unit = "k" if (row[2] or "").startswith("kb") else ""
    path = {
        "max locked memory": "limits.memlock_bytes",
        "open files": "limits.nofile",
        "max user processes": "limits.nproc",
        "stack size": "limits.stack_bytes",
    }[row[1]]
    draft.put(path, size_bytes(row[3], unit))
    return True


def _nvcc(draft: Draft, line: str) -> bool:
    row = _NVCC.search(line)
    if row is not None:
        draft.put("compilers.nvcc", row[2] or row[1])
    return row is not None


def _variable(draft: Draft, line: str) -> bool:
    row = _VARIABLE.match(line)
    if row is None or not _VARIABLE_ABOUT.fullmatch(row[1]):
        return False
    draft.env.setdefault(row[1], row[2].strip().strip("'\""))
    return False  # symptoms read the line as well


def _interface(draft: Draft, line: str) -> bool:
    row = _INTERFACE.match(line)
    if row is None or len(draft.interfaces) >= 64:
        return False
    draft.interfaces.append(
        {"name": row[1].split("@")[0], "up": "UP" in row[2].split(","), "mtu": int(row[3])}
    )
    return True


def _kernel(draft: Draft, line: str) -> bool:
    if re.search(
        r"NVRM:|nvidia-nvswitch|nvidia: module|\bXid\b|SXid|DMAR:|AMD-Vi:|Out of memory: Kill", line
    ):
        draft.kernel_log.append(line.strip()[:500])
    return False


_READERS = (_smi_list, _topology, _packages, _df, _ulimit, _nvcc, _interface, _kernel, _variable, _smi)

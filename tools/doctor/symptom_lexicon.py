"""Words of each cause with points: the last thing asked, of a short text in which no symptom was seen.

A cause is named when its words make enough points and clearly more than any other's; the first of them must be there.
What that gives is a hint: it warns, is refuted by facts like any symptom, and never fails a machine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

ENOUGH = 6
AHEAD = 2

_DOCKER = r"docker|container|compose|\bpods?\b|kubernetes|podman|singularity|apptainer|\bimage\b"
_NODES = r"(?:two|2|several|multiple|both|other|second|each|every|all) (?:node|machine|host|server)s?|nnodes: [2-9]|multi-?node"
_NOT = r"(?:not|n.t|never|cannot|nothing|\bno\b)"
_FAILS = r"fail|error|crash|die[sd]?\b|stops?\b|refus|broke|break|raise|abort|cannot|can.t"

LEXICON: Mapping[str, Mapping[str, int]] = {
    "driver-too-old": {
        r"driver": 3, r"\bold(?:er)?\b|outdated|\bnewer\b|too low|insufficient|behind|upgrade the driver|update the driver": 3,
        r"driver[^.\n]{0,40}(?:old|insufficient|supports (?:only )?cuda|update|upgrade)": 3, r"cuda \d{1,2}\.\d|cuda version": 1,
        r"our (?:older )?hosts|cluster": 1, r"module|dkms|kernel|mismatch|reboot|librar": -4,
    },
    "forward-compat-on-geforce": {
        r"compat|\b804\b|newer than the host|forward": 4, r"forward": 4, r"\b804\b": 6, r"geforce|\b[rg]tx\b|titan|gaming|consumer": 2, _DOCKER: 1, r"newer than the host|newer cuda|host.?s (?:driver|cuda)": 3,
    },
    "driver-library-mismatch": {
        r"driver|\bnvml\b|nvidia-smi": 2, r"mismatch|differ|two versions|another version|other version": 3, r"\bnvml\b": 3, r"nvidia-smi": 1, r"librar|user.?space|libcuda": 2,
        r"automatic(?:ally)?[^.\n]{0,20}(?:driver |package )?(?:up(?:grade|date)|install)|unattended|up(?:grade|date)[^.\n]{0,30}driver|driver[^.\n]{0,30}up(?:grade|date)": 4,
        r"reboot|restart": 2, r"broke|stopped|since": 2, r"\b803\b": 6, r"kernel (?:up|head)|dkms|secure ?boot|nouveau|headers|modprobe|installer again": -5, r"slow|speed|faster": -6, r"(?:not|n.t) (?:match|fit)|unsupported[^.\n]{0,20}combination|different releases|own libnvidia|hides? the host|kernel (?:part|module)": 4,
    },
    "kernel-module-not-loaded": {
        r"driver|nvidia|nouveau|modul": 1,
        r"nvidia-smi[^.\n]{0,40}(?:cannot|can.t|not|fail|no )": 3, r"kernel": 3, r"modul|modprobe|dkms|akmod|lsmod": 4, r"nouveau|vfio": 5, r"secure ?boot|\bmok\b|sign": 4, r"headers": 4,
        r"driver": 1, r"reboot|restart|boot": 1, r"(?:find|talk to|reach|communicate with)[^.\n]{0,12}(?:the )?(?:nvidia )?driver": 4, r"install(?:er|ed)?[^.\n]{0,20}again|reinstall": 3, r"cuda kernel|kernel image": -6,
    },
    "fabricmanager-not-running": {
        r"fabric|nvswitch|\b802\b|system (?:is |was )?not|not (?:yet )?initiali": 4, r"nvswitch|nvlink switch": 4, r"\b802\b": 7, r"\bhgx\b|\bdgx\b|sxm|h200|h100|b200|a100": 2, r"not (?:yet )?initiali|system not|not ready": 4, r"nvidia-smi (?:is|looks|works|shows|lists)": 2, r"cuda": 1,
    },
    "exclusive-compute-mode": {
        r"exclusive|busy|compute mode": 4, r"compute mode": 5, r"busy|unavailable": 4, r"second (?:process|rank|job)|another process|more than one process": 3, r"administrators?|cluster|queue": 1, r"all (?:cuda.capable )?devices": 2, r"exclusive scan|mutual": -6,
    },
    "mig-single-device": {
        r"\bmigs?\b|multi-instance|slices?\b|partition": 3,
        r"\bmigs?\b|multi-instance": 3, r"\bslices?\b|partition": 3, r"a100|h100|a30\b|h200|b200": 2, r"only one|one device|single|count": 2, r"\bddp\b|nccl|distributed|ranks": 2, r"tensor|dataset|disk": -4,
    },
    "bios-large-bar-off": {
        r"\bbios\b|firmware|uefi|\bbars?\b|4g|address space|rminit": 3, r"\bbars?\b": 5, r"4g|resizable|decoding|address space": 4, r"mainboard|motherboard|desktop|egpu|external": 2, r"not initiali|no devices|rminit|not (?:found|detected)": 2, r"progress bar|iommu|secure ?boot": -6, r"64-bit window|memory (?:region|window)|assigns? no": 4,
    },
    "gpu-ecc-error": {
        r"\becc\b|uncorrectable|\bxids?\b|double.bit|remap|defective|\brma\b": 3,
        r"\becc\b": 3, r"uncorrectable|double.bit|\bdbe\b": 5, r"xids? ?(?:48|63|64|92|94|95)": 6, r"remap|retire": 4, r"\brma\b|replac|defective|faulty|broken|vendor": 3, r"one (?:gpu|card|node|of)|same (?:gpu|card|node)": 2, r"memory": 1, r"healthy": -4,
    },
    "p2p-blocked-by-acs-iommu": {
        r"\bacs\b|acsctl|iommu|vt-d|amd-vi|\bp2p\b|peer|between (?:the )?(?:two )?(?:gpus|cards)|pcie": 1,
        r"\bacs\b|acsctl": 6, r"iommu|vt-d|amd-vi": 6, r"\bp2p\b|peer": 4, r"hang|freez|stuck|stall|deadlock|for ever": 2, r"pcie|\bphb\b|\bnode\b|root complex|bridge|\bpxb\b|\bpix\b|without nvlink|no nvlink": 2, r"two|several|multi|both": 1,
        r"nccl|all.?reduce|all.?gather|\bddp\b|collective": 1, r"zeros|garbage|corrupt|wrong (?:data|values)": 2,
    },
    "arch-not-in-build": {
        r"\b(?:cards?|gpus?|50[5-9]0|kernel image|sm_\d+)": 1,
        r"\b(?:50[5-9]0|blackwell|hopper|ada\b|b200|gb200|sm_(?:8|9|1[02])\d+)": 2, r"new(?:er|est)? (?:card|gpu|architecture)|latest (?:card|gpu)": 4, r"kernel image|no kernel|architecture|capabilit|\bsm_?\d": 4, r"refused|warning about the card|not supported|does not run|cannot run": 2, r"pin|image|environment|wheel|build": 1,
        r"old|kepler|maxwell|pascal|rocm|radeon|gfx": -4,
    },
    "gpu-too-old-for-build": {
        r"\bold(?:er)? (?:card|gpu)|aging|kepler|maxwell|fermi|pascal|volta": 4, r"dropped|removed|no longer|not any ?more|support ended": 3, r"\bk\d{2}\b|gtx [4-9]\d\d|gt \d{3}|quadro [km]\d|capabilit": 2, r"kernel image|architecture|\bsm_?[2-7]\d": 3, r"release|version|build|wheel|binar|upgrade|packages": 1, r"driver|rocm|radeon": -4, r"\bold\b": 3, r"not supported|unsupported|not usable": 2,
    },
    "rocm-arch-not-in-build": {
        r"\brocm\b|\bhip\b|radeon|\bamd\b|gfx|\brx ?\d{3}": 3, r"radeon|\brx ?\d{3,4}|vega|navi|polaris|\bapu\b|\bamd\b": 3, r"gfx": 4, r"override": 4, r"private build|own build|builds? (?:of|from) (?:torch|source)|patched": 3, r"not (?:supported|included)|unsupported|segfault|segmentation|invalid|abort|works only|crash": 2, r"iommu|hang|collective|rccl": -5,
    },
    "jetson-wrong-wheel": {
        r"jetson|jetpack|\bl4t\b|tegra|\borin\b|xavier": 6, r"\bpip\b|wheel|pypi|requirements|generic": 2, r"cpu|no gpu|not see|false|not (?:available|found)|cuda": 2, r"\.nv\d\d": -8, r"gpu (?:is )?not used": 2,
    },
    "cpu-only-torch": {
        r"torch": 1, r"\bcpu\b": 4, r"cpuonly|\+cpu|_cpu_|cpu_0": 6, r"without cuda|no cuda|lacks cuda|cannot use the gpu|gpu variant|no (?:cuda )?builds? for|cuda builds? (?:are |is )?missing": 5, r"conda|solver|channel|\bpip\b|index": 2, r"upgrade|update|replac|pull|after": 1,
        r"is_available is false|cuda (?:available: )?false|gpu node": 2, r"cpu (?:tensor|only laptop|usage|memory|offload|affinity)|no gpu|without a gpu|cpu ones are requested|ones are requested|laptop": -7,
    },
    "cuda-libs-not-installed": {
        r"lib(?:cublas|cudart|cufft|cusparse|cusolver|curand|nvrtc|nvtoolsext|cupti|nvjitlink|cufile|cudnn|nccl)|nvidia-[a-z]+-cu1\d|cublas|--no-deps|nvidia.s packages": 4, r"not found|missing|no such file|cannot open|cannot be opened|oserror": 3, r"import": 1, r"lock ?file|poetry|bazel|--no-deps|without (?:its )?dependencies|nvidia-[a-z]+-cu1\d": 3,
        r"symbol|version|ld_library_path|passing|without gpu|triton|wsl": -5, r"cublas|cudnn|cufft": 1, r"lacks|not in the|left out": 3,
    },
    "torch-torchvision-mismatch": {
        r"torchvision": 4, r"operator|custom (?:c\+\+ )?ops?\b|\bnms\b|extension": 4, r"not exist|missing|not found|not loaded|not registered|incompatible|does not match|mismatch|fails? to import|does not belong": 3, r"cuda (?:version|build|1)|gpu|cuda backend": -3,
    },
    "torch-torchvision-cuda-mismatch": {
        r"torchvision|torchaudio": 3, r"cuda": 2, r"(?:different|another|other) (?:versions? of )?cuda|cuda (?:versions?|builds?)": 4, r"torch(?: has| with| for)? cuda ?\d{1,2}\.\d[^.\n]{0,3}[^\n]{0,40}torchvision[^\n]{0,20}\d{1,2}\.\d": 5, r"compiled|built|stops|refus": 1,
    },
    "torchvision-cpu-build": {
        r"torchvision|\bnms\b|roi": 3, r"\bcpu\b": 3, r"cuda|gpu": 2, r"only|backend|not implemented|no cuda|without": 2, r"cuda versions?|different": -5,
    },
    "extension-abi-mismatch": {
        r"flash|xformers|apex|mmcv|detectron|torch.?(?:scatter|sparse|cluster)|extension|compiled|attention|deformable|\bops?\b|native module|c\+\+": 3, r"symbol": 4, r"\babi\b": 5, r"(?:built|compiled|made) (?:for|against|with)": 4, r"another torch|other torch|newer torch|older torch|upgrad|updat|pulls a": 2, r"import|load|unavailable": 2,
        r"torchvision|mkl|cublas|cusparse|nccl|cudnn|numpy|nvcc|toolkit|slower|glibcxx|libstdc|libtorch": -5,
    },
    "duplicate-torch-install": {
        r"torch": 1,
        r"two torch|both torch|another torch|second torch|(?:older|other|wrong|old) (?:one|torch|version)": 4, r"\.local|user.?s? (?:site|home)|home (?:folder|directory)|dist-packages|site-packages|pythonpath": 4, r"pip and conda|conda and pip|both": 3, r"shadow|instead|imports?|picks|overwr": 2, r"nccl|numpy|cudnn|cuda 1": -4, r"wins|over the venv|two versions": 2,
    },
    "numpy2-abi": {
        r"numpy": 3, r"numpy[^.\n]{0,20}\b2\b|numpy 2|2\.0|2\.1|2\.2": 2, r"_array_api|multiarray": 6, r"compiled|built|\babi\b|1\.x": 3, r"not available|initiali|crash|refus|convert|\.numpy\(\)": 3, r"dtype|matplotlib|ide\b|pandas": -4, r"torch": 1,
    },
    "mkl-symbol-removed": {r"\bmkl\b": 5, r"ijit|intel": 4, r"symbol|import": 2, r"conda|solver|environment|pin|newest": 2, r"speed|slow|thread": -5},
    "libstdcxx-too-old": {r"glibcxx|cxxabi": 7, r"libstdc|c\+\+ (?:runtime|standard) library": 6, r"old|newer|missing|not found|system": 2, r"exception_ptr": -4},
    "ld-library-path-shadows-cuda": {
        r"ld_library_path|library path|loader path|module load|\bsystem|\btoolkit|symbol": 3, r"libcublas|libcusparse|nvjitlink|libcudart|cusolver": 3, r"system|toolkit|module load|other cuda|another cuda|older cuda|base image": 3, r"symbol|first|wins|shadow|instead|before": 2, r"cuda": 1, r"cudnn|nccl|nvcc|compil|wsl": -5,
    },
    "ld-library-path-shadows-cudnn": {r"cudnn": 5, r"version|mismatch|incompatib|older|another|other|system|found": 2, r"ld_library_path|loaded|wins|first|base image|path|brings": 2, r"cannot open|missing|not installed": -4},
    "nccl-library-mismatch": {r"nccl": 3, r"libnccl": 3, r"symbol|undefined": 4, r"another|other|own|two|system|older|cu11|cu12": 2, r"import|loaded|bundled|package": 2, r"hang|timeout|slow|windows|bandwidth|shm": -6},
    "nccl-not-in-build": {r"windows|\bmac ?os|\bmac\b|darwin": 4, r"nccl": 4, r"distributed|\bddp\b|multi-?gpu|two gpus|\branks?\b|launch|torchrun|fsdp": 3, _FAILS: 1, r"gloo": 2, r"libuv|store|wsl|worker|linux": -5},
    "nvcc-torch-cuda-mismatch": {r"nvcc|toolkit|cuda_home|system cuda": 4, r"build|compil|extension|\bops\b|source": 3, r"mismatch|differ|another|other|older|belongs|does not match|wants": 3, r"container toolkit|torchvision|abi": -5},
    "libuv-missing-windows": {r"windows": 4, r"libuv": 6, r"\bstore\b|rendezvous": 4, r"torchrun|c10d|tcp|launch": 2, r"since 2\.[4-9]|2\.[4-9]": 1},
    "wsl-libcuda-not-on-path": {r"\bwsl ?2?\b|windows subsystem|microsoft-standard": 6, r"libcuda|libcuda\.so|triton|ldconfig|library path": 4, r"not (?:found|available|visible)|cannot|no gpu|false": 2, r"not seen|invisible": 2,
    },
    "container-without-gpus": {_DOCKER: 3, r"--gpus|passing gpus|passing (?:the )?gpus|with(?:out)? gpus?|gpu (?:flag|option|reservation|section)|--nv\b|nvidia runtime|device request": 4, r"no nvidia driver|not found|false|no gpu|cannot see|does not see|not visible|not exist": 3, r"host (?:is fine|works|sees|has)|on the host": 2, r"daemon|select|toolkit|lost|days|hours|unknown error|shm|worker.? (?:is )?killed|mismatch|library version": -5},
    "container-toolkit-missing": {_DOCKER: 2, r"toolkit": 4, r"runtime": 3, r"select|device driver|capabilit": 4, r"daemon": 3, r"--gpus|gpus all|start": 1, r"nvcc|symbol|days|hours": -5, r"resolve|\bcdi\b|nvidia\.com/gpu=": 5,
    },
    "container-lost-gpu-cgroup": {_DOCKER: 3, r"days|hours|a while|some time|overnight|sporadic|suddenly|at first|later": 3, r"daemon-reload|systemd|cgroup|cpu.?manager|kubelet": 5, r"los[et]s?\b|lost|no longer|disappear|gone|unknown error|cannot (?:see|access)": 3, r"gpus?|nvidia|nvml": 1, r"memory|leak|oom|ecc|xid": -5},
    "shm-too-small": {r"shm|shared memory|bus error|worker|loader": 2,
        r"\bshm\b|/dev/shm|shared memory|ncclshm": 5, r"bus error": 5, r"worker|loader|num_workers": 2, _DOCKER: 3, r"crash|kill|hang|dead|fail": 1, r"--ipc|shm-size|memory-backed|volume": 4, r"leak|out of memory|smem|triton": -5},
    "memlock-limit-too-low": {r"memlock|locked|ulimit|pin|infiniband|\bib\b|rdma|roce|ibv_": 1,
        r"memlock|locked memory|ulimit -l|pinned memory limit": 6, r"infiniband|\bib\b|rdma|roce|verbs|ibv_": 4, r"register|registration|allocat|reg_mr|create_cq|create_qp": 4, r"limit|kb\b|small": 1, r"timeout|unreachable|port": -4},
    "hostname-resolves-to-loopback": {r"127\.0\.[01]\.1|localhost|loopback|(?<![\w:])::1\b": 6, _NODES: 3, r"gloo|rendezvous|connect|address": 2, r"host ?name|/etc/hosts|own name": 3, r"refus|timeout|hang|instead": 1, r"in use|single": -5},
    "cuda-visible-devices-invalid": {r"cuda_visible_devices|visible devices": 4, r"hides?|hidden|empty|invalid|nonexist|not exist|missing|lack|no gpu|no cuda": 4, r"hard-?coded?|selects?|picks?|device [1-9]|gpu [1-9]|index|number|wrong": 2, r"only one|one (?:gpu|card)|single": 2, r"effect|ignored|import|too late|typo": -5},
    "cuda-visible-devices-set-too-late": {r"cuda_visible_devices|visible devices|os\.environ|the variable|choice of gpu|select\w* (?:the |a )?(?:\w+ )?gpu": 4, r"no effect|without effect|ignored|does nothing|not respected|whatever|has stopped": 4, r"top of|before (?:the )?import|after (?:the )?import|import|moved|too late|earlier": 3, r"always|still|gpu 0|first gpu|all gpus": 2, r"script|python|code|line|file": 1, r"no cuda gpus|hides|empty": -5, r"changes nothing|still seen|all gpus are": 3, r"notebook|cell|main\(\)|inside": 2, r"removed|uuid|profile": -5,
    },
}  # fmt: skip


def likely_cause(text: str) -> str | None:
    """The cause whose words a short text (in lower case) is made of, or None.

    >>> likely_cause("symptom: choosing with cuda_visible_devices has no effect until it is moved before the import")
    'cuda-visible-devices-set-too-late'
    >>> likely_cause("symptom: the loss is not a number after two epochs") is None
    True
    """
    points = sorted(((_points(text, words), cause) for cause, words in _compiled()), reverse=True)
    (best, cause), (second, _) = points[0], points[1]
    return cause if best >= ENOUGH and best - second >= AHEAD else None


def _points(text: str, words: tuple[tuple[re.Pattern[str], int], ...]) -> int:
    return sum(worth for word, worth in words if word.search(text)) if words[0][0].search(text) else 0


@functools.cache
def _compiled() -> tuple[tuple[str, tuple[tuple[re.Pattern[str], int], ...]], ...]:
    return tuple(
        (cause, tuple((re.compile(word), worth) for word, worth in words.items()))
        for cause, words in LEXICON.items()
    )

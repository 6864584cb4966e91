"""The variables that matter to a run; secrets are left out, misspelt names are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene

_PREFIXES = [
    "ACCELERATE_",
    "CONDA_",
    "CUBLAS_",
    "CUDA",
    "CUDNN_",
    "DEEPSPEED",
    "DS_",
    "FI_",
    "FSDP_",
    "GLOO_",
    "GOMP_",
    "GPU_",
    "HF_",
    "HIP_",
    "HSA_",
    "IBV_",
    "KMP_",
    "LD_",
    "LOCAL_",
    "MASTER_",
    "MIOPEN_",
    "MKL_",
    "MPI_",
    "MV2_",
    "NCCL_",
    "NODE_",
    "NUMEXPR_",
    "NVIDIA_",
    "NVSHMEM_",
    "OFI_",
    "OMP_",
    "OMPI_",
    "OPENBLAS_",
    "PET_",
    "PHALANX_",
    "PMI_",
    "PMIX_",
    "PYTHON",
    "PYTORCH_",
    "RANK",
    "RCCL_",
    "ROCM_",
    "ROCR_",
    "SHARP_",
    "SLURM_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "UCC_",
    "UCX_",
    "VIRTUAL_ENV",
    "WORLD_",
    "XDG_CACHE_",
    "XLA_",
]
_NAMES = frozenset(
    [
        "CC",
        "CXX",
        "GROUP_RANK",
        "HOME",
        "HOSTNAME",
        "KUBERNETES_SERVICE_HOST",
        "MAX_JOBS",
        "NNODES",
        "PATH",
        "ROLE_RANK",
        "SHELL",
        "TMPDIR",
        "TZ",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
    ]
)
# Parts of names that a slip of the fingers leaves in place: NCLL_DEBUG, CUAD_VISIBLE_DEVICES, GLOO-SOCKET.
_NEARLY = re.compile(
    r"NC.?.?L|NL?CCL|CUD|CUA|VISI|GLO|TORC|PYTO|MAST|SOCK|RANK|WORLD|OMP_|DEBUG|IFNAME|SLURM|ALLOC_CONF",
    re.IGNORECASE,
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/@\s]+@")


def probe(scene: Scene) -> Partial:
    """``env`` of the scene."""
    return {"env": relevant(scene.environ)}


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a check or a reader may want.

    >>> relevant({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_x", "EDITOR": "vi", "NCLL_DEBUG": "INFO"})
    {'NCCL_DEBUG': 'INFO', 'NCLL_DEBUG': 'INFO'}
    """
    return {
        name: _URL_USER.sub("...@", value)
        for name, value in sorted(environ.items())
        if (name in _NAMES or name.startswith(tuple(_PREFIXES)) or _NEARLY.search(name))
        and not _SECRET.search(name)
    }

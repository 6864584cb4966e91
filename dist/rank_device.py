"""The device of a rank: which GPU, or why none; and threads set too late."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from phalanx.dist.arguments import short


def choose_device(local_rank: int, ranks_here: int, backend: str | None, device: str | None) -> torch.device:
    """This rank's device; never a modulo, which would put several ranks on one GPU without a word."""
    if device != "cpu" and _take_own_instance(local_rank, ranks_here):
        return torch.device("cuda", 0)
    count = 0 if device == "cpu" else torch.cuda.device_count()
    if count == 0 or not torch.cuda.is_available():
        if backend is not None and "nccl" in backend.lower():
            raise no_gpu_for_nccl(backend)
        if device == "cuda":
            raise ValueError(f"device='cuda', but CUDA shows no GPU{_visible_hint()}.\nFix: {_visible_fix()}")
        if device is None:
            _warn_of_hidden_gpus()
        return torch.device("cpu")
    _verify_selection(count)
    if local_rank < count and ranks_here <= count:
        return torch.device("cuda", local_rank)
    bound_per_task = "CUDA_VISIBLE_DEVICES" in os.environ or "SLURM_PROCID" in os.environ
    shares = backend is not None and "nccl" not in backend.lower()
    if count == 1 and (bound_per_task or shares):
        # One GPU per task, as --gpus-per-task=1 gives. Ranks that see the *same* one are told apart by UUID later.
        return torch.device("cuda", 0)
    raise ValueError(
        f"{ranks_here} ranks on this node, but CUDA shows {count} GPU{'s' if count > 1 else ''}{_visible_hint()}.\n"
        "There are more ranks than GPUs with nccl: two ranks on one GPU are refused by NCCL, or run out of memory.\n"
        f"Fix: phalanx run --nproc-per-node={count}, or init_world(device='cpu')"
    )


def named_device(device: object, default: torch.device) -> torch.device:
    """The device an argument names, ``default`` for None.

    Raises:
        ValueError: There is none of that name here.
    """
    if device is None:
        return default
    try:
        if not isinstance(device, (str, torch.device, int)) or isinstance(device, bool):
            raise TypeError(f"{type(device).__name__} names none")
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, TypeError, ValueError, OverflowError, AssertionError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"device={short(device)}: no device here ({reason}).\nFix: leave it out for the world's, {default}"
        ) from error
    return place


def _take_own_instance(local_rank: int, ranks_here: int) -> bool:
    """With a list of MIG instances, of which CUDA shows the first alone, leave this rank its own; whether it was so."""
    from phalanx.dist.device_selection import refuse_after_cuda
    from phalanx.dist.devices import VARIABLE, visible_devices_per_rank

    value = os.environ.get(VARIABLE, "")
    if torch.version.cuda is None or ranks_here == 1 or not value.startswith("MIG-") or "," not in value:
        return False
    names = visible_devices_per_rank(ranks_here)
    if names is None or local_rank >= len(names):
        return False
    refuse_after_cuda(names[local_rank])
    os.environ[VARIABLE] = names[local_rank]
    warnings.warn(
        f"{VARIABLE}={value!r}: CUDA shows a process one MIG instance, so local rank {local_rank} takes {names[local_rank]} as "
        "cuda:0. Collectives between MIG instances are not generally supported: NCCL may refuse them, gloo works.",
        stacklevel=4,
    )
    return True


def _verify_selection(count: int) -> None:
    """Whether CUDA, now that it starts, shows what select_devices chose in this process."""
    from phalanx.dist import device_selection

    if device_selection._selected is not None:
        device_selection.verify_selection([gpu_uuid(index) for index in range(count)])


def no_gpu_for_nccl(backend: str) -> ValueError:
    return ValueError(
        f"backend={backend!r} asks for nccl, but CUDA shows no GPU{_visible_hint()}.\n"
        "There are more ranks than GPUs with nccl, which needs one for each rank.\n"
        "Fix: leave backend out (gloo on the CPU), or run where there are GPUs"
    )


def _visible_hint() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" with CUDA_VISIBLE_DEVICES={value!r}"


def _visible_fix() -> str:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi lists; or init_world(device='cpu')"
    return "see that nvidia-smi works and that torch is a CUDA build; or init_world(device='cpu')"


def _warn_of_hidden_gpus() -> None:
    """CUDA_VISIBLE_DEVICES names GPUs that are not there: training on the CPU then is hardly meant."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if torch.version.cuda is None or not value or value in ("-1", "NoDevFiles"):
        return
    warnings.warn(
        f"CUDA_VISIBLE_DEVICES={value!r}, but CUDA shows no GPU: running on the CPU. Fix: {_visible_fix()}",
        stacklevel=4,
    )


def gpu_uuid(index: int | None) -> str:
    """By CUDA; empty where it does not say."""
    try:
        text = str(torch.cuda.get_device_properties(index).uuid)
    except (AttributeError, RuntimeError):  # torch without uuid
        return ""
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def gpu_identity(index: int | None) -> str:
    """What tells the devices of a node's ranks apart: a UUID. Two instances of one GPU are two devices."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if value.startswith("MIG-"):
        return value.split(",")[0].strip()  # CUDA may report its parent's UUID
    return gpu_uuid(index)


def physical_gpu(index: int | None) -> str:
    """``physical 5 (00000000:07:00.0, GPU-...)``: nvidia-smi's number, which ``cuda:2`` need not be, and what it is."""
    from phalanx.dist.devices import nvml_inventory

    identity = gpu_identity(index)
    pci = _pci_bus_id(index)
    for gpu in nvml_inventory() or []:
        # By what it is, not by counting: CUDA and nvidia-smi may number differently.
        if (identity and identity in (gpu.uuid, *gpu.mig_uuids)) or (pci and pci == gpu.pci_bus_id.lower()):
            return f"physical {gpu.index} ({gpu.pci_bus_id}, {identity or gpu.uuid})"
    return f"physical unknown ({identity or pci or 'no UUID'})"


def _pci_bus_id(index: int | None) -> str:
    """In NVML's spelling, empty where torch does not say."""
    try:
        known: Any = torch.cuda.get_device_properties(index)  # attributes that its stubs lack
        return f"{known.pci_domain_id:08x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    except (AttributeError, RuntimeError):
        return ""


def warn_of_late_threads() -> None:
    """OpenMP reads its variables once: setting them after `import torch` changes nothing."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text = os.environ.get(name, "").split(",")[0].strip()
        if not text.isdigit() or (name == "MKL_NUM_THREADS" and "OMP_NUM_THREADS" in os.environ):
            continue
        # Equal to what the process started with: then somebody called torch.set_num_threads, on purpose.
        if torch.get_num_threads() != int(text) and _initial_variable(name) != os.environ[name]:
            warnings.warn(
                f"{name}={text} was set after torch had read it: torch runs {torch.get_num_threads()} threads. "
                f"Fix: export {name} before Python starts, or call torch.set_num_threads({text})",
                stacklevel=3,
            )


def _initial_variable(name: str) -> str | None:
    try:
        block = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None
    for entry in block.split(b"\0"):
        key, _, value = entry.partition(b"=")
        if key == name.encode():
            return value.decode(errors="replace")
    return None

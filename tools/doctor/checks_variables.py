"""Environment variables: visible devices, misspelt, renamed and contradicting ones, Slurm's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

from phalanx.dist.gpus import Gpu
from phalanx.dist.visibility import InvalidVisibleDevices, visible_devices
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.judging import fail, proven, suspected, symptom_weight, warn
from phalanx.tools.doctor.reading import cuda_works, env, nvidia_gpus, torch_version
from phalanx.tools.facts.tables import variables
from phalanx.tools.facts.versions import at_least

_OURS = re.compile(
    r"^(?:NCCL|TORCH_NCCL|TORCH_DISTRIBUTED|TORCH_FR|GLOO|CUDA_VISIBLE|CUDA_DEVICE|CUDA_LAUNCH|MASTER|TORCH_CPP|PYTORCH_)"
)
_NEAR_MISSES = (
    "CUDA_VISIBLE_DEVICE",
    "CUDA_VISIBLE_DEVISES",
    "CUDA_VISIBLE",
    "MASTER_ADDRESS",
    "WORLDSIZE",
    "LOCALRANK",
    "NCCL_SOCKET_IFACE",
)
_OTHERS = ("CCL_", "RCCL_", "HCCL_", "BCCL_", "HIP_", "ROCR_", "GPU_", "MSCCL")
_CONTRADICTIONS = (
    ("NCCL_IB_DISABLE", "1", "NCCL_IB_HCA", None, "InfiniBand is switched off, so NCCL_IB_HCA does nothing"),
    ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_LEVEL", None, "peer-to-peer is switched off, so NCCL_P2P_LEVEL does nothing"),
    ("NCCL_IB_DISABLE", "1", "NCCL_NET", "IB", "InfiniBand is switched off and asked for"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "blocking waits make asynchronous error handling do nothing"),
)  # fmt: skip


def check_visible(facts: Facts) -> Iterator[Finding]:
    """CUDA takes the list up to the first entry that is not there, and none of a list with a repeat."""
    value = env(facts).get("CUDA_VISIBLE_DEVICES")
    cause, title = "cuda-visible-devices-invalid", "CUDA_VISIBLE_DEVICES hides GPUs that were meant"
    count = len(nvidia_gpus(facts)) if facts.gpus is not None else None
    fix = (
        f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(count)))}   (or: unset CUDA_VISIBLE_DEVICES)"
        if count
        else "unset CUDA_VISIBLE_DEVICES   (nvidia-smi -L lists what there is)",
    )
    judged = _judge_list(facts, value, count)
    if judged is not None:
        serious, evidence = judged
        if serious and cuda_works(facts) is not True:
            yield proven(facts, cause, title, evidence, fix, 86)
        else:
            yield warn(cause, title, evidence, fix, 65)
    else:
        found = suspected(
            facts, cause, title, fix, refuted=cuda_works(facts) is True and symptom_weight(facts, cause) < 80
        )
        if found:
            yield found
    late = suspected(
        facts, "cuda-visible-devices-set-too-late", "CUDA_VISIBLE_DEVICES was set after CUDA had read it",
        ("set it before Python starts: CUDA_VISIBLE_DEVICES=1 python train.py", "or before the first import of torch, or select_devices() of phalanx"),
    )  # fmt: skip
    if late:
        yield late


def _judge_list(facts: Facts, value: str | None, count: int | None) -> tuple[bool, tuple[str, ...]] | None:
    """Whether every GPU is hidden, and what was read; None where the list is right or cannot be judged."""
    if value is None or (count == 0 and facts.live):
        return None
    shown = f"CUDA_VISIBLE_DEVICES={value!r}"
    text = value.strip()
    if text in ("", "-1", "NoDevFiles"):
        return (True, (shown, "it hides every GPU")) if count and cuda_works(facts) is False else None
    entries = [entry.strip() for entry in text.split(",")]
    if count is None or count == 0:
        odd = [entry for entry in entries if not re.fullmatch(r"\d{1,3}|(?:GPU|MIG)-[\w/-]{1,80}", entry)]
        return (
            (True, (shown, f"{odd[0]!r} is no GPU's number or UUID"))
            if odd and entries != ["all"]
            else ((True, (shown, "'all' is not a value CUDA knows")) if odd else None)
        )
    if any(entry.startswith("MIG-") for entry in entries) or (
        any(not gpu.uuid for gpu in nvidia_gpus(facts)) and any(entry.startswith("GPU-") for entry in entries)
    ):
        return None
    try:
        numbers = all(re.fullmatch(r"-?\d+", entry) for entry in entries)
        listed = _listed(facts)
        seen = (
            visible_devices({"CUDA_VISIBLE_DEVICES": value}, inventory=count if numbers else listed)
            if numbers or listed
            else None
        )
    except InvalidVisibleDevices as error:
        return True, (shown, str(error).split("\n")[0])
    except ValueError:
        return None
    if seen is None:
        odd = [entry for entry in entries if not re.fullmatch(r"\d{1,3}|GPU-[\w-]{1,60}", entry)]
        return (
            (
                entries.index(odd[0]) == 0,
                (shown, f"{odd[0]!r} is no GPU's number or UUID: it and what follows are hidden"),
            )
            if odd
            else None
        )
    if len(seen.physical) < len(entries):
        return not seen.physical, (
            shown,
            f"{len(seen.physical)} of {len(entries)} are visible",
            *seen.notes[:2],
        )
    return None


def _listed(facts: Facts) -> list[Gpu]:
    """The GPUs by UUID, as the driver compares them; none where one's is not known."""
    gpus = nvidia_gpus(facts)
    if not all(gpu.uuid for gpu in gpus):
        return []
    return [Gpu(index, uuid=gpu.uuid or "") for index, gpu in enumerate(gpus)]


def check_ranks_fit(facts: Facts) -> Finding | None:
    """NCCL refuses two ranks on one device."""
    ranks = (facts.job and facts.job.local_world_size) or 0
    seen = facts.torch.device_count if facts.torch else None
    count = seen if seen is not None else (len(nvidia_gpus(facts)) if facts.gpus else None)
    if not count or ranks <= count or (facts.job and facts.job.backend == "gloo"):
        return None
    return fail(
        "fewer-gpus-than-requested",
        f"{ranks} local ranks for {count} GPUs",
        (f"visible GPUs: {count}",),
        (f"phalanx run --nproc-per-node {count} ... (torchrun: the same option)",),
        82,
    )


def check_spelling(facts: Facts) -> Iterator[Finding]:
    """A misspelt variable is read by nobody, and nobody says so."""
    known = variables()
    for name, value in sorted(env(facts).items()):
        if name in known:
            continue
        if _OURS.match(name) or name in _NEAR_MISSES:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.86)
        else:  # a slip in the first letters: NCLL_DEBUG
            near = _slips(name, known)
        if near and near[0] not in env(facts) and not name.startswith(near[0] + "_"):
            yield warn(
                "variable-misspelt",
                f"{name} is read by nothing; {near[0]} is",
                (f"{name}={value}",),
                (f"export {near[0]}={value}; unset {name}",),
                53,
            )


def _slips(name: str, known: Iterable[str]) -> list[str]:
    """A known name with the same letters but one or two; other libraries' own prefixes are no slips."""
    if name.startswith(_OTHERS):
        return []
    alike = [other for other in known if _OURS.match(other) and abs(len(other) - len(name)) <= 1]
    return difflib.get_close_matches(name, alike, n=1, cutoff=0.9)


def check_renamed(facts: Facts) -> Iterator[Finding]:
    """Old names go unread sooner or later; debugging settings cost speed."""
    known = variables()
    torch = torch_version(facts)
    for name, value in sorted(env(facts).items()):
        row = known.get(name)
        if row is None:
            continue
        heir = row["replaced_by"]
        if row["status"] in ("renamed", "removed", "deprecated") and heir and heir not in env(facts):
            if name.startswith(("PYTORCH_CUDA_ALLOC", "PYTORCH_HIP_ALLOC")) or (
                torch and not at_least(torch, "2.2")
            ):
                continue
            yield warn(
                "variable-deprecated",
                f"{name} is {'no longer read' if row['status'] == 'removed' else 'an old name'}",
                (f"{name}={value}",),
                (f"export {heir}={value}; unset {name}",),
                26,
            )
        elif row["production"] == "debug only" and value not in ("", "0"):
            yield warn(
                "variable-debug-only",
                f"{name} is for debugging: it costs speed",
                (f"{name}={value}", row["meaning"]),
                (f"unset {name}",),
                25,
            )
    if env(facts).get("CUDA_LAUNCH_BLOCKING") == "1":
        yield warn(
            "variable-debug-only",
            "CUDA_LAUNCH_BLOCKING=1 makes every kernel wait",
            ("CUDA_LAUNCH_BLOCKING=1",),
            ("unset CUDA_LAUNCH_BLOCKING",),
            25,
        )


def check_contradictions(facts: Facts) -> Iterator[Finding]:
    """Two settings of which one undoes the other."""
    for first, value, second, other, why in _CONTRADICTIONS:
        found = env(facts).get(second)
        if env(facts).get(first) == value and found and (other is None or found == other):
            yield warn(
                "variables-contradict",
                why,
                (f"{first}={value}", f"{second}={found}"),
                (f"unset {first}   or: unset {second}",),
                29,
            )
    rank, world = env(facts).get("RANK", ""), env(facts).get("WORLD_SIZE", "")
    if rank.isdigit() and world.isdigit() and int(rank) >= int(world):
        yield fail(
            "variables-contradict",
            f"RANK={rank} is outside WORLD_SIZE={world}",
            (),
            ("unset RANK WORLD_SIZE LOCAL_RANK, and start with phalanx run or torchrun",),
            70,
        )
    set_ones = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in env(facts)]
    if facts.live and "RANK" in set_ones and len(set_ones) < 4:
        missing = [
            name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in set_ones
        ]
        yield warn(
            "launcher-env-missing",
            f"RANK is set, {' and '.join(missing)} not",
            (),
            ("start with phalanx run or torchrun, or unset RANK",),
            39,
        )


def check_slurm(facts: Facts) -> Iterator[Finding]:
    """What Slurm gave against what is visible."""
    given = env(facts).get("SLURM_GPUS_ON_NODE", "")
    if given.isdigit() and facts.gpus is not None and facts.live:
        count = (
            facts.torch.device_count
            if facts.torch and facts.torch.device_count is not None
            else len(nvidia_gpus(facts))
        )
        if count < int(given):
            yield fail(
                "fewer-gpus-than-requested",
                f"Slurm gave {given} GPUs, {count} are visible",
                (f"SLURM_GPUS_ON_NODE={given}",),
                ("srun nvidia-smi -L; look at ConstrainDevices and gres.conf",),
                74,
            )
    cpus = env(facts).get("SLURM_CPUS_PER_TASK", "")
    workers = (facts.job and facts.job.loader_workers) or 0
    if cpus.isdigit() and workers and int(cpus) < workers:
        yield warn(
            "cpu-limit-too-low",
            f"Slurm gave {cpus} CPUs per task for {workers} loader workers",
            (f"SLURM_CPUS_PER_TASK={cpus}",),
            (f"sbatch --cpus-per-task={workers + 1}",),
            34,
        )
    if (
        env(facts).get("SLURM_NTASKS_PER_NODE", "1").isdigit()
        and int(env(facts).get("SLURM_NTASKS_PER_NODE", "1")) > 1
        and "TORCHELASTIC_RUN_ID" in env(facts)
    ):
        yield warn(
            "launcher-started-many-times",
            "torchrun runs in a step with several tasks per node",
            (f"SLURM_NTASKS_PER_NODE={env(facts)['SLURM_NTASKS_PER_NODE']}",),
            ("sbatch --ntasks-per-node=1 for torchrun or phalanx run",),
            49,
        )

"""Limits of this process and its container: shared memory, locked memory, descriptors, memory, CPUs, disks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.tools.doctor.facts import DiskFacts, Facts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.judging import fail, fine, proven, suspected, symptom_weight, warn
from phalanx.tools.doctor.reading import in_container, nodes, nvidia_gpus, says

MIB, GIB = 1 << 20, 1 << 30
_SHM_FAILS, _SHM_WARNS = 256 * MIB, GIB
_RANK_BYTES, _WORKER_BYTES = (
    2 * GIB,
    GIB // 2,
)  # what a rank, and each loader worker of it, takes at the least
_RDMA_BYTES = GIB


def words(count: int | float) -> str:
    """ "64 MiB", "1.5 GiB"."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{int(count)} bytes"


def check_shm(facts: Facts) -> Finding | None:
    """Loader workers hand batches over in /dev/shm, and NCCL its buffers: docker gives 64 MiB."""
    cause, title = "shm-too-small", "/dev/shm is too small"
    limits = facts.limits
    total = limits.shm_total_bytes if limits else None
    used = (limits.shm_used_bytes if limits else None) or 0
    fix = (
        "docker run --shm-size=8g ... (or --ipc=host); compose: shm_size: 8gb",
        "Kubernetes: an emptyDir of medium Memory mounted at /dev/shm",
        "sudo mount -o remount,size=8G /dev/shm",
    )
    fix = fix if in_container(facts) or not facts.live else fix[::-1]
    if total is None:
        return suspected(facts, cause, title, fix)
    evidence = (f"/dev/shm: {words(total)}, {words(used)} used",)
    told = symptom_weight(facts, cause) >= 60 or says(facts, r"bus error|dead-?lock|hang|worker|nccl")
    if total < _SHM_FAILS:
        return proven(facts, cause, title, evidence, fix, 86)
    if used > 0.8 * total:
        return (
            proven(facts, cause, "/dev/shm is nearly full", evidence, fix, 80)
            if told
            else warn(
                cause,
                "/dev/shm is nearly full",
                evidence,
                (*fix, "ls -l /dev/shm shows what earlier runs left"),
                66,
            )
        )
    if total < _SHM_WARNS:
        return (
            proven(facts, cause, title, evidence, fix, 78)
            if symptom_weight(facts, cause) >= 60
            else warn(cause, title, evidence, fix, 48)
        )
    found = suspected(facts, cause, title, fix, evidence=evidence, refuted=symptom_weight(facts, cause) < 86)
    return found or fine(cause, f"/dev/shm has {words(total)}")


def check_memlock(facts: Facts) -> Finding | None:
    """RDMA pins its buffers; a small limit lets no adapter register them."""
    cause, title = "memlock-limit-too-low", "the locked-memory limit is too low for RDMA"
    limit = facts.limits.memlock_bytes if facts.limits else None
    fix = (
        "docker run --ulimit memlock=-1 ...",
        "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf, then log in again",
        "Slurm: LimitMEMLOCK=infinity in slurmd's unit, PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
    )
    adapters = bool(facts.network and facts.network.infiniband)
    if limit is not None and 0 <= limit < _RDMA_BYTES:
        evidence = (f"ulimit -l: {words(limit)}",)
        if adapters or symptom_weight(facts, cause) >= 60:
            return proven(
                facts,
                cause,
                title,
                (*evidence, "InfiniBand or RoCE adapters are there" if adapters else ""),
                fix,
                87,
            )
        if (nodes(facts) or 1) > 1 or limit < 64 << 10:
            return warn(cause, title, evidence, fix, 44)
        return None
    return suspected(facts, cause, title, fix, refuted=limit == -1)


def check_descriptors(facts: Facts) -> Finding | None:
    """Workers pass tensors by file descriptor."""
    limit = facts.limits.nofile if facts.limits else None
    fix = ("ulimit -n 65536   (docker run --ulimit nofile=65536:65536; for good: /etc/security/limits.d)",)
    cause, title = "too-many-open-files", "the limit of open files is low"
    if limit is not None and 0 < limit < 512:
        return proven(facts, cause, title, (f"ulimit -n: {limit}",), fix, 76)
    ranks, workers = _ranks(facts), _workers(facts)
    if limit is not None and 0 < limit < max(1024, 256 * (1 + workers)):
        return warn(
            cause, title, (f"ulimit -n: {limit}; {ranks} ranks with {workers} loader workers each",), fix, 40
        )
    return suspected(facts, cause, "too many files were open", fix)


def check_processes(facts: Facts) -> Iterator[Finding]:
    """Each rank starts tens of threads, each worker again."""
    limits = facts.limits
    need = 64 * _ranks(facts) * (1 + _workers(facts))
    for name, value, line in (
        ("ulimit -u", limits.nproc if limits else None, "ulimit -u unlimited"),
        (
            "the container's pids limit",
            limits.cgroup_pids if limits else None,
            "docker run --pids-limit=-1 ...",
        ),
    ):
        if value is not None and 0 < value < need:
            yield warn(
                "process-limit-too-low",
                "the limit of processes and threads is low",
                (f"{name}: {value}; {need} may be needed",),
                (line,),
                42,
            )


def _ranks(facts: Facts) -> int:
    return (facts.job and facts.job.local_world_size) or max(1, len(nvidia_gpus(facts)))


def _workers(facts: Facts) -> int:
    return (facts.job and facts.job.loader_workers) or 0


def check_memory(facts: Facts) -> Finding | None:
    """Host memory, or the container's share of it, against ranks and loader workers."""
    limits, memory = facts.limits, facts.memory
    cap = limits.cgroup_memory_bytes if limits else None
    total = memory.total_bytes if memory else None
    most = min((value for value in (cap, total) if value and value > 0), default=None)
    if most is None:
        return None
    need = _ranks(facts) * (_RANK_BYTES + _workers(facts) * _WORKER_BYTES)
    capped = cap is not None and cap == most
    evidence = [
        f"{'cgroup limit' if capped else 'memory'}: {words(most)}",
        f"{_ranks(facts)} ranks with {_workers(facts)} loader workers each take {words(need)} or more",
    ]
    fix = (
        "fewer loader workers, or more memory: sbatch --mem=0, docker run --memory=..., Kubernetes: limits: memory",
    )
    used = (limits.cgroup_memory_used_bytes if limits else None) or 0
    if capped and used > 0.9 * most:
        return warn(
            "host-memory-low",
            "the container's memory is nearly used up",
            (*evidence, f"used: {words(used)}"),
            fix,
            56,
        )
    if most < need:
        return (fail if most < GIB * _ranks(facts) // 2 else warn)(
            "host-memory-low", "little memory for the ranks and their loader workers", evidence, fix, 57
        )
    return fine("host-memory-low", f"{words(most)} of memory{' (cgroup limit)' if capped else ''}")


def check_cpus(facts: Facts) -> Finding | None:
    """Ranks that share a core wait for each other at every step."""
    limits, platform = facts.limits, facts.platform
    counts = (limits and limits.cgroup_cpus, limits and limits.affinity_cpus, platform and platform.cpu_count)
    known = [count for count in counts if count]
    ranks = _ranks(facts)
    if not known or min(known) >= ranks:
        return None
    evidence = (f"{min(known):g} CPUs for {ranks} ranks",)
    return warn(
        "cpu-limit-too-low",
        "fewer CPUs than ranks",
        evidence,
        ("sbatch --cpus-per-task=..., docker run --cpus=..., taskset",),
        38,
    )


_REAL = re.compile(
    r"^/(?:snap|boot|run|dev|sys|proc|var/lib/(?:snapd|docker)|etc)\b|^/mnt/wsl|docker/overlay"
)


def check_disks(facts: Facts) -> Iterator[Finding]:
    """Space and inodes where the run writes."""
    told = suspected(
        facts,
        "disk-full",
        "no space where the run writes",
        ("df -h .; df -i .; remove old checkpoints, or write elsewhere",),
    )
    if told:
        yield told
    for disk in facts.disks or ():
        if not _REAL.search(disk.path):
            yield from _disk(facts, disk)


def _disk(facts: Facts, disk: DiskFacts) -> Iterator[Finding]:
    place = f"{disk.path}{f' ({disk.purpose})' if disk.purpose else ''}"
    fix = (f"df -h {disk.path}; df -i {disk.path}; remove old checkpoints, or write elsewhere",)
    if disk.read_only or disk.writable is False:
        # A job may be started from a folder that it does not write to.
        needed = facts.live and disk.purpose in ("output folder", "temporary files")
        yield (fail if needed else warn)(
            "disk-not-writable",
            f"{place} cannot be written",
            (f"{disk.filesystem or 'file system'}, {'read-only' if disk.read_only else 'no permission'}",),
            ("write elsewhere, or ask for the permission",),
            68,
        )
        return
    free = disk.free_bytes
    if free is not None and free < 100 * MIB and (disk.total_bytes or GIB) > 10 * MIB:
        yield (fail if facts.live else warn)(
            "disk-full",
            f"{place} is full",
            (f"{words(free)} free of {words(disk.total_bytes or 0)}",),
            fix,
            77 if facts.live else 43,
        )
    elif free is not None and free < 5 * GIB and (disk.total_bytes or 0) > 10 * GIB:
        yield warn("disk-full", f"{place} is nearly full", (f"{words(free)} free",), fix, 32)
    if disk.inodes_free is not None and disk.inodes_total and disk.inodes_free < 1000:
        yield fail(
            "disk-full",
            f"{place} has no inodes left",
            (f"{disk.inodes_free} of {disk.inodes_total} inodes free",),
            fix,
            75,
        )
    if (
        disk.filesystem
        and disk.filesystem.startswith(("nfs", "cifs", "smb", "fuse.sshfs"))
        and disk.purpose == "temporary files"
    ):
        yield warn(
            "temporary-files-on-network",
            f"{place} is on {disk.filesystem}: locks and file:// stores are slow there",
            (),
            ("export TMPDIR=/tmp   (a local disk)",),
            19,
        )

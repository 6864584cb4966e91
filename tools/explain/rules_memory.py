"""Rules: memory of the GPU and of the host, shared memory, files and disks."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule

_SMALLER_STEP = (
    "halve the micro batch and double the accumulation (the same global batch): --micro-batch-size",
    "phalanx fit MODEL names the largest micro batch per strategy; bf16, activation checkpointing or fsdp need less",
)

RULES = (
    Rule(
        id="cuda-oom",
        when=("out of memory",),
        patterns=(
            r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory\.? (?:Tried|Attempted) to allocate (?P<asked>[\d.]+ ?[KMGT]?i?B)",
            r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory",
            r"(?:CUDA|HIP) (?:runtime )?error(?: ?\(2\)|: 2)? ?: ?out of memory|cudaErrorMemoryAllocation|cuda runtime error \(2\)",
            r"CUDA_ERROR_OUT_OF_MEMORY|OutOfMemoryError|CUDA failed with error out of memory|hipErrorOutOfMemory",
        ),
        unless=(
            r"NCCL WARN|Cuda failure|NCCL error|ncclUnhandledCudaError|ray\.exceptions|java\.lang|node running low",
            r"Killed process",
        ),
        cause=("{memory}", "the step needs more GPU memory than there is"),
        fix=_SMALLER_STEP,
        look=("phalanx gpus (who holds memory on that GPU)",),
        refine="gpu_memory",
        weight=60,
    ),
    Rule(
        id="cublas-oom-in-disguise",
        when=("cublas",),
        patterns=(
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"CUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)[`'\" ]{0,3} when calling [`'\"]?cublas(?:Lt)?Create",
            r"cublas runtime error ?: ?(?:resource allocation failed|library not initialized)",
            r"failed to create cublas handle|CUBLAS_STATUS_NOT_INITIALIZED",
        ),
        cause=("cuBLAS could not create its handle: the GPU's memory is full",),
        fix=(
            *_SMALLER_STEP,
            "if memory is free all the same: CUDA_LAUNCH_BLOCKING=1, since an index out of range (a label, a token id) shows like this too",
        ),
        look=("phalanx gpus (free memory, other processes)",),
        weight=55,
    ),
    Rule(
        id="cudnn-oom-in-disguise",
        when=("cudnn", "unable to find an engine", "find was unable"),
        patterns=(
            r"CUDNN_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR(?:_DEVICE_ALLOCATION_FAILED)?)",
            r"Unable to find a valid cuDNN algorithm",
            r"(?:GET|FIND) was unable to find an engine to execute this computation",
        ),
        unless=(r"CUDNN_STATUS_(?:SUBLIBRARY|VERSION)",),
        cause=(
            "cuDNN could not create its handle or found no room for an algorithm: the GPU's memory is full",
        ),
        fix=(
            *_SMALLER_STEP,
            "if memory is free all the same: check that torch's own cuDNN is loaded (phalanx doctor)",
        ),
        look=("phalanx gpus (free memory, other processes)",),
        weight=52,
    ),
    Rule(
        id="nccl-cuda-oom",
        when=("out of memory", "failed to cuda", "failed to allocate"),
        patterns=(
            r"NCCL WARN[^\n]{0,80}(?:Cuda|HIP) failure (?:\d+ )?'?out of memory",
            r"(?:Cuda|HIP) failure (?:\d+ )?'?out of memory",
            r"Failed to CUDA (?:calloc|malloc|host alloc)(?: async)? (?P<bytes>\d+)",
            r"(?:NCCL error|ncclUnhandledCudaError)[^\n]{0,400}out of memory",
        ),
        cause=(
            "NCCL found no GPU memory for its own buffers ({bytes} bytes)",
            "NCCL found no GPU memory for its own buffers: torch's allocator, or another process, holds all of it",
        ),
        fix=(
            "leave room for NCCL: a smaller micro batch, or torch.cuda.set_per_process_memory_fraction(0.95)",
            "NCCL_BUFFSIZE=2097152 and fewer process groups need less",
        ),
        look=(
            "whether two ranks share one GPU: torch.cuda.set_device(local_rank) before the first collective",
        ),
        weight=75,
        beats=("cuda-oom", "cuda-oom-other-process"),
    ),
    Rule(
        id="host-oom-kill",
        when=("oom", "killed process", "sigkill", "out of memory", "killed", "exit", "signal", "return code"),
        patterns=(
            r"Out of memory: Kill(?:ed)? process (?P<pid>\d+) \((?P<name>[^)]{1,40})\)[^\n]{0,120}?anon-rss:(?P<rss_kb>\d+)kB",
            r"Memory cgroup out of memory|oom-kill(?:er)?[:( ]|oom_kill\b|invoked oom-killer|OOMKilled|OOM[- ]killed|oom_reaper",
            r"Out of memory: Kill(?:ed)? process (?P<pid>\d+)",
            r"slurmstepd: error: Detected \d+ oom[-_ ]kill|srun: error: [^\n]{0,120}: Out Of Memory|OUT_OF_ME\+|State: OUT_OF_MEMORY",
            r"slurmstepd: error: (?:Exceeded|Step[^\n]{0,40} exceeded) (?:job|step)? ?memory limit",
            r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]{1,80})\) is killed by signal: Killed",
            r"killed by the kernel's OOM killer",
            r"exitcode ?: ?-9\b|exitcode: ?-9\b|exit(?:s|ed)? (?:with )?(?:return )?code[ =:]{1,3}(?:-9|137)\b|exit status 137",
            r"Signal 9 \(SIGKILL\) received by PID (?P<pid>\d+)|died with <Signals\.SIGKILL: 9>|terminated with signal SIGKILL",
            r"local_rank: \d+ \(pid: (?P<pid>\d+)\)[^\n]{0,40}exitcode: -9|failed \(exitcode: -9\)",
            r"^(?:[\w./-]{0,60}: line \d+: +)?(?:\d+ )?Killed(?: {2,}[^\n]{0,200}| \(core dumped\))?$",
            r"on signal 9 \(Killed\)|Task was killed due to the node running low on memory|node running low on memory",
            r"SIGKILL: killed by the kernel's OOM killer",
        ),
        unless=(
            r"no sign of the OOM killer",
            r"CUDA out of memory",
            r"Restarts? count|to avoid (?:an )?oom|oom[_-]score",
        ),
        cause=(
            "the kernel killed process {pid} ({name}, {rss_gib} resident): the host's memory, or the job's limit on it, is full",
            "the kernel killed process {pid} with SIGKILL: the host's memory, or the job's limit on it, is full",
            "a process was ended by SIGKILL, as the kernel does when the host's memory, or the job's limit on it, is full",
        ),
        fix=(
            "fewer loader workers (each holds its own copy of what it touches), a smaller prefetch_factor, no in-memory copy of the data per rank",
            "or more memory for the job: --mem in Slurm, resources.limits.memory in Kubernetes, --memory in Docker",
        ),
        look=(
            "dmesg -T | grep -i oom on that node; sacct -j JOB --format=MaxRSS,State",
            "whether every rank loads the whole checkpoint into host memory",
        ),
        refine="killed",
        weight=55,
    ),
    Rule(
        id="host-out-of-memory",
        when=("allocate memory", "memoryerror", "unable to allocate", "bad_alloc"),
        patterns=(
            r"DefaultCPUAllocator: (?:can't|not enough) (?:allocate )?memory[^\n]{0,80}?you tried to allocate (?P<bytes>\d+) bytes",
            r"DefaultCPUAllocator: (?:can't|not enough)",
            r"_?ArrayMemoryError: Unable to allocate (?P<asked>[\d.]+ [KMGT]iB)",
            r"Unable to allocate (?P<asked>[\d.]+ [KMGT]iB) for an array",
            r"\[Errno 12\] Cannot allocate memory|^MemoryError\b|std::bad_alloc",
        ),
        cause=(
            "the host has no memory left for {asked} at once",
            "the host has no memory left for {bytes} bytes at once",
            "the host has no memory left",
        ),
        fix=(
            "load the data piece by piece (memory-mapped, or per sample), fewer loader workers, a node with more memory",
        ),
        look=("free -g, ulimit -v, and the memory limit of the container or Slurm job",),
        weight=58,
    ),
    Rule(
        id="shm-too-small",
        when=("bus error", "shared memory", "shm", "sigbus", "/torch_", "posix_fallocate", "exitcode"),
        patterns=(
            r"is killed by signal: Bus error",
            r"Unexpected bus error encountered in worker",
            r"insufficient shared memory|out of shared memory|raise your shared memory limit",
            r"unable to (?:write to|resize|mmap \d+ bytes from|allocate shared memory)[^\n]{0,60}file <?/?torch_[^\n]{0,80}(?:No space|Cannot allocate|\(28\)|\(12\))",
            r"unable to (?:write to|resize) file </torch_",
            r"No space left on device: '?/?dev/shm|/dev/shm[^\n]{0,80}No space left|shm[^\n]{0,80}No space left on device",
            r"NCCL WARN[^\n]{0,80}(?:shared memory segment|posix_fallocate failed|failed to extend /dev/shm)",
            r"Error: failed to extend /dev/shm[^\n]{0,80}|Error while (?:creating|attaching to) shared memory segment",
            r"Signal 7 \(SIGBUS\)|exitcode ?: ?-7\b|died with <Signals\.SIGBUS|SIGBUS:",
        ),
        unless=(r"Too many open files",),
        cause=("shared memory (/dev/shm) is too small for what loader workers or NCCL put there",),
        fix=(
            "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm",
            "or num_workers=0, or torch.multiprocessing.set_sharing_strategy('file_system')",
        ),
        look=("df -h /dev/shm; leftovers of killed runs: ls -la /dev/shm",),
        weight=70,
        beats=("disk-full", "worker-killed", "host-oom-kill", "segfault"),
    ),
    Rule(
        id="too-many-open-files",
        when=("too many open files", "ancdata", "too many fds", "in read-write mode", "errno"),
        patterns=(
            r"Too many open files",
            r"received (?P<items>\d+) items of ancdata",
            r"too many fds",
            r"unable to open shared memory object </torch_[^>\n]{1,80}> in read-write mode",
            r"\[Errno (?:24|23)\]",
        ),
        cause=("the limit on open files is reached: loader workers send each tensor as a file descriptor",),
        fix=(
            "ulimit -n 65536 before the start (LimitNOFILE in a unit, --ulimit nofile=65536 in Docker)",
            "or torch.multiprocessing.set_sharing_strategy('file_system')",
        ),
        look=("whether the script keeps tensors of the loader in a list: each holds its file open",),
        weight=76,
        beats=("shm-too-small",),
    ),
    Rule(
        id="disk-full",
        when=(
            "no space left",
            "quota",
            "pytorchstreamwriter",
            "iostream error",
            "file write failed",
            "unexpected pos",
            "requested and",
            "storagefull",
        ),
        patterns=(
            r"No space left on device: ?(?:b?['\"](?P<path>[^'\"\n]{1,200})['\"])",
            r"No space left on device|os error 28\b|StorageFull|\[Errno 28\]",
            r"Disk quota exceeded|os error 122|\[Errno 122\]",
            r"PytorchStreamWriter failed (?:writing|closing)|basic_ios::clear: iostream error|^iostream error|: iostream error",
            r"inline_container\.cc:\d+\] ?\. ?unexpected pos \d+ vs \d+|unexpected pos \d+ vs \d+",
            r"\d+ requested and \d+ written|file write failed",
        ),
        unless=(r"/torch_|/dev/shm|NCCL WARN|shared memory",),
        cause=(
            "nothing more can be written to {path}: the disk or quota is full",
            "nothing more can be written: the disk, its inodes or a quota is full",
        ),
        fix=(
            "free space where the run writes, or write elsewhere (--output-dir, TMPDIR, HF_HOME, TORCH_HOME)",
            "keep fewer checkpoints: CheckpointManager(keep=2)",
        ),
        look=(
            "df -h, df -i and quota -s for the folder that is written to; /tmp on compute nodes is often small",
        ),
        weight=60,
    ),
    Rule(
        id="gpu-ecc-error",
        when=("ecc", "xid"),
        patterns=(
            r"uncorrectable (?:ECC|NVLink) error|CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorECCUncorrectable|Uncontained ECC|[Dd]ouble[- ][Bb]it ECC",
            r"Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]{7,20})\): (?P<xid>48|63|64|92|94|95)\b",
            r"(?:CUDA|Cuda) (?:error|failure)[^\n]{0,40}ECC",
        ),
        unless=(r"uncorrectable NVLink",),
        cause=(
            "the GPU at PCI {pci} reports an uncorrectable memory error (Xid {xid}: {xid_name})",
            "a GPU reports an uncorrectable memory error (ECC)",
        ),
        fix=(
            "take the node out of service and reset the GPU (nvidia-smi --gpu-reset, or reboot); exclude it meanwhile: sbatch --exclude",
            "if it returns, have the GPU replaced",
        ),
        look=("nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg | grep Xid",),
        refine="xid",
        weight=85,
        beats=("cuda-illegal-memory-access", "nccl-timeout-unknown", "gpu-lost"),
    ),
    Rule(
        id="gpu-lost",
        when=("fallen off the bus", "gpu is lost", "xid", "unspecified launch failure"),
        patterns=(
            r"GPU has fallen off the bus|GPU is lost|Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]{7,20})\): (?P<xid>79|119|120|74|61|62)\b",
        ),
        cause=(
            "the GPU at PCI {pci} stopped answering (Xid {xid}: {xid_name})",
            "a GPU stopped answering: it has fallen off the bus",
        ),
        fix=("reboot the node; if it returns, check power, cooling and seating, or have the GPU replaced",),
        look=("dmesg | grep -i -e xid -e nvrm -e pcie",),
        refine="xid",
        weight=85,
        beats=("cuda-illegal-memory-access", "nccl-timeout-unknown"),
    ),
    Rule(
        id="nvlink-error",
        when=("nvlink error",),
        patterns=(r"uncorrectable NVLink error",),
        cause=("an NVLink between GPUs failed during a transfer",),
        fix=("reset the GPUs of that node together (reboot); if it returns, have the link checked",),
        look=("nvidia-smi nvlink -e; dmesg | grep Xid",),
        weight=85,
    ),
)

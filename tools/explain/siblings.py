"""Causes that no single line shows: words and fixes for what `refinements` decides from the whole log."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule


def _sibling(
    id: str, cause: tuple[str, ...], fix: tuple[str, ...], look: tuple[str, ...] = (), weight: int = 65,
    beats: tuple[str, ...] = (),
) -> Rule:  # fmt: skip
    return Rule(id=id, when=(), patterns=(), cause=cause, fix=fix, look=look, weight=weight, beats=beats)


SIBLINGS = {
    rule.id: rule
    for rule in (
        _sibling(
            "cuda-oom-fragmentation",
            ("{memory}", "enough memory is reserved, in pieces that are too small"),
            (
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (older torch: max_split_size_mb:128)",
                "inputs of one length, or padded to a few lengths, keep the pieces reusable",
            ),
            ("torch.cuda.memory_summary()",),
        ),
        _sibling(
            "cuda-oom-other-process",
            ("{memory}", "another process holds the GPU's memory"),
            (
                "phalanx gpus shows who it is; end it, or choose an idle GPU: phalanx run --gpus auto",
                "leftovers of a killed run: fuser -v /dev/nvidia*, then kill those",
            ),
            ("whether several ranks of this job sit on one GPU: torch.cuda.set_device(local_rank)",),
        ),
        _sibling(
            "checkpoint-loaded-on-gpu0",
            (
                "{memory}; it happened while a checkpoint was loaded: without map_location each rank loads it to GPU 0",
                "processes {pids} hold memory on GPU 0 beside their own GPU: without map_location each rank loads to GPU 0",
                "without map_location each rank loads the checkpoint to GPU 0",
            ),
            (
                "torch.load(path, map_location='cpu'), then load_state_dict",
                "torch.cuda.set_device(local_rank) before anything uses CUDA",
            ),
            ("phalanx gpus: memory of every rank on GPU 0",),
            weight=75,
        ),
        _sibling(
            "inplace-operation",
            (
                "an in-place operation changed {tensor} (version {version} instead of {expected}) before the backward pass used it",
                "an in-place operation changed a tensor before the backward pass used it",
            ),
            (
                "torch.autograd.set_detect_anomaly(True) names it; then x = x + y instead of x += y, inplace=False",
                "two losses of one graph: both backward() before the first optimizer.step()",
            ),
        ),
        _sibling(
            "state-dict-keys",
            (
                "the checkpoint belongs to another model: it lacks {missing_one} and has {unexpected_one}",
                "the checkpoint belongs to another model: it lacks {missing_one}",
                "the checkpoint belongs to another model: it has {unexpected_one}",
                "the checkpoint belongs to another model",
            ),
            (
                "compare both: phalanx ckpt diff FILE FILE; a container needs its entry: load_state_dict(ckpt['state_dict'])",
            ),
        ),
        _sibling(
            "nccl-timeout-slow-rank0",
            (
                "rank 0 worked longer than the limit of {limit} while the others waited for it in {op}",
                "rank 0 worked longer than the limit while the others waited for it",
            ),
            (
                "share the work, or do it before the group is made; init_process_group(timeout=timedelta(hours=2)) where it must stay",
                "rank_zero_first() is made for downloads and preprocessing; barrier(timeout_s) names who is missing",
            ),
            ("what rank 0 did last: preprocessing, evaluation, an upload",),
        ),
        _sibling(
            "nccl-timeout-uneven-ranks",
            (
                "ranks are at different collectives: {positions}: they ran different numbers of steps",
                "rank {missing} did not come to the collective at which the others waited {limit}",
                "ranks ran different numbers of steps",
            ),
            (
                "the same number of batches per rank: a ShardLoader or DistributedSampler with drop_last, join() for uneven inputs",
                "no `continue`, early stop or evaluation on some ranks only; skip a bad batch on all ranks together",
            ),
            ("len(loader) on every rank",),
        ),
        _sibling(
            "nccl-timeout-during-save",
            (
                "ranks waited {limit} while a checkpoint was saved: not all took part in it, or it took longer than that",
                "ranks waited while a checkpoint was saved: not all took part in it, or it took too long",
            ),
            (
                "state_dict() of fsdp and ZeRO-3, and save_checkpoint of DeepSpeed, must be called by every rank, not under `if rank == 0`",
                "a longer timeout (init_process_group(timeout=..)), or asynchronous, sharded checkpoints: CheckpointManager",
            ),
            ("the speed of the disk that is written to",),
        ),
        _sibling(
            "every-process-is-rank0",
            ("{count} processes each believe that they are rank 0 of 1: the launcher's variables do not reach the script",),
            (
                "start by phalanx run --nproc-per-node N (or torchrun), or let init_world() read the Slurm or MPI step",
                "Lightning under Slurm: --ntasks-per-node = devices, and srun before python",
            ),
            ("a script that sets RANK, WORLD_SIZE or CUDA_VISIBLE_DEVICES itself",),
            weight=76,
        ),
        _sibling(
            "cuda-visible-devices-invalid",
            (
                "CUDA_VISIBLE_DEVICES={value} hides every GPU of this machine",
                "CUDA_VISIBLE_DEVICES hides every GPU of this machine",
            ),
            ("unset CUDA_VISIBLE_DEVICES, or name GPUs that exist: phalanx gpus",),
            weight=70,
        ),
    )
}  # fmt: skip
